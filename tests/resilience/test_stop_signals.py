"""Stop requests by signals."""

import os
import signal
import time

import pytest

from trainer.resilience.stop_signals import StopRequest
from trainer.system import logging


@pytest.fixture
def request_after(monkeypatch):
    """Function that returns the request after signals, whose messages have been collected in `lines`."""

    def read(lines, *signals):
        request = StopRequest.__new__(StopRequest)
        request.requested = False
        monkeypatch.setattr(logging, "info", lambda line: lines.append((line, request.requested)))
        pipe, end = os.pipe()
        os.write(end, bytes(signals))
        os.close(end)
        with pytest.raises(ValueError, match="unpack"):  # the end of the pipe
            request._read(pipe)
        return request

    return read


def test_only_sigterm_and_sigint_request_a_stop(request_after):
    """The pipe also receives other signals, such as SIGCHLD, which their own handlers process."""
    assert not request_after([], signal.SIGCHLD, signal.SIGCHLD).requested
    assert request_after([], signal.SIGCHLD, signal.SIGTERM).requested


def test_a_request_is_confirmed_once_and_is_in_effect_before_its_message(request_after):
    lines = []
    request_after(lines, signal.SIGINT, signal.SIGINT)
    assert lines == [("SIGINT: the run stops after this step or the next; a second signal ends it immediately", True)]


def test_a_second_signal_ends_the_process_with_a_line(request_after, monkeypatch, capsys):
    codes, clock = [], iter([0.0, 0.5, 2.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(os, "_exit", codes.append)
    request_after([], signal.SIGINT, signal.SIGINT, signal.SIGTERM)
    assert codes == [143]
    assert capsys.readouterr().err == "a second SIGTERM ends this process\n"

"""Stop requests by signals."""

import os
import signal
import time

import pytest

from trainer.base.system import console
from trainer.base.system.signals import STOP_SIGNALS
from trainer.resilience.stop_signals import StopRequest


@pytest.fixture
def request_after(monkeypatch):
    """Function that returns the request after signals at the given times, whose messages are collected in `lines`."""

    def receive(lines, *signals):
        request = StopRequest()
        monkeypatch.setattr(console, "info", lambda line: lines.append((line, request.requested)))
        for second, number in signals:
            monkeypatch.setattr(time, "monotonic", lambda second=second: second)
            request.receive(number)
        return request

    return receive


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_request_is_confirmed_once_and_is_in_effect_before_its_message(request_after, number):
    lines = []
    request_after(lines, (0.0, number), (0.5, number))
    text = "the run stops after this step or the next; a repeated SIGTERM or SIGINT ends it immediately"
    assert lines == [(f"{number.name}: {text}", True)]


def test_a_repeated_sigterm_or_sigint_ends_the_process_with_a_line(request_after, monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    request_after([], (0.0, signal.SIGINT), (0.5, signal.SIGINT), (2.0, signal.SIGTERM))
    assert codes == [143]
    assert capsys.readouterr().err == "a repeated SIGTERM ends this process\n"


def test_other_signals_never_end_the_process_nor_count_as_the_first_sigterm(request_after, monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"exited with {code}"))
    hang_ups = [(float(second), signal.SIGHUP) for second in range(0, 10, 2)]
    assert request_after([], *hang_ups, (10.0, signal.SIGUSR1), (12.0, signal.SIGTERM), (14.0, signal.SIGHUP)).requested


def test_a_signal_during_the_delivery_of_the_last_records_does_not_promise_a_step(monkeypatch):
    lines, request = [], StopRequest()
    monkeypatch.setattr(console, "info", lines.append)
    request.has_ended = True
    request.receive(signal.SIGINT)
    text = "the run has ended and delivers its last records; a repeated SIGTERM or SIGINT ends it immediately"
    assert lines == [f"SIGINT: {text}"]


def test_ctrl_c_in_a_python_program_is_a_request_until_training_has_ended(monkeypatch):
    monkeypatch.setattr(console, "info", lambda line: None)
    request = StopRequest()
    end = request.receive_interrupts()
    os.kill(os.getpid(), signal.SIGINT)
    assert request.requested
    end()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_program_keeps_its_own_reaction_to_ctrl_c():
    received, previous = [], signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        request = StopRequest()
        end = request.receive_interrupts()
        os.kill(os.getpid(), signal.SIGINT)
        end()
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert received == [signal.SIGINT, signal.SIGINT] and not request.requested

"""Stop requests by signals."""

import os
import signal

import pytest

from trainer.resilience.stop_signals import StopRequest


def test_only_sigterm_and_sigint_request_a_stop():
    """The pipe also receives other signals, such as SIGCHLD, which their own handlers process."""

    def requested(*signals):
        request = StopRequest.__new__(StopRequest)
        request.requested = False
        read, write = os.pipe()
        os.write(write, bytes(signals))
        os.close(write)
        with pytest.raises(ValueError, match="unpack"):  # the end of the pipe
            request._read(read)
        return request.requested

    assert not requested(signal.SIGCHLD, signal.SIGCHLD)
    assert requested(signal.SIGCHLD, signal.SIGTERM)

"""Stop requests by SIGTERM and SIGINT."""

import math
import os
import signal
import sys
import threading
import time

from trainer.system import logging

_SAME_REQUEST_S = 1.0
"""Seconds within which several signals count as one request. A process may receive a scheduler's signal twice: directly, and
forwarded by its launcher."""


class StopRequest:
    """A request to stop after the current step, set by SIGTERM or SIGINT. A second signal ends the process immediately.

    A thread reads the signals, because Python runs no handlers while the main thread is inside a collective.
    """

    def __init__(self) -> None:
        self.requested = False
        read, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: None)
        signal.set_wakeup_fd(self.pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._read, args=(read,), daemon=True).start()

    def _read(self, pipe: int) -> None:
        first = math.inf
        while True:
            (signum,) = os.read(pipe, 1)
            if signum not in (signal.SIGTERM, signal.SIGINT):
                continue  # another module handles this signal, such as SIGCHLD of torch's data loader
            now, name = time.monotonic(), signal.Signals(signum).name
            if now > first + _SAME_REQUEST_S:
                print(f"a second {name} ends this process", file=sys.stderr, flush=True)
                os._exit(128 + signum)
            first, requested = min(first, now), self.requested
            self.requested = True  # before the message, which may have to wait for its reader
            if not requested:
                logging.info(f"{name}: the run stops after this step or the next; a second signal ends it immediately")

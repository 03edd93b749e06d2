"""SIGTERM and SIGINT as requests to stop."""

import math
import os
import signal
import sys
import threading
import time

_SAME_REQUEST_S = 1.0
"""Schedulers signal a process and its launcher, which passes the signal on: within this time it is one request."""


class StopRequest:
    """SIGTERM and SIGINT ask for an end after the step; a second one ends at once, whatever the process is doing.

    The signals are read by a thread: the main one may be inside a collective, where Python runs no handler.
    """

    def __init__(self) -> None:
        self.requested = False
        read, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self.pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._read, args=(read,), daemon=True).start()

    def _read(self, pipe: int) -> None:
        first = math.inf
        while True:
            (number,) = os.read(pipe, 1)
            if number not in (signal.SIGTERM, signal.SIGINT):
                continue  # others have handlers too: torch's data loader for SIGCHLD
            now = time.monotonic()
            if now > first + _SAME_REQUEST_S:
                print(f"ended at once by a second {signal.Signals(number).name}", file=sys.stderr, flush=True)
                os._exit(128 + number)
            first = min(first, now)
            self.requested = True

"""Stop requests by signals."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

from trainer.base.system import console
from trainer.base.system.signals import ENDING_SIGNALS, SAME_REQUEST_S
from trainer.base.system.streams import print_error


class StopRequest:
    """A request to stop after the current step, set by any stop signal. A repeated SIGTERM or SIGINT ends the process at once.
    Other signals do not count: a terminal that closes may repeat SIGHUP, and a scheduler may send SIGUSR1 before its SIGTERM.

    `receive` is the reaction of a `SignalListener` from the first step on.
    """

    def __init__(self) -> None:
        self.requested = False
        self.has_ended = False
        """Whether the last step is complete and saved. Metrics may still be on their way to a service."""
        self._first_s = math.inf  # time of the first SIGTERM or SIGINT

    def receive_interrupts(self) -> Callable[[], None]:
        """Let Ctrl-C in a Python program be a request to stop. Return a function that ends this.

        A program that has chosen its own reaction, such as train.py, keeps it. Only the main thread can handle signals.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return lambda: None
        signal.signal(signal.SIGINT, lambda number, frame: self.receive(signal.Signals(number)))
        return partial(signal.signal, signal.SIGINT, signal.default_int_handler)

    def receive(self, number: signal.Signals) -> None:
        requested, self.requested = self.requested, True  # before the message, which may have to wait for its reader
        if number in ENDING_SIGNALS:
            now = time.monotonic()
            if now > self._first_s + SAME_REQUEST_S:
                print_error(f"a repeated {number.name} ends this process")
                os._exit(128 + number)
            self._first_s = min(self._first_s, now)
        if not requested:
            line = "the run stops after this step or the next; a repeated SIGTERM or SIGINT ends it immediately"
            if self.has_ended:
                line = (
                    "the run has ended and delivers its last records; a repeated SIGTERM or SIGINT ends it immediately"
                )
            console.info(f"{number.name}: {line}")

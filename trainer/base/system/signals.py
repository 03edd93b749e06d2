"""Signals that ask a process to stop.

This module imports little, so that commands can call it before their other imports.
"""

import os
import signal
import threading
from collections.abc import Callable

from trainer.base.system.streams import print_error

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals of terminals and schedulers. By default, each of them would end the process without a save."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Stop signals that end a run immediately if they are repeated."""
LAUNCHER_PID = "LAUNCHER_PID"
"""Variable that a launcher sets for its ranks, with its process id. It then prints which signal has ended them."""
SAME_REQUEST_S = 1.0
"""Seconds within which several signals count as one request. A process may receive a scheduler's signal twice: directly, and
forwarded by its launcher."""


class SignalListener:
    """Thread that calls a function for each stop signal.

    Python runs signal handlers in the main thread only, and not while this thread is inside a collective or waits for another
    node. Only the number of a signal is therefore written to a pipe, which the thread reads.

    A signal that the parent process has chosen to ignore stays ignored: `nohup` ignores SIGHUP, and a script ignores SIGINT in
    its background jobs. Processes that the main thread starts inherit that the other stop signals are blocked. A scheduler may
    send a signal to all processes of a job, and it would end those that have not chosen their reaction yet.
    """

    def __init__(self, react: Callable[[signal.Signals], None]):
        """react: function that the thread calls for each signal. It may be replaced at any time."""
        self.react = react
        self._pipe, write = os.pipe()
        os.set_blocking(write, False)
        signals = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in signals:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(signals,), daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def _listen(self, signals: list[signal.Signals]) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # the launcher of this process has blocked them
        while number := os.read(self._pipe, 1):
            if number[0] in signals:  # another module handles other signals, such as SIGCHLD of torch's data loader
                self.react(signal.Signals(number[0]))


def end_before_training_line(number: signal.Signals) -> str:
    return f"{number.name}: the run ends before its first step, so there is nothing to save"


def end_before_training(number: signal.Signals, clean_up: Callable[[], None] = lambda: None) -> None:
    """Print one line per node, call `clean_up`, and end this process with exit code 128 + n."""
    if os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get(LAUNCHER_PID) != str(os.getppid()):
        print_error(end_before_training_line(number))
    try:
        clean_up()
    finally:
        os._exit(128 + number)

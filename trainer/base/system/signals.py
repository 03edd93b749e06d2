"""Signals that ask a process to stop: which they are, how a process receives them, and all reactions to them.

A rank and a launcher have a `SignalListener`, whose reaction changes while they run: `end_before_training`, then
`StopRequest.receive` of a rank or `SignalForwarder.receive` of a launcher, and `end_silently` after a failure. Scripts call
`exit_on_interrupt`, then `raise_interrupts`. Processes that they start call `detach_signals`.

This module imports little, so that commands can call it before their other imports.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn

from trainer.base.system.dependencies import require_dependencies
from trainer.base.system.process import children, die_with_parent, local_rank
from trainer.base.system.streams import open_standard_streams, print_error, require_stdout

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
            if number[0] in signals:  # another module may handle other signals, such as SIGCHLD
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


def end_silently(number: signal.Signals) -> None:
    """End this process without a line, after a failure. The launcher ends the ranks that lost the connection to it."""
    os._exit(128 + number)


class Repetition:
    """Which SIGTERM or SIGINT repeats an earlier one. Other signals do not count: a terminal that closes may repeat SIGHUP, and a
    scheduler may send SIGUSR1 before its SIGTERM."""

    def __init__(self) -> None:
        self._first_s = math.inf  # time of the first SIGTERM or SIGINT

    def is_repeated(self, number: signal.Signals) -> bool:
        if number not in ENDING_SIGNALS:
            return False
        now = time.monotonic()
        repeated = now > self._first_s + SAME_REQUEST_S
        self._first_s = min(self._first_s, now)
        return repeated


class StopRequest:
    """A request to stop after the current step, set by any stop signal. A repeated SIGTERM or SIGINT ends the process at once.

    `receive` is the reaction of a `SignalListener` from the first step on.
    """

    def __init__(self, announce: Callable[[str], None]):
        """announce: function that prints the confirmation of the request."""
        self.announce = announce
        self.requested = False
        self.has_ended = False
        """Whether the last step is complete and saved. Metrics may still be on their way to a service."""
        self._repetition = Repetition()

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
        if self._repetition.is_repeated(number):
            print_error(f"a repeated {number.name} ends this process")
            os._exit(128 + number)
        if not requested:
            line = "the run stops after this step or the next; a repeated SIGTERM or SIGINT ends it immediately"
            if self.has_ended:
                line = (
                    "the run has ended and delivers its last records; a repeated SIGTERM or SIGINT ends it immediately"
                )
            self.announce(f"{number.name}: {line}")


class SignalForwarder:
    """Reaction to stop signals that forwards them to the ranks, which then save and exit. If there are no ranks, it ends the
    launcher. A repeated SIGTERM or SIGINT kills ranks that do not react to it.

    The launcher prints one line about ranks that end before the first step, whichever ranks have received the signal. torchrun
    sends SIGTERM to the others, and some lose their connections first.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.repeated = False
        self._repetition = Repetition()
        self.started = False
        """Whether there were ranks. A launcher that has none any more waits for those of other nodes, or restarts its own."""

    def receive(self, number: signal.Signals) -> None:
        ranks = children()
        first, repeated = self.signal is None, self._repetition.is_repeated(number)
        if first or repeated:
            self.signal = number
        self.repeated = self.repeated or repeated
        send(number, ranks)
        if first and not ranks and not self.started:
            end_before_training(number, clean_up=lambda: send(signal.SIGKILL, children()))
        if first:
            threading.Thread(target=prevent_restarts, args=(set(ranks),), daemon=True).start()
        if repeated:
            deadline_s = time.monotonic() + SAME_REQUEST_S
            while children() and time.monotonic() < deadline_s:
                time.sleep(0.05)
            send(signal.SIGKILL, ranks)
            if not ranks:
                print_error(f"a repeated {number.name} ends the launcher")
                os._exit(128 + number)

    def watch_for_ranks(self) -> None:
        """Set `started` as soon as there are ranks."""

        def watch() -> None:
            while not children():
                time.sleep(0.1)
            self.started = True

        threading.Thread(target=watch, daemon=True).start()

    def exit_code(self, error) -> int:
        """Return the launcher's exit code after ranks have failed. Print the reason if the ranks did not live to print it."""
        rank, failure = error.get_first_failure()
        codes = [failure.exitcode for failure in error.failures.values()]
        if self.signal is not None:
            if 128 + self.signal not in codes:
                print_error(f"the run was stopped by {self.signal.name} before its state could be saved")
            elif not self.repeated:  # otherwise, a rank has printed it
                print_error(end_before_training_line(self.signal))
            return 128 + self.signal
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        if code - 128 in {*signal.Signals}:
            name = signal.Signals(code - 128).name
            print_error(f"rank {rank} was killed by {name}; the other ranks of this node were stopped")
        return code


def prevent_restarts(ranks: set[int]) -> NoReturn:
    """Kill all later ranks. torchrun starts them if a rank fails after the run was asked to stop."""
    while True:
        time.sleep(0.1)
        send(signal.SIGKILL, [rank for rank in children() if rank not in ranks])


def send(number: int, processes: list[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(process, number)


def exit_on_interrupt() -> None:
    """Let Ctrl-C print one line and exit with code 130 until `raise_interrupts` is called. Importing torch takes seconds.

    Scripts call this first, so it also opens standard streams that are closed, and exits with code 2 if stdout was, or if a
    dependency is not installed.
    """
    open_standard_streams()
    require_stdout()
    require_dependencies()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job of a shell ignores SIGINT
        signal.signal(signal.SIGINT, _exit_interrupted)


def _exit_interrupted(*_: object) -> None:
    if local_rank() == 0:
        print_error("interrupted")
    os._exit(130)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a script in the same way as Ctrl-C."""


def raise_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, and SIGTERM its subclass, unless this process has chosen another reaction."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is _exit_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _terminate(*_: object) -> NoReturn:
    raise Terminated


def detach_signals(*_: object) -> None:
    """Ignore stop signals, because the parent process handles them. Exit when the parent process exits."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()

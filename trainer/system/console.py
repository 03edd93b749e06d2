"""Console output of the ranks that the environment variable LOG_RANK lists (default: "0"; other examples: "0,3" and "all").

Messages are records of the standard logger "meshwright". A program that imports the trainer may give this logger handlers and
a level of its own; these then replace the lines on stdout and stderr.
"""

import logging
import os
import sys
import threading
import time
from contextlib import suppress

from tqdm import tqdm

from trainer.system.streams import presentable
from trainer.system.units import duration

LOGGER = logging.getLogger("meshwright")

_LOCK = threading.RLock()
"""Lock of the progress bars. tqdm's own lock is also a semaphore, about which Python warns if the process is killed."""

_LINE_INTERVAL_S = 5.0
"""Minimum interval between two lines of progress."""


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _is_logging_rank() -> bool:
    ranks = os.environ.get("LOG_RANK", "0")
    return ranks == "all" or str(_rank()) in ranks.split(",")


class ConsoleHandler(logging.Handler):
    """Writes information to stdout, and warnings to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        rank = f"[rank {_rank()}] " if _rank() else ""
        text = f"warning: {record.getMessage()}" if is_warning else record.getMessage()
        # The streams of now: a caller may have replaced or closed those of the import.
        with suppress(OSError):  # a full disk or a closed terminal must not stop a run
            file = sys.stderr if is_warning else sys.stdout
            print(f"{time.strftime('%H:%M:%S')} {rank}{presentable(text)}", file=file, flush=True)


def _log(level: int, text: str) -> None:
    if not LOGGER.handlers:  # the program has set none of its own
        LOGGER.addHandler(ConsoleHandler())
        LOGGER.propagate = False  # otherwise a configured root logger would repeat each line
        if LOGGER.level == logging.NOTSET:
            LOGGER.setLevel(logging.INFO)
    LOGGER.log(level, "%s", text)


def info(text: str) -> None:
    if _is_logging_rank():
        _log(logging.INFO, text)


def announce(text: str) -> None:
    """Log a line on this rank even if LOG_RANK does not list it."""
    _log(logging.INFO, text)


def warning(text: str) -> None:
    if _is_logging_rank():
        _log(logging.WARNING, text)


def on_terminal() -> bool:
    """Return whether this rank logs to a terminal, which can show progress bars."""
    return _is_logging_rank() and sys.stdout.isatty()


def shows_colour() -> bool:
    """Return whether stdout shows colour: it is a terminal, and NO_COLOR (no-color.org) is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class _ProgressLines:
    """The progress of a task as lines on stderr, for a log file: one each few seconds while it is updated. A task that takes less
    has no line. stdout belongs to the result of a script."""

    def __init__(self, total: int | None, unit: str, desc: str):
        self.total = total
        self.unit = unit
        self.desc = desc
        self.done = 0
        self.started = self.shown = time.monotonic()

    def __enter__(self) -> "_ProgressLines":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, n: int = 1) -> None:
        self.done += n
        now = time.monotonic()
        if now - self.shown < _LINE_INTERVAL_S:
            return
        self.shown = now
        sizes = (self.done,) if self.total is None else (self.done, self.total)
        done = " of ".join(f"{size:,}" if size < 1000 else tqdm.format_sizeof(size) for size in sizes)
        line = f"{self.desc}: {done} {self.unit.strip()}, {duration(now - self.started)}"
        with suppress(OSError):  # as in ConsoleHandler
            print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def progress(total: int | None, unit: str, desc: str) -> "tqdm | _ProgressLines":
    """Return a context manager with a method `update(n)`: a progress bar on a terminal, otherwise lines.

    Args:
        total: Number of units. None: unknown.
        unit: Name of the unit.
        desc: What is done.
    """
    if not on_terminal() and _is_logging_rank():
        return _ProgressLines(total, unit, desc)
    tqdm.set_lock(_LOCK)
    return tqdm(total=total, unit=unit, unit_scale=True, desc=desc, disable=not _is_logging_rank(), leave=False)

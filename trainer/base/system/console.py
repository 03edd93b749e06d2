"""Console output of the ranks that the environment variable LOG_RANK lists (default: "0"; other examples: "0,3" and "all").

Messages are records of the standard logger "meshwright". A program that imports the trainer may give this logger handlers and
a level of its own; these then replace the lines on stdout and stderr.
"""

import io
import logging
import os
import sys
import threading
import time
from logging.handlers import WatchedFileHandler
from pathlib import Path

from tqdm import tqdm

from trainer.base.system.files import require_regular
from trainer.base.system.streams import line_stream, presentable, print_line
from trainer.base.system.units import duration

LOGGER = logging.getLogger("meshwright")

_LOCK = threading.RLock()
"""Lock of the progress bars. tqdm's own lock is also a semaphore, about which Python warns if the process is killed."""

_TIME = "%H:%M:%S"
_LINE_INTERVAL_S = 5.0
"""Minimum interval between two lines of progress."""


def _is_logging_rank() -> bool:
    ranks = os.environ.get("LOG_RANK", "0")
    return ranks == "all" or os.environ.get("RANK", "0") in ranks.split(",")


def _line(record: logging.LogRecord, time_format: str) -> str:
    rank = os.environ.get("RANK", "0")
    origin = "" if rank == "0" else f"[rank {rank}] "
    kind = "warning: " if record.levelno >= logging.WARNING else ""
    at = time.strftime(time_format, time.localtime(record.created))
    return f"{at} {origin}{presentable(kind + record.getMessage())}"


class ConsoleHandler(logging.Handler):
    """Writes information to stdout, and warnings to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "on_console", True):
            # The streams of now: a caller may have replaced or closed those of the import.
            print_line(_line(record, _TIME), sys.stderr if record.levelno >= logging.WARNING else sys.stdout)


class FileHandler(WatchedFileHandler):
    """Appends what the console shows to a file, which logrotate may move. A failure is one warning on the console."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8", errors="backslashreplace", delay=True)
        self.path = path
        self.has_warned = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        return _line(record, f"%Y-%m-%d {_TIME}")

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.has_warned:
            self.has_warned = True
            reason = getattr(sys.exc_info()[1], "strerror", None) or "unknown reason"
            warning(f"{self.path} cannot be written ({reason}); the run continues")

    def _open(self) -> io.TextIOWrapper:
        require_regular(self.path)  # opening a named pipe would wait forever
        return super()._open()


def log_to(path: Path) -> None:
    """Append all later lines of this process, whether LOG_RANK lists it or not, to a file too. It replaces an earlier one."""
    _set_up()
    for handler in _files():
        LOGGER.removeHandler(handler)
        handler.close()
    LOGGER.addHandler(FileHandler(path))


def record_in_file(text: str) -> None:
    """Append a line to the file of `log_to`, if there is one. The console shows it by other means."""
    if _files():
        _log(logging.INFO, text, on_console=False)


def _files() -> list[FileHandler]:
    return [handler for handler in LOGGER.handlers if isinstance(handler, FileHandler)]


def _set_up() -> None:
    if not LOGGER.handlers:  # the program has set none of its own
        LOGGER.addHandler(ConsoleHandler())
        LOGGER.propagate = False  # otherwise a configured root logger would repeat each line
        if LOGGER.level == logging.NOTSET:
            LOGGER.setLevel(logging.INFO)


def _log(level: int, text: str, on_console: bool = True) -> None:
    if on_console or _files():
        _set_up()
        LOGGER.log(level, "%s", text, extra={"on_console": on_console})


def info(text: str) -> None:
    _log(logging.INFO, text, _is_logging_rank())


def announce(text: str) -> None:
    """Log a line on this rank even if LOG_RANK does not list it."""
    _log(logging.INFO, text)


def warning(text: str) -> None:
    _log(logging.WARNING, text, _is_logging_rank())


def on_terminal() -> bool:
    """Return whether this rank logs to a terminal, which can show progress bars."""
    return _is_logging_rank() and sys.stdout.isatty()


def shows_colour() -> bool:
    """Return whether stdout shows colour: it is a terminal, and NO_COLOR (no-color.org) is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class _ProgressLines:
    """The progress of a task as lines on stderr, for a log file: one each few seconds while it is updated. A task that takes less
    has no line. stdout belongs to the result of a script."""

    def __init__(self, total: int | None, unit: str, desc: str, is_bound: bool):
        """See `progress`."""
        self.left = "at most" if is_bound else "about"
        self.total = total
        self.unit = unit
        self.desc = desc
        self.n = 0
        self.started = self.shown = self.advanced = time.monotonic()

    def __enter__(self) -> "_ProgressLines":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def set_description(self, desc: str) -> None:
        self.desc = desc

    def update(self, n: int = 1) -> None:
        now = time.monotonic()
        if n:
            self.n += n
            self.advanced = now
        if now - self.shown < _LINE_INTERVAL_S:
            return
        self.shown = now
        sizes = (self.n,) if self.total is None else (self.n, self.total)
        done = " of ".join(f"{size:,}" if size < 1000 else tqdm.format_sizeof(size) for size in sizes)
        line = f"{self.desc}: {done} {self.unit.strip()}, {duration(now - self.started)}{self._left(now)}"
        print_line(f"{time.strftime(_TIME)} {line}", sys.stderr)

    def _left(self, now: float) -> str:
        """Return the remaining time as text. Between two advances, it decreases as time passes."""
        if not self.n or self.total is None:
            return ""
        left_s = (self.advanced - self.started) * (self.total - self.n) / self.n - (now - self.advanced)
        return f", {self.left} {duration(max(left_s, 0))} left"


Progress = tqdm | _ProgressLines


def progress(total: int | None, unit: str, desc: str, is_bound: bool = False) -> Progress:
    """Return a context manager with a method `update(n)`: a progress bar on a terminal, otherwise lines. Its `n` (the number of
    completed units), `total` and `set_description(desc)` are those of tqdm.

    Args:
        total: Number of units. None: unknown.
        unit: Name of the unit.
        desc: What is done.
        is_bound: Whether the task may end before `total`, so that the remaining time is a bound.
    """
    if not on_terminal() and _is_logging_rank():
        return _ProgressLines(total, unit, desc, is_bound)
    tqdm.set_lock(_LOCK)
    # Without smoothing, the remaining time follows from the mean rate: units may take different times.
    options = {
        "file": line_stream(sys.stderr),
        "dynamic_ncols": True,  # it looks for the width of no other stream
        "unit_scale": True,
        "smoothing": 0,
        "disable": not _is_logging_rank(),
        "leave": False,
    }
    return tqdm(total=total, unit=unit, desc=desc, **options)

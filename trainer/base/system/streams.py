"""Standard streams that a process can rely on, whatever its parent process passed to it, and the form of messages on them."""

import atexit
import io
import os
import queue
import re
import select
import stat
import sys
import threading
import time
from contextlib import suppress
from typing import Any, TextIO

from trainer.base.system.urls import with_urls

MAX_LINE = 2000
"""Maximum number of characters of a line of a message. A message may repeat a value of any length."""
STDOUT = "stdout"
"""File name in an OSError about stdout."""


_IN_ADDRESS = re.compile(r"(?<=://)(?:[^/\s\"'?#]+|[^/\s\"'@:]+:(?!\d+/)[^\s\"']+)@")
"""User and password in a URL. A password that is not encoded may contain any character."""
_IN_QUERY = re.compile(
    r"([?&;](?:[\w.-]*[_.-])?(?:(?:aws)?(?:api|auth|access|refresh)?(?:token|key)(?:id)?|password|passwd|pwd|secret|signature|sig|credential)s?"
    r"(?:[_.-][\w.-]*)?=)[^&;\s\"'#]+",
    re.IGNORECASE,
)


def printable(text: str, kept: str = "") -> str:
    """Return the text with every unprintable character, such as a newline, as its escape sequence. kept: characters that stay."""
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def visible(text: str) -> str:
    """Return a text that neither controls a console nor hides a character, but keeps its line breaks and tabs."""
    return printable(text, kept="\n\t\u3000")  # the last is the space of East Asian scripts


def shorten(text: str) -> str:
    """Return the text, or the beginning and the end of a text that is longer than MAX_LINE: an error's origin and its rule."""
    half = (MAX_LINE - 5) // 2
    return text if len(text) <= MAX_LINE else f"{text[:half]} ... {text[-half:]}"


def without_credentials(text: str) -> str:
    """Return a text without user names, passwords and keys in its URLs. Text that leaves the process passes through this
    function: messages, the records of settings and command lines, and what services get."""
    return _IN_QUERY.sub(r"\1...", _IN_ADDRESS.sub("...@", text))


def presentable(text: str) -> str:
    """Return a message whose lines are printable and short, so that a value in it can neither control nor fill the console.
    It has no credentials."""
    return "\n".join(shorten(printable(line)) for line in without_credentials(text).split("\n"))


class ClosedStream(io.TextIOWrapper):
    """A standard stream that the parent process has closed. What is written to it is lost."""


class _Stdout(io.FileIO):
    """The descriptor of stdout. Unlike those of Python's own stream, its errors say that they are about stdout."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            error.filename = STDOUT
            raise


def open_standard_streams() -> None:
    """Open standard streams that the parent process has closed (`>&-`), and let output replace what a console cannot encode.

    Call this before a file is opened. Otherwise the file gets the descriptor of a closed stream, and messages are written into
    the file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
            os.set_inheritable(descriptor, True)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, ClosedStream(os.fdopen(descriptor, "wb" if descriptor else "rb", closefd=False)))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a test may have replaced it
            stream.reconfigure(errors="backslashreplace")


def require_stdout() -> None:
    """Exit with code 2 if the parent process has closed stdout, on which a command would print its result."""
    if isinstance(sys.stdout, ClosedStream):
        print_error("stdout is closed, so that no result can be printed; to discard the results, use > /dev/null")
        sys.exit(2)


def name_stdout_in_errors() -> None:
    """Let errors of writing to stdout have the file name STDOUT."""
    stream = sys.stdout
    if stream is sys.__stdout__ and isinstance(stream, io.TextIOWrapper):  # a test may have replaced it
        stream.flush()
        raw = _Stdout(stream.fileno(), "w", closefd=False)
        options = {"errors": stream.errors, "line_buffering": stream.line_buffering}
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, **options)


def flush_standard_streams() -> None:
    """Write what the streams hold back. A full disk, or a reader that has exited or is paused, must not fail a complete run."""
    end = time.monotonic() + _LAST_LINES_S
    for writer in list(_WRITERS.values()):
        writer.is_lost = not writer.wait(0 if writer.is_lost else end - time.monotonic())
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            if _descriptor(stream) not in _WRITERS or _WRITERS[_descriptor(stream)].is_idle:
                stream.flush()


def print_line(text: str, stream: TextIO) -> None:
    """Print a line, or several. A full disk, a reader that has exited, or a terminal that is closed or paused stops no run."""
    # In one call: unbuffered, each is a write, between which another process may write.
    line_stream(stream).write(f"{with_urls(text)}\n")


def line_stream(stream: TextIO) -> "QueuedStream":
    """Return a stream that writes to another one, which may be paused (by Ctrl-S, a pager or a stalled connection)."""
    descriptor = _descriptor(stream)
    if descriptor is None:
        return QueuedStream(stream, None)
    if descriptor not in _WRITERS:
        _WRITERS[descriptor] = _Writer()
    return QueuedStream(stream, _WRITERS[descriptor])


def _descriptor(stream: TextIO) -> int | None:
    """Return the descriptor of a stream that another process may pause, or None: files are written at once."""
    try:
        descriptor = stream.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError, AttributeError):
        return None
    return None if stat.S_ISREG(mode) else descriptor


class QueuedStream:
    """A stream whose text is written by a thread, unless `writer` is None, so that a paused reader does not stop this one."""

    def __init__(self, stream: TextIO, writer: "_Writer | None"):
        self.stream, self.writer = stream, writer
        self.encoding = getattr(stream, "encoding", None)

    def write(self, text: str) -> int:
        if self.writer is None:
            _write(self.stream, text)
        else:
            self.writer.write(self.stream, text)
        return len(text)

    def flush(self) -> None:
        pass  # each text is flushed

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()


class _Writer:
    """A thread that writes texts in their order. While it waits for the reader, texts are kept, up to a limit, and then dropped.

    A signal handler may write while the interrupted code does, so no lock is used: SimpleQueue needs none, nor do the numbers
    under Python's global lock.
    """

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[TextIO, str]] = queue.SimpleQueue()
        self.put = self.written = self.dropped = 0
        self.is_paused = False
        self.is_lost = False
        """Whether the end of the process has waited for the reader in vain."""
        self.thread = threading.Thread(target=self._run, name="console", daemon=True)

    @property
    def is_idle(self) -> bool:
        return self.written >= self.put

    def write(self, stream: TextIO, text: str) -> None:
        """Write a text. The caller waits until it is written, as long as the reader is not paused."""
        if self.is_idle:
            self.is_paused = False
        if self.put - self.written >= _MOST_TEXTS:
            self.dropped += 1
            return
        self.queue.put((stream, text))
        self.put += 1
        if self.thread.ident is None:
            with suppress(RuntimeError):  # another thread has just started it
                self.thread.start()
        if not self.is_paused:
            self.is_paused = not self.wait(_PAUSED_S)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all texts are written, and return whether they are."""
        end = time.monotonic() + timeout_s
        while not self.is_idle and time.monotonic() < end:
            time.sleep(_POLL_S)
        return self.is_idle

    def _run(self) -> None:
        while True:
            stream, text = self.queue.get()
            if dropped := self.dropped:
                self.dropped -= dropped
                text = f"({dropped} lines are not shown, because the console was paused; the log file has them)\n{text}"
            _write_unlocked(stream, text)
            self.written += 1


def _write(stream: TextIO, text: str) -> None:
    with suppress(OSError, ValueError):  # the stream may be closed
        stream.write(text)
        stream.flush()


def _write_unlocked(stream: TextIO, text: str) -> None:
    """Write a text, but wait for the reader without the lock of the stream: an exit of Python while a thread holds it is a fatal
    error."""
    with suppress(OSError, ValueError):
        stream.flush()
        descriptor, content = stream.fileno(), text.encode(stream.encoding or "utf-8", "backslashreplace")
        while content:
            select.select([], [descriptor], [])  # it may be non-blocking
            content = content[os.write(descriptor, content) :]


_WRITERS: dict[int, _Writer] = {}
"""Descriptor -> its writer."""
_MOST_TEXTS = 256
"""Maximum number of texts that wait for a reader."""
_PAUSED_S, _POLL_S = 1.0, 0.0002
"""Seconds after which a reader counts as paused, and between two looks whether a text is written."""
_LAST_LINES_S = 5.0
"""Seconds that the end of a process waits for a paused reader."""
os.register_at_fork(after_in_child=_WRITERS.clear)  # a child has no threads
atexit.register(flush_standard_streams)


def print_error(text: str) -> None:
    """Print a message on stderr. If nobody can read it, the exit code still reports the error."""
    print_line(presentable(text), sys.stderr)

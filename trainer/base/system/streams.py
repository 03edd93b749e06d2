"""Standard streams that a process can rely on, whatever its parent process passed to it, and the form of messages on them."""

import io
import os
import re
import sys
from contextlib import suppress
from typing import Any, TextIO

MAX_LINE = 2000
"""Maximum number of characters of a line of a message. A message may repeat a value of any length."""
STDOUT = "stdout"
"""File name in an OSError about stdout."""


_IN_ADDRESS = re.compile(r"(?<=://)(?:[^/\s\"'?#]+|[^/\s\"'@:]+:(?!\d+/)[^\s\"']+)@")
"""User and password in a URL. A password that is not encoded may contain any character."""
_IN_QUERY = re.compile(
    r"([?&;](?:[\w.-]*(?:token|key|password|passwd|pwd|secret|signature|sig|credential)[\w.-]*)=)[^&;\s\"'#]+",
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
    """Write what the streams hold back. A full disk or a reader that has exited must not fail a complete run."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


def print_line(text: str, stream: TextIO) -> None:
    """Print a line, or several. A full disk, a reader that has exited or a closed terminal must not stop a run."""
    with suppress(OSError):
        # In one call: unbuffered, each is a write, between which another process may write.
        print(f"{text}\n", end="", file=stream, flush=True)


def print_error(text: str) -> None:
    """Print a message on stderr. If nobody can read it, the exit code still reports the error."""
    print_line(presentable(text), sys.stderr)

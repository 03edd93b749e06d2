"""Standard streams that a process can rely on, whatever its parent process passed to it."""

import io
import os
import sys
from contextlib import suppress


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
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a test may have replaced it
            stream.reconfigure(errors="backslashreplace")


def flush_standard_streams() -> None:
    """Write what the streams hold back. A full disk or a reader that has exited must not fail a complete run."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


def print_error(line: str) -> None:
    """Print a line on stderr. If nobody can read it, the exit code still reports the error."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)

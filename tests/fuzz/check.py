"""What every random input must satisfy, and limits for the code that reads it."""

import contextlib
import faulthandler
import resource
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import event

from trainer.base.config import ConfigError
from trainer.base.system.streams import MAX_LINE, shorten
from trainer.base.system.units import GIB

CPU_LIMIT_S = 10
_WALL_LIMIT_S = 300
"""A case that waits for longer ends the tests' process, after its stack was printed."""
_MEMORY_LIMIT = 4 * GIB
"""Memory that a case may allocate."""
_PYTHON_WORDS = ("Traceback", "NoneType", "<class ", " object at 0x", "has no attribute", "not subscriptable", "[Errno")
"""Words of Python's own messages, which no refusal contains."""


def bad_refusal(line: str) -> str:
    """Return the rule that a refusal breaks, or ""."""
    if not line.strip():
        return "the refusal is empty"
    if not line.isprintable():
        return f"the refusal is not one printable line: {line!r}"
    if len(line) > MAX_LINE:
        return f"the refusal has {len(line)} characters"
    return next((f"the refusal has Python's words: {line}" for words in _PYTHON_WORDS if words in line), "")


outcomes: Counter[str] = Counter()
"""Number of cases that were accepted and refused, since the fixture of a module has emptied it."""


def record(outcome: str) -> None:
    """Count a case. `pytest --hypothesis-show-statistics` shows the counts."""
    event(outcome)
    outcomes[outcome] += 1


def _raise(*_: object) -> None:
    pytest.fail(f"the case needed more than {CPU_LIMIT_S} s of CPU time")


@contextlib.contextmanager
def limits() -> Iterator[Path]:
    """Context manager that limits the CPU time and the memory of a case. Yields an empty folder.

    Like Python itself, it interrupts C code only when that returns; the second limit ends this process.
    """
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    memory = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, _raise)
    resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY_LIMIT, memory[1]))
    faulthandler.dump_traceback_later(_WALL_LIMIT_S, exit=True)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            yield Path(folder).resolve()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, memory)
        signal.signal(signal.SIGPROF, handler)


def refusal_of(error: Exception) -> str:
    """Return the line that commands print for an error. The test fails if it breaks a rule."""
    line = shorten(str(error))
    assert not bad_refusal(line), bad_refusal(line)
    return line


@contextlib.contextmanager
def may_refuse(expected: bool = True) -> Iterator[list[str]]:
    """Context manager for code that may refuse its input with a ConfigError. Yields a list to which its line is appended.

    Args:
        expected: Whether a refusal is right. Otherwise, the test fails.
    """
    refusals: list[str] = []
    try:
        yield refusals
        record("accepted")
    except ConfigError as error:
        record("refused")
        refusals.append(refusal_of(error))
        assert expected, f"intact input was refused: {error}"

"""Give random input to the trainer, and report tracebacks, cases without end, and wrong input that is accepted.

A case passes if its input is refused with one line, or if it is accepted and the result is right: fuzz_cases/ describes the
check of each target. Every case runs in its own process, with limits of CPU time and memory. The input of a case depends only on
the seed, the target and the number of the case, so that --targets, --seed, --first and --cases 1 repeat any case.

exit codes: 0: no finding; 1: at least one finding; 2: an argument is wrong

    python scripts/dev/fuzz.py --seed 7
    python scripts/dev/fuzz.py --targets settings corpora --cases 500
"""

import contextlib
import faulthandler
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.system.process import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()
    # One thread, so that the process can be forked.
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

from scripts.dev.fuzz_cases import checkpoints, commands, corpora, models, settings, tokenizers
from trainer.config import ConfigError
from trainer.config.command_line import Arguments, non_negative_int, positive_int, run_to_end
from trainer.system.streams import MAX_LINE, shorten
from trainer.system.units import GIB

CPU_LIMIT_S = 5
_WALL_LIMIT_S = 120
_MEMORY_LIMIT = 4 * GIB
"""Memory that a case may allocate."""
_PYTHON_WORDS = ("Traceback", "NoneType", "<class ", " object at 0x", "has no attribute", "not subscriptable", "[Errno")
"""Words of Python's own messages, which no refusal contains."""


@dataclass(frozen=True)
class Target:
    """A kind of input."""

    cases: int
    """Number of cases of a full run."""
    run: Callable[[Random, Path, Path], str]
    """Function (random, folder of the fixtures, empty folder) -> the line that refused the input, or "" if it was accepted. A
    ConfigError is a refusal too. Any other exception is a finding."""
    make_fixtures: Callable[[Path], None] = lambda folder: None
    """Function that writes files that all cases share to an empty folder."""


TARGETS: dict[str, Target] = {
    "settings": Target(12_000, settings.run),
    "models": Target(3_500, models.run),
    "corpora": Target(2_000, corpora.run),
    "tokenizers": Target(1_200, tokenizers.run, tokenizers.make_fixtures),
    "checkpoints": Target(800, checkpoints.run, checkpoints.make_fixtures),
    "commands": Target(500, commands.run, commands.make_fixtures),
}


@dataclass(frozen=True)
class Outcome:
    """Result of one case."""

    accepted: bool = False
    refusal: str = ""
    """The line with which the input was refused, or ""."""
    finding: str = ""
    """Description of a failed case, or ""."""
    cpu_seconds: float = 0.0


def bad_refusal(line: str) -> str:
    """Return the rule that a refusal breaks, or ""."""
    if not line.strip():
        return "the refusal is empty"
    if not line.isprintable():
        return f"the refusal is not one printable line: {line!r}"
    if len(line) > MAX_LINE:
        return f"the refusal has {len(line)} characters"
    return next((f"the refusal has Python's words: {line}" for words in _PYTHON_WORDS if words in line), "")


def _run_in_child(target: Target, random: Random, fixtures: Path, folder: Path) -> Outcome:
    try:
        refusal = target.run(random, fixtures, folder)
        accepted = not refusal
    except ConfigError as error:
        refusal, accepted = shorten(str(error)), False  # as commands print it
    except BaseException:
        return Outcome(finding=traceback.format_exc())
    return Outcome(accepted, refusal, "" if accepted else bad_refusal(refusal))


def _child(work: Callable[[], Outcome], folder: Path, cpu_seconds: int) -> None:
    """Run `work` in this process, which was forked for it, and write its outcome to a file beside the folder."""
    os.setsid()
    output = os.open(folder.with_suffix(".output"), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY_LIMIT, size + _MEMORY_LIMIT))
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + cpu_seconds + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    for number in (signal.SIGXCPU, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
        faulthandler.register(number, file=2, all_threads=False, chain=True)  # prints the stack, then the process ends
    signal.alarm(_WALL_LIMIT_S)
    outcome = work()
    folder.with_suffix(".outcome").write_text(json.dumps(asdict(outcome)))


def _in_new_process(work: Callable[[], Outcome], folder: Path, cpu_seconds: int) -> Outcome:
    """Run `work` in a forked process. folder: an empty folder; it writes files beside it. cpu_seconds: limit."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        try:
            _child(work, folder, cpu_seconds)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(0)
    _, status, used = os.wait4(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # the processes that the case has started
    seconds = used.ru_utime + used.ru_stime
    printed = folder.with_suffix(".output").read_text(errors="replace")
    try:
        outcome = Outcome(**json.loads(folder.with_suffix(".outcome").read_text()))
    except FileNotFoundError:
        return Outcome(finding=f"the process ended with status {status} after {seconds:.1f} s:\n{shorten(printed)}")
    finding = outcome.finding or (shorten(printed) if "Traceback (most recent call last)" in printed else "")
    if not finding and seconds > cpu_seconds:
        finding = f"the case needed {seconds:.1f} s of CPU time"
    return Outcome(outcome.accepted, outcome.refusal, finding, seconds)


class Fuzzer:
    """Runner of the cases of one target. Use it as a context manager: it owns a temporary folder."""

    def __init__(self, name: str, seed: int, targets: dict[str, Target] = TARGETS):
        self._name, self._seed, self._target = name, seed, targets[name]

    def __enter__(self) -> "Fuzzer":
        self._temporary = tempfile.TemporaryDirectory()
        self._folder = Path(self._temporary.name).resolve()
        self._fixtures = self._folder / "fixtures"
        self._fixtures.mkdir()

        def work() -> Outcome:
            self._target.make_fixtures(self._fixtures)
            return Outcome(accepted=True)

        outcome = _in_new_process(work, self._fixtures, _WALL_LIMIT_S)
        if not outcome.accepted:
            raise RuntimeError(f"the fixtures of {self._name} could not be made: {outcome.finding}")
        return self

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    def run(self, number: int) -> Outcome:
        """Run one case. number: any non-negative integer."""
        random = Random(f"{self._seed} {self._name} {number}")
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as parent:
            folder = Path(parent) / "case"
            folder.mkdir()
            work = partial(_run_in_child, self._target, random, self._fixtures, folder)
            return _in_new_process(work, folder, CPU_LIMIT_S)


def fuzz(name: str, seed: int, first: int, cases: int, show: bool) -> int:
    """Run the cases of a target, print its findings and a summary, and return the number of findings."""
    counts, slowest, start = Counter(), (0.0, 0), time.monotonic()
    with Fuzzer(name, seed) as fuzzer:
        for number in range(first, first + cases):
            outcome = fuzzer.run(number)
            counts["findings" if outcome.finding else "accepted" if outcome.accepted else "refused"] += 1
            slowest = max(slowest, (outcome.cpu_seconds, number))
            if show:
                print(f"{name} {number}: {outcome.refusal or 'accepted'}", flush=True)
            if outcome.finding:
                print(f"{name}, seed {seed}, case {number}: {outcome.finding.strip()}\n", flush=True)
    numbers = ", ".join(f"{counts[key]} {key}" for key in ("accepted", "refused", "findings"))
    seconds = f"slowest: {slowest[0]:.1f} s of CPU time (case {slowest[1]}); {time.monotonic() - start:.0f} s in all"
    print(f"{name}: {cases} cases with seed {seed}: {numbers}; {seconds}", flush=True)
    return counts["findings"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Arguments(__doc__)
    parser.add_argument(
        "--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS), metavar="NAME", help="kinds of input"
    )
    parser.add_argument("--seed", type=non_negative_int, default=0, metavar="N", help="seed of the input")
    parser.add_argument("--first", type=non_negative_int, default=0, metavar="N", help="number of the first case")
    parser.add_argument(
        "--cases", type=positive_int, metavar="N", help="cases per target (default: those of a full run)"
    )
    parser.add_argument("--show", action="store_true", help="print the outcome of every case")
    args = parser.parse_args(argv)
    findings = [
        fuzz(name, args.seed, args.first, args.cases or TARGETS[name].cases, args.show) for name in args.targets
    ]
    sys.exit(1 if any(findings) else 0)


if __name__ == "__main__":
    run_to_end(main)

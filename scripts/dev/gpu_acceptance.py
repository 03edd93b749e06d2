"""Test and measure on a GPU, in parts that end within eight minutes each.

Every row is appended to results.jsonl as soon as it is measured. Rows that were measured at the same commit, on the same device
and with the same version of torch are not repeated, so the script can be continued in another session. The last lines are tables
for docs/measurements.md. It downloads nothing.

exit codes: 0: every row was measured; 1: a row failed, or a part ran out of time; 2: an argument is wrong

    scripts/dev/gpu_acceptance.sh --parts parity speed --out outputs/gpu
    scripts/dev/gpu_acceptance.sh --tiny    # checks this script itself, on any machine
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.system.process import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.config.command_line import Arguments, run_to_end
from trainer.system.environment import environment
from trainer.system.files import read_json_lines
from trainer.system.process import cores
from trainer.system.units import GIB
from trainer.testing.layouts import DEBUG_FAMILIES, flags
from trainer.testing.techniques import BASELINE, TECHNIQUES

PART_SECONDS = 480
# In a process of its own, because this process would otherwise occupy memory of the GPU.
_PRINT_DEVICE = "from trainer.runtime import device; print(device.name(device.select_device('auto')))"
_MODES = ("none", "selective", "full")
_BF16 = {"training.parameter_dtype": "bf16", "optimizer.state_dtype": "bf16"}
_MODELS = {
    "8b": {"model.name": "llama3", "model.size": "8b", **_BF16},
    "3b": {"model.name": "llama3.2", "model.size": "3b"},
    "1b": {"model.name": "llama3.2", "model.size": "1b"},
}
_TINY = {
    **{"model.name": "llama3", "model.size": "debug", "training.seq_len": "128"},
    **{"model.overrides.dim": "256", "model.overrides.hidden_dim": "768"},  # 8-bit moments need rows of 256 values
}

Row = dict[str, Any]
Task = Callable[[], Row]


class Failed(Exception):
    """The last line that a command printed before it failed."""


def _records(run: Path, kind: str) -> list[Row]:
    return [record for record in read_json_lines(run / "metrics.jsonl") if record["kind"] == kind]


@dataclass
class Session:
    """The options of a call and the commands that the parts share."""

    out: Path
    tiny: bool
    label: Row = field(default_factory=dict)
    """Values that the rows of one table have in common."""
    end: float = math.inf
    """Time at which the current part ends, as a result of time.monotonic."""

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    def read_rows(self, part: str) -> list[Row]:
        """Return the results of a part that have the label of this session."""
        label = {"part": part} | self.label
        rows = read_json_lines(self.results) if self.results.exists() else []
        return [row for row in rows if label.items() <= row.items()]

    def run(self, *words: object, **variables: str) -> str:
        """Run a command of the repository and return its output. Raises Failed."""
        command = [sys.executable, *map(str, words)]
        timeout = None if self.end == math.inf else max(1.0, self.end - time.monotonic())
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=os.environ | variables
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"did not end within the remaining {timeout:.0f} s") from None
        if done.returncode:
            raise Failed((done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1])
        return done.stdout

    def settings(self, model: str, **changes: str) -> dict[str, str]:
        """Return the settings of a run without checkpoints. model: key of _MODELS; tiny sessions use the debug model instead."""
        common = {
            "training.seq_len": "4096",
            "training.local_batch_size": "2",
            "training.global_batch_size": "8",
            "training.compute_dtype": "bf16",
            "training.steps": "8",
            "evaluation.interval_steps": "0",
            "metrics.interval_steps": "1",
            "checkpoint.enabled": "false",
        }
        tiny = {"training.steps": "3", "training.compute_dtype": "fp32"}  # many CPUs have no fast bf16
        return common | (_TINY | tiny if self.tiny else _MODELS[model]) | changes

    def train(self, name: str, settings: Mapping[str, str]) -> Path:
        """Train and return the run folder."""
        folder = self.out / "runs" / name
        self.run("train.py", *flags({"run.output_folder": str(folder.parent), "run.name": name} | dict(settings)))
        return folder

    def measure(self, name: str, settings: Mapping[str, str]) -> Row:
        """Train and return the throughput and the memory of the last steps."""
        records = _records(self.train(name, settings), "train")
        last = records[len(records) // 2 :]
        names = [n for n in last[-1] if n.endswith(("_time_s", "_gib", "_percent")) or n == "tokens_per_second"]
        return {n: statistics.median(r[n] for r in last) for n in names}


def tests(session: Session) -> Iterator[tuple[str, Task]]:
    paths = ["tests/runtime"] if session.tiny else []

    def run() -> Row:
        started = time.monotonic()
        out = session.run("-m", "pytest", "-n", cores(), *paths, OMP_NUM_THREADS="1")
        return {"result": out.strip().splitlines()[-1], "seconds": time.monotonic() - started}

    yield "the test suite", run


def parity(session: Session) -> Iterator[tuple[str, Task]]:
    """Compare the losses of the GPU with those of the CPU. With document_mask, a GPU uses flex_attention, a CPU a mask table."""
    variants = {
        "fp32": {},
        "fp32, compiled": {"compile.enabled": "true"},
        "bf16": {"training.compute_dtype": "bf16"},
        "document mask": {"data.document_mask": "true"},
        **{f"recomputation {mode}": {"activation_checkpoint.mode": mode} for mode in _MODES[1:]},
        # Windows and capped scores: the backward of flex_attention runs only on a GPU.
        **{
            f"{family}, document mask": {"model.name": family, "data.document_mask": "true"}
            for family in DEBUG_FAMILIES
        },
    }
    steps = {"training.steps": "3" if session.tiny else "20", "training.global_batch_size": "8"}
    for name, changes in variants.items():

        def run(name: str = name, changes: Mapping[str, str] = changes) -> Row:
            settings = session.settings("1b", **_TINY | steps | {"training.compute_dtype": "fp32"} | changes)
            losses = []
            for device in ("auto", "cpu"):
                folder = session.train(f"parity {name} {device}", settings | {"run.device": device})
                losses.append([record["loss"] for record in _records(folder, "train")])
            deviations = [abs(a - b) / b for a, b in zip(*losses, strict=True)]
            return {"largest deviation": max(deviations), "steps": len(deviations)}

        yield name, run


def _matrix(session: Session, models: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    for model in models:
        for compiled in ("true", "false"):
            for mode in _MODES:
                changes = {"compile.enabled": compiled, "activation_checkpoint.mode": mode}
                name = f"{model}, {mode}, {'compiled' if compiled == 'true' else 'eager'}"
                yield name, session.settings(model, **changes)


def speed(session: Session) -> Iterator[tuple[str, Task]]:
    for name, settings in _matrix(session, list(_MODELS)):
        yield name, lambda name=name, settings=settings: session.measure(f"speed {name}", settings)


def plan(session: Session) -> Iterator[tuple[str, Task]]:
    """Compare the planned peak with the measured one."""
    for name, settings in _matrix(session, ["1b", "8b"]):

        def run(name: str = name, settings: dict[str, str] = settings) -> Row:
            planned = json.loads(
                session.run("scripts/plan.py", "--json", "--world-size", 1, "--device", "h200", *flags(settings))
            )
            measured = session.measure(f"plan {name}", settings)["memory_peak_gib"]
            peak = max(rank["peak_bytes"] for rank in planned["ranks"]) / GIB
            return {"planned GiB": peak, "measured GiB": measured, "planned / measured": peak / measured}

        yield name, run


def memory(session: Session) -> Iterator[tuple[str, Task]]:
    """Add memory techniques one after another."""
    baseline = settings = session.settings("1b", **BASELINE)
    yield "baseline", lambda: session.measure("memory baseline", baseline)
    for name, changes in TECHNIQUES.items():
        settings = settings | changes
        yield f"+ {name}", lambda name=name, settings=settings: session.measure(f"memory {name}", settings)


def saves(session: Session) -> Iterator[tuple[str, Task]]:
    for mode in ("off", "thread", "process"):

        def run(mode: str = mode) -> Row:
            changes = {"checkpoint.enabled": "true", "checkpoint.async_mode": mode, "checkpoint.interval_steps": "2"}
            folder = session.train(f"saves {mode}", session.settings("1b", **changes, **{"checkpoint.keep": "1"}))
            records = _records(folder, "checkpoint")
            return {key: statistics.median(r[key] for r in records) for key in ("blocked_s", "background_s")}

        yield mode, run


def peers(session: Session) -> Iterator[tuple[str, Task]]:
    """Compare the throughput with that of transformers' Trainer, which needs the packages transformers and accelerate."""
    shape = ("--model", "1b", "--device", "gpu", "--dtype", "bf16")
    if session.tiny:
        shape = ("--model", "58m", "--steps", 1, "--repeats", 1)
    for mode in ("eager", "compiled"):

        def run(mode: str = mode) -> Row:
            results = session.out / f"peers-{mode}.json"
            options = (*shape, *(["--compiled"] if mode == "compiled" else []), "--json", results)
            session.run("scripts/dev/benchmark.py", "peers", "--contenders", "transformers", "meshwright", *options)
            return {
                f"{name} tokens/s": rate for name, rate in json.loads(results.read_text())["tokens_per_second"].items()
            }

        yield f"1b, {mode}", run


def generation(session: Session) -> Iterator[tuple[str, Task]]:
    def run() -> Row:
        folder = session.train("generation", session.settings("1b", **{"checkpoint.enabled": "true"}))
        times = []
        for tokens in (1, 65 if session.tiny else 257):
            start = time.monotonic()
            words = ("--prompt", "def ", "--temperature", 0, "--max-new-tokens", tokens)
            session.run("scripts/generate.py", folder, *words)
            times.append(time.monotonic() - start)
        return {"tokens per second": (tokens - 1) / (times[1] - times[0])}

    yield "one prompt", run


PARTS: dict[str, Callable[[Session], Iterator[tuple[str, Task]]]] = {
    "parity": parity,
    "speed": speed,
    "plan": plan,
    "memory": memory,
    "peers": peers,
    "saves": saves,
    "generation": generation,
    "tests": tests,
}


def run_part(part: str, session: Session) -> bool:
    """Measure the rows of a part that the results do not have yet. Return whether all rows of the part were measured."""
    finished = {row["row"] for row in session.read_rows(part) if "error" not in row}
    session.end, complete = time.monotonic() + PART_SECONDS, True
    for row, task in PARTS[part](session):
        if row in finished:
            continue
        if time.monotonic() > session.end:
            print(f"{part}: no time is available for {row}; call the script again", flush=True)
            return False
        try:
            values = task()
        except (Failed, OSError, KeyError, ValueError, ArithmeticError) as error:
            values, complete = {"error": str(error) or repr(error)}, False
        print(f"{part}, {row}: {values}", flush=True)
        with session.results.open("a") as file:
            file.write(json.dumps({"part": part, "row": row} | session.label | values) + "\n")
    return complete


def markdown(part: str, session: Session) -> str:
    """Return the rows of a part as a table. The last result of a row counts."""
    label = {"part", "row", *session.label}
    rows = {row["row"]: {k: v for k, v in row.items() if k not in label} for row in session.read_rows(part)}
    columns = list(dict.fromkeys(key for values in rows.values() for key in values))
    lines = [f"| {' | '.join([part, *columns])} |", "|---" * (len(columns) + 1) + "|"]
    for row, values in rows.items():
        cells = (values.get(column, "") for column in columns)
        lines.append(f"| {' | '.join([row, *(f'{v:,.4g}' if isinstance(v, float) else str(v) for v in cells)])} |")
    return "\n".join(lines)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="NAME", help="parts to run"
    )
    out_help = "folder for results.jsonl and for the runs"
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu_acceptance", metavar="PATH", help=out_help)
    parser.add_argument("--tiny", action="store_true", help="use the debug model for everything")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    out, now = args.out.resolve(), environment(ROOT)
    try:
        device = Session(out, args.tiny).run("-c", _PRINT_DEVICE).strip()
    except Failed as error:
        parser.error(str(error))
    label = {"tiny": args.tiny, "device": device, "commit": now["git_commit"], "torch": now["packages"]["torch"]}
    session = Session(out, args.tiny, label)
    with session.results.open("a") as file:
        file.write(json.dumps({"environment": now} | label) + "\n")
    complete = [run_part(part, session) for part in args.parts]
    print("\n\n".join(markdown(part, session) for part in args.parts))
    sys.exit(0 if all(complete) else 1)


if __name__ == "__main__":
    run_to_end(main)

"""Test and measure on a GPU, in parts that end within eight minutes each.

Every row is appended to results.jsonl as soon as it is measured. Rows that were measured at the same commit, on the same device
and with the same version of torch are not repeated, so the script can be continued in another session. The last lines are tables
for docs/measurements.md. It downloads nothing.

exit codes: 0: every row was measured; 1: a row failed, or a part ran out of time; 2: an argument is wrong

    scripts/dev/gpu_acceptance.sh --parts parity speed --out outputs/gpu
    scripts/dev/gpu_acceptance.sh --tiny    # checks this script itself, on any machine
"""

import gzip
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

import torch
from torch import Tensor

from models.spec import meta_model, saved_weights
from trainer.base.config import ConfigError
from trainer.base.config.arguments import Arguments
from trainer.base.config.exits import run_to_end
from trainer.base.config.load import load_config
from trainer.base.system.environment import environment
from trainer.base.system.files import read_json_lines
from trainer.base.system.process import cores
from trainer.base.system.run_files import METRICS_FILE, MODEL_FILE
from trainer.base.system.units import GIB
from trainer.checkpoint.formats.model_metadata import ModelMetadata
from trainer.checkpoint.formats.native_writer import write_tensors
from trainer.checkpoint.tensor_files import TensorWrite
from trainer.run.resolve import resolve
from trainer.tools.testing.layouts import DEBUG_FAMILIES, flags
from trainer.tools.testing.techniques import BASELINE, TECHNIQUES

PART_SECONDS = 480
CONCURRENT = {"parity": 8, "plan": 8}
"""Name of a part whose rows measure neither time nor memory -> number of rows at a time."""
# In a process of its own, because this process would otherwise occupy memory of the GPU.
_PRINT_DEVICE = "from trainer.runtime import device; print(device.name(device.select_device('auto')))"
_MODES = ("none", "selective", "full")
_NONE, _SELECTIVE, _FULL = ({"activation_checkpoint.mode": mode} for mode in _MODES)
_BF16 = {"training.parameter_dtype": "bf16", "optimizer.state_dtype": "bf16"}
_LORA = {"training.parameter_dtype": "bf16", "lora.rank": "16"}
_QLORA = _LORA | {"lora.base_dtype": "nf4_double"}
_LORA_OF_ATTENTION = _LORA | {"lora.targets": "*.attention.*"}
_EAGER = {"compile.enabled": "false"}
_TENSORWISE, _ROWWISE = ({"training.float8": recipe} for recipe in ("tensorwise", "rowwise"))


def _model(name: str, size: str, *changes: Mapping[str, str], batch: int = 2) -> dict[str, str]:
    """Return settings. batch: samples per microbatch."""
    settings = {"model.name": name, "model.size": size, "training.local_batch_size": str(batch)}
    for change in changes:
        settings |= change
    return settings


_1B = _model("llama3.2", "1b", batch=4)
SPEED = {
    "Llama 3 8B, bf16, selective": _model("llama3", "8b", _BF16, _SELECTIVE),
    "Llama 3 8B, bf16, none": _model("llama3", "8b", _BF16, _NONE),
    "Llama 3 8B, bf16, full": _model("llama3", "8b", _BF16, _FULL, batch=4),
    "Llama 3 8B, LoRA, none": _model("llama3", "8b", _LORA, _NONE),
    "Llama 3 8B, LoRA, full": _model("llama3", "8b", _LORA, _FULL),
    "OLMoE 7B-A1B, bf16, selective": _model("olmoe", "7b-a1b", _BF16, _SELECTIVE),
    "Qwen3 30B-A3B, LoRA, full": _model("qwen3-moe", "30b-a3b", _LORA_OF_ATTENTION, _FULL),
    "Llama 3 8B, fp32 and 8-bit moments, full": _model("llama3", "8b", {"optimizer.state_dtype": "8bit"}, _FULL),
    "Llama 3.2 3B, fp32, selective": _model("llama3.2", "3b", _SELECTIVE),
    "Llama 3.2 1B, fp32, none": _1B | _NONE,
    "OLMoE 7B-A1B, fp32, selective": _model("olmoe", "7b-a1b", _SELECTIVE, batch=1),
    "GPT-OSS 20B, LoRA, full": _model("gpt-oss", "20b", _LORA_OF_ATTENTION, _FULL, batch=1),
    "Gemma 2 2B, bf16, full": _model("gemma2", "2b", _BF16, _FULL),
    "Gemma 3 4B, bf16, selective": _model("gemma3", "4b", _BF16, _SELECTIVE),
    "Qwen3 4B, bf16, eager, full": _model("qwen3", "4b", _BF16, _FULL, _EAGER),
    "Phi-3 mini, bf16, selective": _model("phi", "3-mini-4k", _BF16, _SELECTIVE),
    "Llama 3.2 1B, fp32, eager, none": _1B | _NONE | _EAGER,
    "Llama 3 8B, bf16, float8, selective": _model("llama3", "8b", _BF16, _SELECTIVE, _TENSORWISE),
    "Llama 3 8B, bf16, float8 rowwise, selective": _model("llama3", "8b", _BF16, _SELECTIVE, _ROWWISE),
    "Llama 3.2 1B, fp32, float8, none": _1B | _NONE | _TENSORWISE,
    "Llama 3 8B, LoRA, float8, none": _model("llama3", "8b", _LORA, _NONE, _TENSORWISE),
    "Llama 3 8B, QLoRA, full": _model("llama3", "8b", _QLORA, _FULL),
    "Qwen3 30B-A3B, QLoRA, full": _model("qwen3-moe", "30b-a3b", _LORA_OF_ATTENTION | _QLORA, _FULL),
    "Llama 3 8B, bf16, eager, selective": _model("llama3", "8b", _BF16, _SELECTIVE, _EAGER),
    "Llama 3 8B, bf16, selective, 4,096 tokens of the loss at once": _model(
        "llama3", "8b", _BF16, _SELECTIVE, {"training.loss_chunk_tokens": "4096"}
    ),
    "OLMoE 7B-A1B, bf16, eager, selective": _model("olmoe", "7b-a1b", _BF16, _SELECTIVE, _EAGER),
}
"""Name of a row of the part "speed" -> its settings. Goals on one H200, in tokens/s: 12,500 for the first row, 30,000 for OLMoE
in bf16, 10,000 for Qwen3 30B-A3B. docs/low_precision.md has published figures of float8."""
PROFILED = ("Llama 3 8B, bf16, selective", "OLMoE 7B-A1B, bf16, selective")
"""Rows of the part "profile"."""
_TINY = {
    **{"model.name": "llama3", "model.size": "debug", "training.seq_len": "128"},
    **{"model.overrides.dim": "256", "model.overrides.hidden_dim": "768"},  # 8-bit moments need rows of 256 values
}

Row = dict[str, Any]
Task = Callable[[], Row]


class Failed(Exception):
    """The last line that a command printed before it failed."""


def _records(run: Path, kind: str) -> list[Row]:
    return [record for record in read_json_lines(run / METRICS_FILE) if record["kind"] == kind]


@dataclass
class Session:
    """The options of a call and the commands that the parts share."""

    out: Path
    tiny: bool
    label: Row = field(default_factory=dict)
    """Values that the rows of one table have in common."""
    end: float = math.inf
    """Time at which the current part ends, as a result of time.monotonic."""
    rows: Sequence[str] = ("",)
    """Texts of which a row's name must contain one."""

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

    def settings(self, model: Mapping[str, str], **changes: str) -> dict[str, str]:
        """Return the settings of a run without checkpoints. model: settings; tiny sessions use the debug model instead."""
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
        kept = {name: value for name, value in model.items() if not name.startswith("model.")}
        return common | (kept | _TINY | tiny if self.tiny else model) | changes

    def train(self, name: str, settings: Mapping[str, str]) -> Path:
        """Train and return the run folder."""
        folder = self.out / "runs" / name
        self.run("train.py", *flags({"run.output_folder": str(folder.parent), "run.name": name} | dict(settings)))
        return folder

    def measure(self, name: str, settings: Mapping[str, str]) -> Row:
        """Train and return the throughput and the memory of the last steps. Adapters get a base model with random weights."""
        if "lora.rank" in settings:
            with tempfile.TemporaryDirectory(dir=self.out) as folder:
                base = write_random_model(settings, Path(folder) / "base")
                run = self.train(name, {**settings, "checkpoint.init_from": str(base)})
        else:
            run = self.train(name, settings)
        records = _records(run, "train")
        last = records[len(records) // 2 :]
        names = [n for n in last[-1] if n.endswith(("_time_s", "_gib", "_percent")) or n == "tokens_per_second"]
        return {n: statistics.median(r[n] for r in last) for n in names}


def write_random_model(settings: Mapping[str, str], folder: Path) -> Path:
    """Write a checkpoint of a model with random weights in bf16, and return the folder.

    Args:
        settings: Of a run. Those of adapters have no effect.
        folder: Is created.
    """
    full = {name: value for name, value in settings.items() if not name.startswith("lora.")}
    resolved = resolve(load_config(flags(full)), 1)
    values = torch.empty(2**24).normal_(std=0.02).bfloat16()  # they repeat: drawing all of them would take minutes

    def pieces(num_values: int) -> Iterator[Tensor]:
        for start in range(0, num_values, len(values)):
            yield values[: num_values - start]

    entries = [
        TensorWrite(f"model/{name}", torch.bfloat16, tuple(weight.shape), partial(pieces, weight.numel()))
        for name, weight in saved_weights(meta_model(resolved.spec.model, resolved.sizes)).items()
    ]
    seq_len = int(settings["training.seq_len"])
    model = ModelMetadata(resolved.family, asdict(resolved.sizes), seq_len, seq_len, "", (), {}, {}, ())
    write_tensors(folder, entries, {MODEL_FILE: model.text().encode()}, 5 * GIB, "random values")
    return folder


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
    steps["training.cpu_threads"] = str(max(1, cores() // CONCURRENT["parity"]))
    for name, changes in variants.items():

        def run(name: str = name, changes: Mapping[str, str] = changes) -> Row:
            settings = session.settings(_1B, **_TINY | steps | {"training.compute_dtype": "fp32"} | changes)
            losses = []
            for device in ("auto", "cpu"):
                folder = session.train(f"parity {name} {device}", settings | {"run.device": device})
                losses.append([record["loss"] for record in _records(folder, "train")])
            deviations = [abs(a - b) / b for a, b in zip(*losses, strict=True)]
            return {"deviation of the first step": deviations[0], "largest deviation": max(deviations)}

        yield name, run


def speed(session: Session) -> Iterator[tuple[str, Task]]:
    for name, model in SPEED.items():
        yield name, lambda name=name, model=model: session.measure(f"speed {name}", session.settings(model))


def plan(session: Session) -> Iterator[tuple[str, Task]]:
    """Compare the planned peaks with those that the part "speed" has measured."""
    measured = {row["row"]: row["memory_peak_gib"] for row in session.read_rows("speed") if "error" not in row}
    for name, model in SPEED.items():

        def run(name: str = name, model: Mapping[str, str] = model) -> Row:
            base = {"checkpoint.init_from": "a base model that need not exist"} if "lora.rank" in model else {}
            words = ("--json", "--world-size", 1, "--device", "h200", *flags(session.settings(model, **base)))
            ranks = json.loads(session.run("scripts/plan.py", *words))["ranks"]
            peak = max(rank["peak_bytes"] for rank in ranks) / GIB
            if name not in measured:
                return {"planned GiB": peak}
            return {"planned GiB": peak, "measured GiB": measured[name], "planned / measured": peak / measured[name]}

        yield name, run


def profile(session: Session) -> Iterator[tuple[str, Task]]:
    """List the kernels on which a step spends most time."""
    for name in PROFILED:

        def run(name: str = name) -> Row:
            settings = session.settings(SPEED[name], **{"profiling.first_step": "2" if session.tiny else "6"})
            (trace,) = (session.train(f"profile {name}", settings) / "profiles").glob("*.json.gz")
            with gzip.open(trace) as file:
                events = json.load(file)["traceEvents"]
            return longest_kernels(events)

        yield name, run


def longest_kernels(events: Sequence[Mapping[str, Any]], number: int = 12) -> Row:
    """Return the shares of the kernels with the longest total time in a trace. number: of these kernels."""
    times: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            times[event["name"]] += event["dur"]
    total = times.total()
    shares = (f"{time / total:.1%} {name[:70]}" for name, time in times.most_common(number))
    return {"kernels_s": total / 1e6, "longest": "; ".join(shares)}


def memory(session: Session) -> Iterator[tuple[str, Task]]:
    """Add memory techniques one after another."""
    baseline = settings = session.settings(_1B, **BASELINE)
    yield "baseline", lambda: session.measure("memory baseline", baseline)
    for name, changes in TECHNIQUES.items():
        settings = settings | changes
        yield f"+ {name}", lambda name=name, settings=settings: session.measure(f"memory {name}", settings)


def saves(session: Session) -> Iterator[tuple[str, Task]]:
    for mode in ("off", "thread"):

        def run(mode: str = mode) -> Row:
            changes = {"checkpoint.enabled": "true", "checkpoint.async_mode": mode, "checkpoint.interval_steps": "2"}
            folder = session.train(f"saves {mode}", session.settings(_1B, **changes, **{"checkpoint.keep": "1"}))
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
        folder = session.train("generation", session.settings(_1B, **{"checkpoint.enabled": "true"}))
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
    "profile": profile,
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
    named = {row: task for row, task in PARTS[part](session) if any(text in row for text in session.rows)}
    tasks = {row: task for row, task in named.items() if row not in finished}

    def measure(row: str) -> Row | None:
        if time.monotonic() > session.end:
            return None
        try:
            return tasks[row]()
        except (Failed, ConfigError, OSError, KeyError, ValueError, ArithmeticError) as error:
            return {"error": str(error) or repr(error)}

    with ThreadPoolExecutor(CONCURRENT.get(part, 1)) as pool:
        for row, values in zip(tasks, pool.map(measure, tasks), strict=True):
            if values is None:
                print(f"{part}: no time is available for {row}; call the script again", flush=True)
                return False
            complete = complete and "error" not in values
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
    rows_help = "measure only rows whose names contain one of these texts"
    parser.add_argument("--rows", nargs="+", default=[""], metavar="TEXT", help=rows_help)
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
    session = Session(out, args.tiny, label, rows=args.rows)
    with session.results.open("a") as file:
        file.write(json.dumps({"environment": now} | label) + "\n")
    complete = [run_part(part, session) for part in args.parts]
    print("\n\n".join(markdown(part, session) for part in args.parts))
    sys.exit(0 if all(complete) else 1)


if __name__ == "__main__":
    run_to_end(main)

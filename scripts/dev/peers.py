"""Comparison of this trainer's steps with those of other training loops, for benchmark.py."""

import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from models import MODELS as FAMILIES
from models.llama import LlamaSizes
from scripts.dev.contenders import CONTENDERS, Task, serve
from trainer.base.config import ConfigError
from trainer.base.config.packages import require_package
from trainer.base.config.schema.run import DeviceChoice
from trainer.base.system.children import children_ignore_signals
from trainer.base.system.environment import environment
from trainer.base.system.files import atomic_write
from trainer.runtime.device import require_enough_gpus
from trainer.tools.testing.layouts import Table

ROOT = Path(__file__).parents[2]
_PLAIN_LOOP = "from scripts.dev.plain_loop import main; main()"

_58M_SIZES = LlamaSizes(dim=512, n_layers=8, n_heads=8, n_kv_heads=8, hidden_dim=1376, vocab_size=32000)
_125M_SIZES = LlamaSizes(dim=768, n_layers=12, n_heads=12, n_kv_heads=12, hidden_dim=2048, vocab_size=32000)
_HYBRID_SIZES = replace(
    FAMILIES["qwen3.5"].by_size["debug"],
    **{
        "dim": 512,
        "n_layers": 8,
        "n_heads": 8,
        "n_kv_heads": 8,
        "head_dim": 64,
        "hidden_dim": 1376,
        "vocab_size": 32000,
    },
    **{"linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
)
MODELS = {
    "58m": ("llama3", _58M_SIZES, 2, 512),
    "125m": ("llama3", _125M_SIZES, 1, 512),
    "1b": ("llama3", FAMILIES["llama3.2"].by_size["1b"], 1, 4096),
    "58m-hybrid": ("qwen3.5", _HYBRID_SIZES, 1, 4096),
}
"""Name -> family, sizes, samples of a step, and tokens of a sample. "1b" needs a GPU."""

TOLERANCES = {"fp32": 1e-4, "bf16": 5e-3}
"""Precision -> largest relative deviation of losses. In bf16, those of 58m differ by up to 2.7e-3 on CPUs with AMX."""


def _check(contenders: Sequence[str], device: DeviceChoice) -> None:
    """Raise ConfigError if the contenders cannot be compared on this device, or if a package or a GPU is missing."""
    if not set(contenders) - {"kernels"}:
        raise ConfigError("", "--contenders kernels: needs a training loop to compare with")
    for i, name in enumerate(contenders):
        if name in contenders[:i]:
            raise ConfigError("", f"--contenders {name}: is given twice")
        if name == "kernels" and device == "gpu":
            raise ConfigError("", "--contenders kernels: can only replay the kernels of a CPU")
        if name in ("accelerate", "transformers"):
            require_package("accelerate", "")  # transformers' Trainer needs it too
            require_package(name, "")
    require_enough_gpus(device, 1)


class Contender:
    """The process of one contender."""

    def __init__(self, name: str, log: Path, pipe: Connection, process: BaseProcess):
        self.name, self._log, self._pipe, self._process = name, log, pipe, process

    @classmethod
    def start(cls, name: str, task: Task) -> "Contender":
        log = task.folder / f"{name}.log"
        context = multiprocessing.get_context("spawn")
        pipe, end = context.Pipe()
        process = context.Process(target=serve, args=(name, task, end, log), daemon=True)
        with children_ignore_signals():
            process.start()
        end.close()
        return cls(name, log, pipe, process)

    def run(self, steps: int) -> tuple[list[float], list[float], float]:
        """Run steps. Return the duration of each in seconds, the losses of all steps so far, and the CPU seconds. Raise
        ConfigError if the process ends."""
        try:
            self._pipe.send(steps)
            return self._pipe.recv()
        except (EOFError, OSError):
            log = self._log.read_text(errors="replace").splitlines()
            raise ConfigError("", f"{self.name} has ended: {log[-1] if log else 'without output'}") from None

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def write_tokens(task: Task, steps: int) -> None:
    """Write the random tokens of `steps` steps. Small ids are more frequent, so that the loss decreases."""
    count = (steps + 2) * task.batch * task.seq + 1
    uniform = np.random.default_rng(0).random(count)
    vocab = min(task.sizes.vocab_size, 1024)
    np.save(task.folder / "tokens.npy", (3 + (vocab - 3) * uniform**3).astype(np.uint16))


def require_equal_losses(losses: dict[str, list[float]], tolerance: float) -> float:
    """Return the largest relative deviation from the first contender. Raises ConfigError if it exceeds the tolerance."""
    (first, reference), *others = losses.items()
    largest = 0.0
    for name, values in others:
        deviations = [abs(a - b) / a for a, b in zip(reference, values, strict=True)]
        if not all(deviation <= tolerance for deviation in deviations):  # a loss may be NaN
            step = next(i for i, deviation in enumerate(deviations) if not deviation <= tolerance)
            message = f"{name} has another loss than {first} at step {step + 1}: {values[step]} and {reference[step]}"
            raise ConfigError("", f"{message}; no time counts")
        largest = max(largest, *deviations)
    return largest


def print_peers(
    model: str,
    contenders: Sequence[str] | None,
    steps: int,
    repeats: int,
    tolerance: float | None,
    results: Path | None,
    **options: Any,
) -> None:
    """Let the contenders train in turn and compare the times of their steps.

    Args:
        model: Key of MODELS.
        contenders: Keys of CONTENDERS, or None for all that the device can run.
        steps: Number of steps in a turn.
        repeats: Number of turns after the warm-up.
        tolerance: Largest relative deviation of losses, or None for that of the dtype.
        results: JSON file to write, or None.
        options: Further fields of Task.
    """
    family, sizes, batch, seq = MODELS[model]
    contenders = contenders or [name for name in CONTENDERS if name != "kernels" or options["device"] == "cpu"]
    _check(contenders, options["device"])
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        task = Task(family, sizes, batch, seq, folder=Path(folder), **options)
        write_tokens(task, steps * (repeats + 1))
        running = []
        for name in contenders:
            running.append(Contender.start(name, task))
            stack.callback(running[-1].close)
        times: dict[str, list[float]] = {name: [] for name in contenders}
        cpu_seconds, losses = dict.fromkeys(contenders, 0.0), {}
        for repeat in range(repeats + 1):
            for contender in running:
                durations, losses[contender.name], cpu = contender.run(steps)
                if repeat:  # the first repeat is a warm-up
                    times[contender.name] += durations
                    cpu_seconds[contender.name] += cpu / (steps * repeats)
    tolerance = tolerance or TOLERANCES[options["dtype"]]
    deviation = require_equal_losses({name: values for name, values in losses.items() if values}, tolerance)
    print(f"the losses of all contenders agree within {deviation:.1e}")
    table = Table(
        contender="<13", median=">11", min_to_max=">19", CPU_time=">11", of_first=">9", tokens_per_second=">18"
    )
    medians = {name: statistics.median(of_steps) for name, of_steps in times.items()}
    rates = {name: batch * seq / median for name, median in medians.items()}
    for name, median in medians.items():
        spread = f"{1e3 * min(times[name]):.1f} - {1e3 * max(times[name]):.1f} ms"
        table.row(
            name,
            f"{1e3 * median:.1f} ms",
            spread,
            f"{cpu_seconds[name]:.3f} s",
            f"{median / medians[contenders[0]]:.3f} x",
            f"{rates[name]:,.0f}",
        )
    if results is not None:
        measured = {"model": model, "step_time_s": times, "cpu_time_s": cpu_seconds, "tokens_per_second": rates}
        measured["deviation"] = deviation
        record = {**measured, "options": options, "environment": environment(ROOT)}
        atomic_write(results, json.dumps(record, indent=1))


def seconds_to_first_loss(command: Sequence[object]) -> float:
    """Run a command until it prints a line with a loss, and end it. Return the seconds. Raises ConfigError if there is none."""
    variables = os.environ | {"PYTHON": sys.executable, "NGPU": "1"}
    start = time.perf_counter()
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables, cwd=ROOT
    )
    line = ""
    with process:
        for line in process.stdout:
            if " | loss " in line:
                seconds = time.perf_counter() - start
                process.kill()
                return seconds
    raise ConfigError("", f"{command[0]} printed no loss: {line.strip() or 'no output'}")


def print_start(model: str, threads: int, repeats: int) -> None:
    """Run the plain loop's script and the trainer's in turn, and compare their times to the first loss."""
    family, sizes, batch, seq = MODELS[model]
    with tempfile.TemporaryDirectory() as folder:
        task = Task(family, sizes, batch, seq, threads, "fp32", compiled=False, device="cpu", folder=Path(folder))
        write_tokens(task, steps=9)
        (task.folder / "sizes.json").write_text(json.dumps(asdict(sizes)))
        files = task.folder / "tokens.npy", task.folder / "sizes.json"
        commands = {
            "plain": [sys.executable, "-c", _PLAIN_LOOP, *files, batch, seq, threads],
            "meshwright": [ROOT / "run_llama_train.sh", *task.flags(log_interval_steps=1)],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for repeat in range(repeats + 1):
            for name, command in commands.items():
                seconds = seconds_to_first_loss(command)
                if repeat:  # the first repeat prepares the data
                    times[name].append(seconds)
    table = Table(contender="<12", first_loss=">11", min_to_max=">16", of_first=">9")
    baseline = statistics.median(times["plain"])
    for name, of_repeats in times.items():
        median = statistics.median(of_repeats)
        spread = f"{min(of_repeats):.2f} - {max(of_repeats):.2f} s"
        table.row(name, f"{median:.2f} s", spread, f"{median / baseline:.2f} x")

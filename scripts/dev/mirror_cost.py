"""Cost of a mirror: the speed and the memory of a run that uploads its checkpoints, beside one that does not."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from scripts.dev.peers import MODELS
from trainer.base.system.run_files import METRICS_FILE
from trainer.tools.testing.layouts import Table

ROOT = Path(__file__).parents[2]


def _flags(folder: Path, name: str, model: str, threads: int, steps: int) -> list[str]:
    sizes, batch, seq = MODELS[model]
    values = {
        "run.output_folder": folder,
        "run.name": name,
        "data.store_folder": folder / "stores",
        "training.steps": steps,
        "training.seq_len": seq,
        "training.global_batch_size": batch,
        "training.local_batch_size": batch,
        "training.compute_dtype": "fp32",
        "training.cpu_threads": threads,
        "checkpoint.interval_steps": steps // 2,
        "checkpoint.keep": 1,
        "evaluation.interval_steps": 0,
        "metrics.interval_steps": 1,
        "metrics.sinks": '["jsonl"]',
        **{f"model.overrides.{key}": str(size).lower() for key, size in asdict(sizes).items()},
    }
    defaults = folder / "defaults.toml"
    defaults.touch()
    return ["--config", str(defaults), *(word for key, value in values.items() for word in (f"--{key}", str(value)))]


def _run(folder: Path, name: str, flags: list[str], steps: int) -> tuple[float, float]:
    """Return the seconds of the steps between the first save and the last, during which the first is uploaded, and the largest
    resident memory of the process in MiB."""
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{name} failed")
    rows = [json.loads(line) for line in (folder / name / METRICS_FILE).read_text().splitlines()]
    between = [row for row in rows if "loss" in row and steps // 2 + 1 < row["step"] < steps]
    return sum(row["step_time_s"] for row in between), usage.ru_maxrss / 1024


def print_upload_cost(url: str, model: str, threads: int, steps: int, repeats: int) -> None:
    """Print the medians of both ways, in turns, and what the upload of a checkpoint costs.

    Args:
        url: Prefix of the mirrors.
        model: Key of MODELS.
        threads: Number of CPU threads of a run.
        steps: Number of steps of a run, which saves after half of them.
        repeats: Number of turns.
    """
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    memory: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for turn in range(repeats):
            for way in seconds:
                name = f"{way}-{turn}"
                flags = _flags(folder, name, model, threads, steps)
                mirror = ["--checkpoint.mirror", f"{url}/{name}", "--checkpoint.mirror_timeout_s", "600"]
                found, peak = _run(folder, name, flags + (mirror if way == "with" else []), steps)
                seconds[way].append(found)
                memory[way].append(peak)
                shutil.rmtree(folder / name)
    table = Table(mirror="<10", seconds_of_the_steps=">22", spread=">18", largest_memory_MiB=">20")
    for way, of_way in seconds.items():
        spread = f"{min(of_way):,.1f} - {max(of_way):,.1f}"
        table.row(way, f"{statistics.median(of_way):,.1f}", spread, f"{statistics.median(memory[way]):,.0f}")
    lost = statistics.median(seconds["with"]) - statistics.median(seconds["without"])
    print(f"The upload of a checkpoint costs {lost:.1f} s: 2 % of {lost / 0.02:,.0f} s.")

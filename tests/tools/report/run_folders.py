"""Folders of runs with chosen records."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.base.config.load import load_config
from trainer.base.config.render import to_toml

HOSTILE = "<script>alert('x')</script>\"&{{ 7 * 7 }}"
"""A name that would run a script in a page that does not escape it."""


def train_record(step: int, loss: float | None = 2.0, **more: Any) -> dict[str, Any]:
    phases = {"data_time_s": 0.25, "forward_time_s": 1.0, "backward_time_s": 0.75}
    values = {"learning_rate": 1e-3 * step, "tokens_per_second": 100.0 + step, "step_time_s": 2.0}
    times = {"timestamp_s": 1.7e9 + step, "first_step": step}
    return {"kind": "train", "step": step, "loss": loss, **values, **phases, **times, **more}


def write_run(folder: Path, records: Iterable[Any], settings: Iterable[str] = (), **environment: Any) -> Path:
    """Write a run folder. records: dicts, or texts that are written as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    config = load_config(["--run.name", "run", *settings], check_files=())
    (folder / "config.toml").write_text(to_toml(config))
    facts = {"git_commit": "abc123", "git_clean": True, "device": "CPU", "world_size": 1, "packages": {"torch": "2.13"}}
    (folder / "environment.json").write_text(json.dumps(facts | environment))
    return folder

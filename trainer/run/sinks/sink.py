"""What a sink is, and what it knows of the run."""

import json
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from textwrap import indent
from typing import Any, Protocol

import tomli

from trainer.base.config import MetricsConfig, TrainingConfig
from trainer.base.system.run_files import CONFIG_FILE, ENVIRONMENT_FILE

_NOT_PLOTTED = (
    "step",
    "sample",
    "timestamp_s",
    "first_step",
    "global_batch_size",
    "cursor",
    "tokens_seen",
    "epochs_seen",
)


class Ending(StrEnum):
    """How a process that trains ends."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """Somebody, such as a scheduler, asked it to stop."""
    FAILED = "failed"


class Sink(Protocol):
    """A destination of records. `rewind` is called before the first record, and no constructor opens anything."""

    def write(self, record: dict[str, Any]) -> None:
        """Show a record, whose keys "kind", "step" and "timestamp_s" are always present."""

    def rewind(self, step: int) -> None:
        """Remove the records of all steps after `step`, because training continues from `step`."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class LoggedRun:
    """What sinks know of a run."""

    name: str
    folder: Path
    training: TrainingConfig
    """Number of steps, and the samples of each step."""
    metrics: MetricsConfig
    epochs: float | None = None
    """Number of epochs after which the run ends, if its length is given so."""

    @property
    def title(self) -> str:
        """Name of the run in a service."""
        return self.metrics.run_name or self.name

    def description(self) -> dict[str, Any]:
        """Return the complete configuration by section, and the environment (versions, hardware, git commit)."""
        environment = json.loads((self.folder / ENVIRONMENT_FILE).read_text())
        return tomli.loads((self.folder / CONFIG_FILE).read_text()) | {"environment": environment}


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """Return the values of a record that are curves, by their names, such as train/loss, eval/held_out/loss and task/arc/acc."""
    group = "/".join(filter(None, (record["kind"], record.get("dataset") or record.get("task"))))
    values = {k: v for k, v in record.items() if k not in _NOT_PLOTTED}
    values |= {f"{k}/{name}": v for k, inner in values.items() if isinstance(inner, dict) for name, v in inner.items()}
    return {f"{group}/{k}": v for k, v in values.items() if isinstance(v, int | float)}


def texts(record: dict[str, Any]) -> dict[str, str]:
    """Return the texts of a record in Markdown, by their names: samples/1, samples/2, problem."""
    if record["kind"] == "end":
        return {"problem": record["problem"]} if "problem" in record else {}
    samples = enumerate(record["samples"], 1) if record["kind"] == "samples" else ()
    return {f"samples/{i}": f"after {sample['prompt']!r}:\n\n{code_block(sample['text'])}" for i, sample in samples}


def code_block(text: str) -> str:
    """Return a text as it is, in Markdown. Any text may be indented, but a fence may occur in it."""
    return indent(text, "    ", lambda line: True)


def timestamp_s(record: dict[str, Any]) -> float:
    """Return the time of a record. Earlier versions recorded none: then it is the present."""
    return record.get("timestamp_s") or time.time()

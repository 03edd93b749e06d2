"""Whole runs of the Trainer on gloo ranks, and what tests look at afterwards."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer.config.load import load_config
from trainer.run.resolve import resolve
from trainer.run.run_folder import resume_point
from trainer.runtime.device import random_state
from trainer.trainer import Trainer


@dataclass(frozen=True)
class Result:
    """What one rank saw."""

    leaves: list[list[str]]
    """For each step, a hash of each microbatch this rank was given."""
    weights: str
    """Hash of all parameters and of the optimizer's state, as full tensors."""
    random: str
    """Hash of the state of this rank's random generators."""


class RecordingTrainer(Trainer):
    def train_step(self, batches, rate, stop=False):
        seen = []

        def watched():
            for batch in batches:
                seen.append(hashlib.sha256(batch.tokens.numpy().tobytes()).hexdigest()[:12])
                yield batch

        result = super().train_step(watched(), rate, stop)
        self.leaves.append(seen)
        return result


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def hash_of(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + full(tensors[name]).reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train(argv: Sequence[str]) -> Result:
    """Run on a rank: the Trainer of these arguments, to its end."""
    config, cpu = load_config(argv), torch.device("cpu")
    resolved = resolve(config, dist.get_world_size())
    trainer = RecordingTrainer(config, resolved, cpu, resume_point(config, resolved))
    trainer.leaves = []
    trainer.train()
    return Result(trainer.leaves, hash_of(trainer._tensors()), hash_of(random_state(cpu)))


def leaves_of_step(results: list[Result], step: int) -> list[str]:
    """The microbatches of a step in the global order: accumulation by accumulation, rank by rank."""
    by_accumulation = zip(*(result.leaves[step] for result in results), strict=True)
    return [leaf for leaves in by_accumulation for leaf in leaves]


def records(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def largest_deviation(one: list[dict], other: list[dict], key: str) -> float:
    """Relative, over all steps; both must have the same steps."""
    assert [r["step"] for r in one] == [r["step"] for r in other]
    return max(abs(a[key] - b[key]) / abs(a[key]) for a, b in zip(one, other, strict=True))

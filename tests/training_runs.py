"""Complete runs of the Trainer on gloo ranks, and readers of their results."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from trainer.base.config import ConfigError
from trainer.base.config.load import load_config
from trainer.base.system import console
from trainer.base.system.files import read_json_lines
from trainer.batch import Batch
from trainer.build import build_trainer
from trainer.checkpoint.mirror import open_mirror
from trainer.checkpoint.tensor_files import TensorMetadata, read_rows
from trainer.run.resolve import resolve
from trainer.run.run_folder import resume_point
from trainer.run.training_data import TrainingData
from trainer.runtime.device import rng_state
from trainer.state import TrainState
from trainer.tools.testing import parity
from trainer.tools.testing.parity import Trained
from trainer.tools.testing.ranks import LocalRanks
from trainer.trainer import Trainer


@dataclass(frozen=True)
class Result:
    """Batches and final state of one rank."""

    microbatches: list[list[str]]
    """For each step, a hash of each of this rank's microbatches."""
    weights: str
    """Hash of all parameters, moments and the guard's state, as full tensors."""
    random: str
    """Hash of the states of this rank's random generators."""


@contextmanager
def recorded_batches() -> Iterator[list[Batch]]:
    """Record every microbatch that a Trainer of this process receives."""
    recorded: list[Batch] = []
    original = TrainingData.batches

    def batches(self: TrainingData, state: TrainState) -> Iterator[Batch]:
        for batch in original(self, state):
            recorded.append(batch)
            yield batch

    with mock.patch.object(TrainingData, "batches", batches):
        yield recorded


def combine(words: Sequence[str]) -> list[str]:
    """Return a command line in which a later value of a setting replaces an earlier one."""
    settings = dict(zip(words[::2], words[1::2], strict=True))
    return [word for pair in settings.items() for word in pair]


def in_folder(folder: Path) -> list[str]:
    return ["--run.output_folder", str(folder.parent), "--run.name", folder.name]


def checkpoint_of(run: Path) -> Path:
    """Return the latest checkpoint of a run folder."""
    return max((run / "checkpoints").iterdir())


@contextmanager
def without_code_generation() -> Iterator[None]:
    """Compile blocks to the graphs that the compiler gets, without generating code for them. Code takes most of the time."""
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        yield


def train_without_code(argv: Sequence[str], decisions: Any) -> Any:
    """Train as parity does, see without_code_generation."""
    with without_code_generation():
        return parity.train(argv, decisions)


def measured(ranks: Callable[[int], LocalRanks], size: int, argv: Sequence[str], folder: Path) -> Trained:
    """Train as scripts/parity.py does, on `size` ranks."""
    parts = ranks(size).run(train_without_code, combine([*argv, *in_folder(folder)]), {})
    return Trained.of_ranks(records(folder), parts)


def microbatch_hashes(batches: Sequence[Batch], num_microbatches: Iterable[int]) -> list[list[str]]:
    """Hash each microbatch, step by step. num_microbatches: of each step."""
    hashes = (hashlib.sha256(batch.tokens.numpy().tobytes()).hexdigest()[:12] for batch in batches)
    return list(takewhile(bool, (list(islice(hashes, number)) for number in num_microbatches)))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def hash_of(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + full(tensors[name]).reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def trainer_from(argv: Sequence[str]) -> Trainer:
    """Build the Trainer of a command line on this rank, resumed from the latest checkpoint of its run."""
    config = load_config(argv)
    resolved = resolve(config, dist.get_world_size())
    mirror = open_mirror(config.checkpoint, config.run.folder)
    point = resume_point(config.run.folder, config.checkpoint.load_step, resolved.fingerprint)
    return build_trainer(config, resolved, torch.device("cpu"), point, mirror=mirror)


def train(argv: Sequence[str]) -> Result:
    """Train up to the last step on this rank."""
    trainer = trainer_from(argv)
    partition, training = trainer.data.partition, trainer.config.training
    steps = range(trainer.state.step + 1, training.steps + 1)
    with recorded_batches() as batches:
        trainer.train()
    hashes = microbatch_hashes(batches, (partition.num_microbatches(training.batch_size(step)) for step in steps))
    return Result(hashes, hash_of(trainer.engine.tensors()), hash_of(rng_state(torch.device("cpu"))))


def lines_logged_by_train(argv: Sequence[str]) -> list[str]:
    """Train, and return the information that this rank logs."""
    with mock.patch.object(console, "info") as info:
        train(argv)
    return [call.args[0] for call in info.call_args_list]


def error_line(argv: Sequence[str]) -> str:
    """Return the error line of a run on this rank."""
    try:
        config = load_config(combine(argv))
    except ConfigError as error:
        return str(error)
    try:
        train(combine(argv))
    except ConfigError as error:
        return config.explain(error)
    return ""


def microbatches_of_step(results: list[Result], step: int) -> list[str]:
    """Return the microbatches of a step in global order: by accumulation index, then by rank."""
    by_accumulation = zip(*(result.microbatches[step] for result in results), strict=True)
    return [microbatch for microbatches in by_accumulation for microbatch in microbatches]


def records(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [record for record in read_json_lines(folder / "metrics.jsonl") if record["kind"] == kind]


def largest_deviation(reference: list[dict], other: list[dict], key: str) -> float:
    """Return the largest relative deviation over all steps, which must be the same in both."""
    assert [r["step"] for r in reference] == [r["step"] for r in other]
    return max(abs(a[key] - b[key]) / abs(a[key]) for a, b in zip(reference, other, strict=True))


def read_tensor(checkpoint: Path, name: str, stored: TensorMetadata) -> torch.Tensor:
    """Read a full tensor of a checkpoint."""
    if stored.shape:
        return read_rows(checkpoint, name, stored, 0, stored.shape[0])
    with safe_open(checkpoint / stored.chunks[0].file, framework="pt") as tensors:
        return tensors.get_tensor(name)

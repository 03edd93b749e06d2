"""Checkpoints through torch.distributed.checkpoint: one folder a step, committed by one rename or not there at all.

checkpoints/step-00000100/
    *.distcp, .metadata    model, optimizer and random state: each rank's shards, loadable by any number of ranks
    train_state.json       step, data cursor, and what a run that resumes must have in common
    config.toml            the resolved configuration
    manifest.json          every file and its size; written last
"""

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from trainer import logging
from trainer.config import ConfigError
from trainer.distributed import from_rank_0
from trainer.system import sync, write_durably

_NAME = re.compile(r"step-(\d{8,})")

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that a run can go on from."""

    path: Path
    state: dict[str, Any]
    """The content of train_state.json."""


def find(folder: Path) -> Saved | None:
    """The complete checkpoint of the highest step, or None, on all ranks together: rank 0 looks, since ranks that see
    different states of a file system must not go on from different steps. Other folders are ignored; an incomplete
    checkpoint is passed over with a warning. Raises ConfigError where all are incomplete: starting afresh would write over
    what may still be of use."""
    return from_rank_0(lambda: _newest(folder))


def _newest(folder: Path) -> Saved | None:
    steps = {int(m[1]): p for p in folder.glob("step-*") if (m := _NAME.fullmatch(p.name))}
    for _, path in sorted(steps.items(), reverse=True):
        problem = _problem(path)
        if not problem:
            return Saved(path, json.loads((path / "train_state.json").read_text()))
        logging.warning(f"passed over {path}: {problem}")
    if steps:
        rule = f"{folder}: none of {len(steps)} checkpoints is complete; another --run.name starts a new run"
        raise ConfigError("", rule)
    return None


def _problem(checkpoint: Path) -> str:
    """What the manifest promises and the folder does not hold, or ""."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "no readable manifest.json"
    for name, size in files:
        path = checkpoint / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes of {size}"
    try:
        state = json.loads((checkpoint / "train_state.json").read_text())
        return "" if {"step", "cursor", "identity"} <= set(state) else "train_state.json lacks the state of the run"
    except (OSError, ValueError, TypeError):
        return "train_state.json cannot be read"


def require_same(saved: Saved, now: Mapping[str, Any]) -> None:
    """Raises ConfigError, with every difference, where a resumed run would not mean what the checkpoint holds.

    now: as in the state's "identity", or a part of it.
    """
    before = saved.state["identity"]
    now = json.loads(json.dumps(now))  # as it would have been saved
    differences = [
        f"{key} was {json.dumps(before.get(key))}, is {json.dumps(value)}"
        for key, value in sorted(now.items())
        if before.get(key) != value
    ]
    if differences:
        raise ConfigError(
            "", f"cannot resume from {saved.path}: {'; '.join(differences)}; another --run.name starts a new run"
        )


def save(folder: Path, step: int, tensors: Tensors, train_state: Mapping[str, Any], config_toml: str) -> Path:
    """Write the checkpoint of a step, on all ranks together. tensors: every rank its own, DTensors or plain ones."""
    final = folder / f"step-{step:08d}"
    aside = folder / f"{final.name}.saving"
    from_rank_0(lambda: _empty(aside))
    with _collectives() as no_dist:
        dcp.save(dict(tensors), storage_writer=FileSystemWriter(aside), no_dist=no_dist)
    from_rank_0(lambda: _commit(aside, final, train_state, config_toml))
    return final


def load(checkpoint: Path, tensors: Tensors) -> None:
    """Fill the tensors from a checkpoint, on all ranks together, whatever ranks and layout it was saved by."""
    with _collectives() as no_dist:
        dcp.load(dict(tensors), storage_reader=FileSystemReader(checkpoint), no_dist=no_dist)


@contextmanager
def _collectives() -> Iterator[bool]:
    """Yields whether DCP shall do without collectives: on one rank.

    They run in a thread of gloo's, with an OpenMP team of its own; with more teams than cores libgomp no longer spins, and
    after a save every later step took 1.7 times as long (torch 2.13, 2 cores).
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield dist.get_world_size() == 1


def _empty(folder: Path) -> None:
    """A new folder, and nothing left of saves that never came to their end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left_behind in folder.parent.glob("step-*.saving"):
        shutil.rmtree(left_behind)
    folder.mkdir()


def _commit(aside: Path, final: Path, train_state: Mapping[str, Any], config_toml: str) -> None:
    (aside / "train_state.json").write_text(json.dumps(train_state, indent=1))
    (aside / "config.toml").write_text(config_toml)
    files = sorted(aside.iterdir())
    for path in files:
        sync(path)
    sizes = {path.name: path.stat().st_size for path in files}
    write_durably(aside / "manifest.json", json.dumps({"version": 1, "files": sizes}, indent=1))
    sync(aside)
    if final.exists():
        assert _problem(final), "a run goes on from its newest complete checkpoint"
        shutil.rmtree(final)
    aside.rename(final)
    sync(final.parent)

"""Checkpoints through torch.distributed.checkpoint: one folder a step, committed by one rename or not there at all.

checkpoints/step-00000100/
    *.distcp, .metadata    model, optimizer and random state: each rank's shards, loadable by any number of ranks
    train_state.json       step, data cursor, and what a run that resumes must have in common
    config.toml            the resolved configuration
    manifest.json          every file and its size; written last
"""

import itertools
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from trainer.config import ConfigError

_NAME = re.compile(r"step-(\d{8,})")

Tensors = Mapping[str, Tensor]


def newest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None. Other folders are ignored."""
    return next((path for path in _newest_first(folder) if not _problem(path)), None)


def passed_over(folder: Path) -> list[str]:
    """For each checkpoint of a higher step than the newest complete one, what is wrong with it."""
    broken = itertools.takewhile(_problem, _newest_first(folder))
    return [f"{path}: {_problem(path)}" for path in broken]


def _newest_first(folder: Path) -> list[Path]:
    steps = {int(m[1]): p for p in folder.glob("step-*") if (m := _NAME.fullmatch(p.name))}
    return [steps[step] for step in sorted(steps, reverse=True)]


def _problem(checkpoint: Path) -> str:
    """What the manifest promises and the folder does not hold, or ""."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    except (OSError, ValueError, KeyError):
        return "no readable manifest.json"
    for name, size in files.items():
        path = checkpoint / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            return f"{name} has {found} bytes of {size}" if found is not None else f"{name} is missing"
    return ""


def read_train_state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "train_state.json").read_text())


def require_same(checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ConfigError, with every difference, where a resumed run would not mean what the checkpoint holds."""
    now = json.loads(json.dumps(now))  # as it would have been saved
    differences = [
        f"{key} was {json.dumps(saved.get(key))}, is {json.dumps(now.get(key))}"
        for key in sorted({*saved, *now})
        if saved.get(key) != now.get(key)
    ]
    if differences:
        raise ConfigError(
            "", f"cannot resume from {checkpoint}: {'; '.join(differences)}; another --run.name starts a new run"
        )


def save(folder: Path, step: int, tensors: Tensors, train_state: Mapping[str, Any], config_toml: str) -> Path:
    """Write the checkpoint of a step, on all ranks together. tensors: every rank its own, DTensors or plain ones."""
    final = folder / f"step-{step:08d}"
    aside = folder / f"{final.name}.saving"
    _on_rank_0(lambda: _empty(aside))
    with _alone():
        dcp.save(dict(tensors), storage_writer=FileSystemWriter(aside), no_dist=dist.get_world_size() == 1)
    _on_rank_0(lambda: _commit(aside, final, train_state, config_toml))
    return final


def load(checkpoint: Path, tensors: Tensors) -> None:
    """Fill the tensors from a checkpoint, on all ranks together, whatever ranks and layout it was saved by."""
    dcp.load(dict(tensors), storage_reader=FileSystemReader(checkpoint))


def keys(checkpoint: Path) -> set[str]:
    """Names of the tensors in a checkpoint."""
    return set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)


@contextmanager
def _alone() -> Iterator[None]:
    """One rank saves without collectives. They would run in a thread of gloo's with an OpenMP team of its own, and with
    more teams than cores libgomp no longer spins: every later step took 1.7 times as long (torch 2.13, 2 cores)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _on_rank_0(work: Callable[[], None]) -> None:
    """Nobody goes on before it is done; an error on rank 0 ends it, and so the job."""
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def _empty(folder: Path) -> None:
    """What a save left behind that never came to its end."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _commit(aside: Path, final: Path, train_state: Mapping[str, Any], config_toml: str) -> None:
    _write(aside / "train_state.json", json.dumps(train_state, indent=1))
    _write(aside / "config.toml", config_toml)
    sizes = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
    _write(aside / "manifest.json", json.dumps({"version": 1, "files": sizes}, indent=1))
    _sync(aside)
    if final.exists():  # the same step again, after a return to an earlier one
        replaced = final.with_name(f"{final.name}.replaced")
        final.rename(replaced)
        aside.rename(final)
        shutil.rmtree(replaced)
    else:
        aside.rename(final)
    _sync(final.parent)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Checkpoints: one folder a step, committed by one rename or not there at all, and trusted only after it was verified.

checkpoints/
    step-00000100/
        rank-00000.safetensors ...   model, optimizer and random state: each rank's parts (shards.py)
        index.json                   where each tensor's parts are
        train_state.json             step, data cursor, and what a run that resumes must have in common
        config.toml                  the resolved configuration
        model.json, tokenizer.*      what the network is, and its tokenizer
        manifest.json                every file, its size and the hash of its content; written last (manifest.py)
    step-00000100.tmp-xxxxxxxx       a save that is not finished; nothing reads it
    step-00000100.old                what a second save of the step has just replaced; counts where that never came to its end
    discarded-1/                     the newer checkpoints that a run left when it was rolled back
    lineage.json                     what it was rolled back to
"""

import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, SavePlan, StorageReader

from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import CorruptError, File, Manifest
from trainer.checkpoint.storage import Planner, ShardReader, ShardWriter, TensorMetadata, read_index, retry_transient
from trainer.config import ConfigError
from trainer.runtime.distributed import run_on_rank_0
from trainer.system import logging
from trainer.system.files import is_temporary, sync, temporary_path

_NAME = re.compile(r"step-(\d{8,15})(\.old)?")

Tensors = Mapping[str, Tensor]


# ---------------------------------------------------------------- names


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step that a name is of; None for other names."""
    found = _NAME.fullmatch(name)
    return found and int(found[1])


def step_of(checkpoint: Path) -> int:
    step = parse_step(checkpoint.name)
    assert step is not None, checkpoint
    return step


def committed(folder: Path) -> list[Path]:
    """The folders of committed checkpoints, newest first, of a step that was saved again the newer one first; whether they are
    whole is not looked at. Raises OSError where the folder cannot be read; one that is not there has none."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = [folder / name for name in names if parse_step(name) is not None and (folder / name).is_dir()]
    return sorted(found, key=lambda path: (-step_of(path), path.name))


def latest_per_step(folder: Path) -> list[Path]:
    """Of each step the checkpoint that counts, newest first."""
    return list({step_of(path): path for path in reversed(committed(folder))}.values())[::-1]


# ---------------------------------------------------------------- saving


@dataclass(frozen=True)
class SaveRequest:
    """What is to be saved besides tensors, and where."""

    folder: Path
    step: int
    files: Mapping[str, bytes]
    """Small ones: name -> content."""
    metadata: Mapping[str, Any]
    """For the manifest."""
    keep: int
    """Newest checkpoints that are kept; 0: all."""
    keep_interval_steps: int
    """Steps whose multiples are kept too; 0: none."""
    keep_best: int
    """A step that is kept too; 0: none."""
    staging_dir: Path
    """A folder of its own until all is written, made by `prepare`."""

    @property
    def final(self) -> Path:
        return path_of(self.folder, self.step)


class SaveFailed(Exception):
    """One line: what could not be saved and why. What was saved before is untouched."""


def make_staging_dir(folder: Path, step: int) -> Path:
    """A new folder to save a step in, on all ranks together; what saves that never came to their end left behind is
    removed. Raises SaveFailed."""

    def work() -> Path | str:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if is_temporary(path):
                    shutil.rmtree(path, ignore_errors=True)
            staging_dir = temporary_path(path_of(folder, step))
            retry_transient(staging_dir.mkdir)
            return staging_dir
        except OSError as error:
            return f"{error.filename}: {error.strerror}"

    made = run_on_rank_0(work)
    if isinstance(made, str):
        raise SaveFailed(f"step {step} could not be saved: {made}")
    return made


def save(request: SaveRequest, plan: SavePlan, contents: Tensors, group: dist.ProcessGroup | None) -> None:
    """Write and commit a checkpoint, on all ranks together. plan: of this rank (shards.plan_of); contents: its tensors, or
    copies. group: of all ranks, None where there is one rank only. Raises SaveFailed."""
    commit = partial(_commit, request)
    try:
        with _collectives():
            dcp.save(
                {},
                storage_writer=ShardWriter(request.staging_dir, commit),
                planner=Planner(plan, contents),
                process_group=group,
                no_dist=group is None,
            )
    except (CheckpointException, OSError) as error:
        # All ranks have ended their work when this is raised on each.
        if group is None or dist.get_rank(group) == 0:
            shutil.rmtree(request.staging_dir, ignore_errors=True)
        cause = _cause(error)
        if not cause:
            raise
        raise SaveFailed(f"step {request.step} could not be saved: {cause}") from error
    if group is None or dist.get_rank(group) == 0:
        prune(request)


def _cause(error: Exception) -> str:
    """What the file system refused, in words; "" where it was not the file system."""
    if isinstance(error, CheckpointException):
        told = ((rank, _cause(cause)) for rank, (cause, _) in sorted(error.failures.items()))
        return next((f"rank {rank}: {cause}" for rank, cause in told if cause), "")
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return ""


@contextmanager
def _collectives() -> Iterator[None]:
    """One rank saves and loads without collectives. They run in a thread of gloo's, with an OpenMP team of its own; with more
    teams than cores libgomp no longer spins, and after a save every later step took 1.7 times as long (torch 2.13, 2
    cores). torch warns of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _commit(request: SaveRequest, files: dict[str, File]) -> None:
    """Everything is written: make it a checkpoint."""
    staging_dir, final = request.staging_dir, request.final
    for name, content in request.files.items():
        files[name] = retry_transient(partial(manifest.write_file, staging_dir / name, content))
    retry_transient(lambda: manifest.write(staging_dir, Manifest(files, request.metadata)))
    retry_transient(partial(sync, staging_dir))
    replaced = final.with_name(f"{final.name}.old")
    if final.exists():
        if replaced.exists():
            _remove(replaced)
        final.rename(replaced)
    staging_dir.rename(final)
    sync(final.parent)
    if replaced.exists():
        _remove(replaced)


def prune(request: SaveRequest) -> None:
    """Remove checkpoints older than the one just saved, which counts as the first of those to keep. Never fatal. What lacks a
    file does not count; what is newer, as after damage that a run went back behind, is none of this lineage's."""
    if not request.keep:
        return
    try:
        whole = 1
        for path in latest_per_step(request.folder):
            if step_of(path) >= request.step:
                continue
            if whole >= request.keep and not _is_kept(request, step_of(path)):
                if not path.is_symlink():
                    _remove(path)
            elif _has_all_files(path):
                whole += 1
    except OSError as error:
        logging.warning(f"old checkpoints were not removed: {error.filename}: {error.strerror}")


def _is_kept(request: SaveRequest, step: int) -> bool:
    return step == request.keep_best or (request.keep_interval_steps > 0 and step % request.keep_interval_steps == 0)


def _has_all_files(checkpoint: Path) -> bool:
    try:
        manifest.read(checkpoint)
    except CorruptError:
        return False
    return True


def _remove(checkpoint: Path) -> None:
    """Under another name first, so that what is half removed is no checkpoint."""
    trash = temporary_path(checkpoint)
    checkpoint.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


# ---------------------------------------------------------------- loading


def load(checkpoint: Path, tensors: Tensors, expected: Collection[str]) -> None:
    """Fill the tensors from a verified checkpoint, on all ranks together, whatever ranks and layout it was saved by.

    expected: every name that some rank fills, or that need not be filled; a stored tensor whose name does not begin with
    one of them is an error, as are missing ones and other shapes or dtypes: ConfigError, with the names.
    """
    try:
        index = read_index(checkpoint)
    except CorruptError as damage:
        raise ConfigError("", f"{checkpoint}: {damage}") from None
    problems = [f"{name} belongs to no part of this run" for name in index if not _is_expected(name, expected)]
    load_into(checkpoint, ShardReader(checkpoint, index), index, tensors, problems=problems)


def load_into(
    folder: Path,
    reader: StorageReader,
    index: Mapping[str, TensorMetadata],
    tensors: Tensors,
    *,
    cast: bool = False,
    problems: Sequence[str] = (),
) -> None:
    """Fill the tensors from what the reader reads, on all ranks together. cast: whether another dtype may become that of the
    tensor. Raises ConfigError, with the names of what does not fit and the problems that are known already."""
    problems = [*problems]
    for name, tensor in tensors.items():
        stored = index.get(name)
        if stored is None:
            problems.append(f"{name} is missing")
        elif stored.shape != tuple(tensor.shape):
            problems.append(f"{name} is {list(stored.shape)} there, {list(tensor.shape)} here")
        elif stored.dtype != tensor.dtype and not cast:
            problems.append(f"{name} is {stored.dtype} there, {tensor.dtype} here")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise ConfigError("", f"cannot load {folder}: {'; '.join(problems[:5])}{more}")
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _collectives():
            dcp.load(dict(tensors), storage_reader=reader, planner=planner, no_dist=dist.get_world_size() == 1)
    except CheckpointException as error:
        damage = next((cause for cause, _ in error.failures.values() if isinstance(cause, CorruptError)), None)
        if damage is None:
            raise
        raise ConfigError("", f"{folder}: {damage}") from None


def _is_expected(name: str, expected: Collection[str]) -> bool:
    """Whether the name, or a part of it that ends at a slash, is among them."""
    parts = name.split("/")
    return any("/".join(parts[:n]) in expected for n in range(1, len(parts) + 1))

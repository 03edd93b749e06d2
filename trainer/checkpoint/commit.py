"""Checkpoints: one folder per step, committed by one rename, and verified before it is loaded.

checkpoints/
    step-00000100/
        rank-00000.safetensors ...   chunks of one rank: model, optimizer, stability and RNG state (storage.py)
        index.json                   the files that contain the chunks of each tensor
        train_state.json             step, data cursor, and the values that a resumed run must not change
        config.toml                  the resolved configuration
        model.json, tokenizer.*      the model's dimensions, and the files of the tokenizer
        manifest.json                size and hash of every file; written last (manifest.py)
    step-00000100.tmp-xxxxxxxx       an unfinished save or removal; never read
    step-00000100.old                the old save of a step that is saved again; used if replacing it was interrupted
    discarded-1/                     newer checkpoints that a rollback moved away
    lineage.json                     the steps that the run was rolled back to
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
    """Return the step that a checkpoint's name contains, or None for other names."""
    match = _NAME.fullmatch(name)
    return match and int(match[1])


def step_of(checkpoint: Path) -> int:
    step = parse_step(checkpoint.name)
    assert step is not None, checkpoint
    return step


def committed(folder: Path) -> list[Path]:
    """Return the folders of committed checkpoints without verifying them, newest step first. A replaced save (.old) follows
    the new save of its step. Raises OSError if the folder exists but cannot be read."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    paths = [folder / name for name in names if parse_step(name) is not None and (folder / name).is_dir()]
    return sorted(paths, key=lambda path: (-step_of(path), path.name))


def latest_per_step(folder: Path) -> list[Path]:
    """Return the folder of one committed checkpoint per step, newest step first."""
    return list({step_of(path): path for path in reversed(committed(folder))}.values())[::-1]


# ---------------------------------------------------------------- saving


@dataclass(frozen=True)
class SaveRequest:
    """Destination of a save, and the data to save besides tensors."""

    folder: Path
    step: int
    files: Mapping[str, bytes]
    """Name -> content of small files to save."""
    metadata: Mapping[str, Any]
    """Metadata to write to the manifest."""
    keep: int
    """Number of newest checkpoints to keep; 0: keep all."""
    keep_interval_steps: int
    """Checkpoints whose step is a multiple of this number are kept too; 0: none."""
    keep_best: int
    """Step of the best checkpoint, which is kept too; 0: none."""
    staging_dir: Path
    """Folder from make_staging_dir, which the commit renames."""

    @property
    def final(self) -> Path:
        return path_of(self.folder, self.step)


class SaveFailed(Exception):
    """Failure of a save. The message is one line with the step and the reason. Earlier checkpoints are unaffected."""


def make_staging_dir(folder: Path, step: int) -> Path:
    """Create the staging folder for a step, and remove those of interrupted saves, collectively. Raises SaveFailed."""

    def work() -> Path | str:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if path.name.startswith("step-") and is_temporary(path):
                    shutil.rmtree(path, ignore_errors=True)
            staging_dir = temporary_path(path_of(folder, step))
            retry_transient(staging_dir.mkdir)
            return staging_dir
        except OSError as error:
            return f"{error.filename}: {error.strerror}"

    result = run_on_rank_0(work)
    if isinstance(result, str):
        raise SaveFailed(f"step {step} could not be saved: {result}")
    return result


def save(request: SaveRequest, plan: SavePlan, contents: Tensors, group: dist.ProcessGroup | None) -> None:
    """Write and commit a checkpoint, collectively. plan: result of local_save_plan. contents: this rank's local tensors, or
    copies of them. group: process group of the writers, or None for a single rank. Raises SaveFailed."""
    commit = partial(_commit, request)
    try:
        with _no_dist_warning():
            dcp.save(
                {},
                storage_writer=ShardWriter(request.staging_dir, commit),
                planner=Planner(plan, contents),
                process_group=group,
                no_dist=group is None,
            )
    except (CheckpointException, OSError) as error:
        # The exception is raised after all ranks have finished writing, so no file appears after the removal.
        if group is None or dist.get_rank(group) == 0:
            shutil.rmtree(request.staging_dir, ignore_errors=True)
        cause = _cause(error)
        if not cause:
            raise
        raise SaveFailed(f"step {request.step} could not be saved: {cause}") from error
    if group is None or dist.get_rank(group) == 0:
        prune(request)


def _cause(error: Exception) -> str:
    """Return the file system's error message, or "" for other errors."""
    if isinstance(error, CheckpointException):
        causes = ((rank, _cause(cause)) for rank, (cause, _) in sorted(error.failures.items()))
        return next((f"rank {rank}: {cause}" for rank, cause in causes if cause), "")
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return ""


@contextmanager
def _no_dist_warning() -> Iterator[None]:
    """Silence torch's warning that a single rank saves and loads without collectives. Collectives would run in a gloo thread
    with a separate OpenMP team: with more teams than cores libgomp stops spinning, and each step after a save took 1.7 times as
    long (torch 2.13, 2 cores)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _commit(request: SaveRequest, files: dict[str, File]) -> None:
    """Write the remaining files and the manifest, then rename the staging folder to its final name."""
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
    """Delete old checkpoints. The checkpoint just saved counts towards `keep`; incomplete checkpoints do not. Newer checkpoints
    remain: they exist if the run resumed from before a damaged one. File system errors are logged as a warning."""
    if not request.keep:
        return
    try:
        complete = 1
        for path in latest_per_step(request.folder):
            if step_of(path) >= request.step:
                continue
            if complete >= request.keep and not _is_protected(request, step_of(path)):
                if not path.is_symlink():
                    _remove(path)
            elif _has_all_files(path):
                complete += 1
    except OSError as error:
        logging.warning(f"old checkpoints were not removed: {error.filename}: {error.strerror}")


def _is_protected(request: SaveRequest, step: int) -> bool:
    return step == request.keep_best or (request.keep_interval_steps > 0 and step % request.keep_interval_steps == 0)


def _has_all_files(checkpoint: Path) -> bool:
    try:
        manifest.read(checkpoint)
    except CorruptError:
        return False
    return True


def _remove(checkpoint: Path) -> None:
    """Rename the folder, then delete it, so that a partly deleted folder is never mistaken for a checkpoint."""
    trash = temporary_path(checkpoint)
    checkpoint.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


# ---------------------------------------------------------------- loading


def load(checkpoint: Path, tensors: Tensors, expected: Collection[str]) -> None:
    """Load the tensors in place from a verified checkpoint of any layout, collectively. expected: names, or prefixes of names
    up to a slash, that a checkpoint may contain. Raises ConfigError that lists the tensors that do not match."""
    try:
        index = read_index(checkpoint)
    except CorruptError as damage:
        raise ConfigError("", f"{checkpoint}: {damage}") from None
    problems = [f"{name} is not a tensor of this run" for name in index if not _is_expected(name, expected)]
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
    """Load the tensors in place through the reader, collectively. cast: whether to convert stored dtypes. Raises ConfigError
    that lists `problems` and the tensors that do not match."""
    problems = [*problems]
    for name, tensor in tensors.items():
        stored = index.get(name)
        if stored is None:
            problems.append(f"{name} is missing")
        elif stored.shape != tuple(tensor.shape):
            problems.append(f"{name} has shape {list(stored.shape)}, expected {list(tensor.shape)}")
        elif stored.dtype != tensor.dtype and not cast:
            problems.append(f"{name} has dtype {stored.dtype}, expected {tensor.dtype}")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise ConfigError("", f"cannot load {folder}: {'; '.join(problems[:5])}{more}")
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _no_dist_warning():
            dcp.load(dict(tensors), storage_reader=reader, planner=planner, no_dist=dist.get_world_size() == 1)
    except CheckpointException as error:
        damage = next((cause for cause, _ in error.failures.values() if isinstance(cause, CorruptError)), None)
        if damage is None:
            raise
        raise ConfigError("", f"{folder}: {damage}") from None


def _is_expected(name: str, expected: Collection[str]) -> bool:
    """Whether the name, or a prefix of the name up to a slash, is in `expected`."""
    words = name.split("/")
    return any("/".join(words[:n]) in expected for n in range(1, len(words) + 1))

"""Checkpoints: one folder per step, which is committed by one rename and verified before it is loaded.

checkpoints/
    step-00000100/
        rank-00000.safetensors ...   tensor chunks of one rank: model, optimizer, stability, RNG (tensor_files.py)
        index.json                   the files that contain the chunks of each tensor
        train_state.json             step, data cursor, and the values that a resumed run must not change
        config.toml                  the resolved configuration
        model.json, tokenizer.*      the model's dimensions, and the files of the tokenizer
        manifest.json                size and hash of every file; written last (manifest.py)
    step-00000100.tmp-xxxxxxxx       an unfinished save or removal; never read
    step-00000100.old                the previous checkpoint while its step is saved again; used if that save is interrupted
    discarded-1/                     checkpoints later than the target of a rollback
    lineage.json                     the steps that the run was rolled back to
"""

import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, SavePlan

from trainer.base.config import ConfigError
from trainer.base.system import console
from trainer.base.system.files import describe, is_temporary, sync, temporary_path
from trainer.base.system.run_files import latest_per_step, step_of
from trainer.checkpoint import manifest, tensor_files
from trainer.checkpoint.manifest import CorruptError, File, Manifest
from trainer.checkpoint.tensor_files import TensorMetadata
from trainer.runtime.distributed import first_problem, run_on_rank_0
from trainer.runtime.dtensor import local_region

Tensors = Mapping[str, Tensor]


# ---------------------------------------------------------------- saving


@dataclass(frozen=True)
class SaveRequest:
    """Destination of a save, and all data to save except the tensors."""

    folder: Path
    step: int
    files: Mapping[str, bytes]
    """Name -> content of small files to save."""
    metadata: Mapping[str, Any]
    """Metadata to write to the manifest."""
    keep: int
    """Number of newest checkpoints to keep. 0 keeps all checkpoints."""
    keep_interval_steps: int
    """Interval in steps. Checkpoints at its multiples are kept regardless of `keep`. 0 disables this rule."""
    keep_best: int
    """Step of the best checkpoint, which is kept regardless of `keep`, or 0 if there is none."""
    after_commit: "Callable[[SaveRequest], None] | None" = None
    """Called on all ranks after the commit, and deletes old checkpoints later. None: rank 0 deletes them at once."""

    @property
    def final(self) -> Path:
        return self.folder / f"step-{self.step:08d}"


class SaveFailed(Exception):
    """Failure of a save. The message is one line with the step and the reason. Earlier checkpoints are unaffected."""


def make_staging_dir(final: Path) -> Path:
    """Create the staging folder of a checkpoint, collectively. Remove staging folders of earlier saves. Raises SaveFailed."""

    def work() -> Path | str:
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            for path in final.parent.iterdir():
                if path.name.startswith("step-") and is_temporary(path):
                    shutil.rmtree(path, ignore_errors=True)
            staging_dir = temporary_path(final)
            tensor_files.retry_transient(staging_dir.mkdir)
            return staging_dir
        except OSError as error:
            return describe(error)

    result = run_on_rank_0(work)
    if isinstance(result, str):
        raise SaveFailed(f"step {step_of(final)} could not be saved: {result}")
    return result


def save(
    request: SaveRequest, staging_dir: Path, plan: SavePlan, contents: Tensors, group: dist.ProcessGroup | None
) -> None:
    """Write a checkpoint to its staging folder and commit it, collectively.

    Args:
        plan: Result of local_save_plan.
        contents: This rank's local tensors, or copies of them.
        group: Process group of the writers. None: a single rank.

    Raises:
        SaveFailed: A rank had a file system error. The checkpoint was not committed.
        CheckpointException: Any other error, which is a bug.
    """
    rank = 0 if group is None else dist.get_rank(group)
    writer = tensor_files.ShardWriter(staging_dir, partial(_commit, request, staging_dir))
    planner = tensor_files.Planner(plan)
    try:
        with warnings.catch_warnings():
            # A single rank saves without collectives. They would run in a gloo thread with a separate OpenMP team: with more
            # teams than cores libgomp stops spinning, and each step after a save took 1.7 times as long (torch 2.13, 2 cores).
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(dict(contents), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        # The exception is raised after all ranks have finished writing, so no file appears after the removal.
        if rank == 0:
            shutil.rmtree(staging_dir, ignore_errors=True)
        # An error of the file system is one line for the user. Anything else keeps its traceback.
        for failed_rank, (cause, _) in sorted(error.failures.items()):
            if isinstance(cause, OSError) and cause.strerror:
                reason = f"rank {failed_rank}: {describe(cause)}"
                raise SaveFailed(f"step {request.step} could not be saved: {reason}") from error
        raise
    if request.after_commit is not None:
        request.after_commit(request)
    elif rank == 0:
        prune(request)


def _commit(request: SaveRequest, staging_dir: Path, files: dict[str, File]) -> None:
    """Write the files of the request and the manifest, then rename the staging folder to its final name."""
    final = request.final
    for name, content in request.files.items():
        files[name] = tensor_files.retry_transient(partial(manifest.write_file, staging_dir / name, content))
    tensor_files.retry_transient(lambda: manifest.write(staging_dir, Manifest(files, request.metadata)))
    tensor_files.retry_transient(partial(sync, staging_dir))
    replaced = final.with_name(f"{final.name}.old")
    if final.exists():
        if replaced.exists():
            _remove(replaced)
        final.rename(replaced)
    staging_dir.rename(final)
    sync(final.parent)
    if replaced.exists():
        _remove(replaced)


def prune(request: SaveRequest, protected: Collection[Path] = ()) -> None:
    """Delete old checkpoints. The checkpoint just saved counts towards `keep`, but incomplete checkpoints do not count.
    Checkpoints of later steps are kept: the run resumed from an earlier step because they are damaged.
    File system errors are logged as a warning. protected: further checkpoints to keep."""
    if not request.keep:
        return
    interval = request.keep_interval_steps
    try:
        complete = 1
        for path in latest_per_step(request.folder):
            step = step_of(path)
            if step >= request.step:
                continue
            is_protected = path in protected or step == request.keep_best or (interval > 0 and step % interval == 0)
            if complete >= request.keep and not is_protected:
                if not path.is_symlink():
                    _remove(path)
            elif _has_all_files(path):
                complete += 1
    except OSError as error:
        console.warning(f"old checkpoints were not removed: {describe(error)}")


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


def load(checkpoint: Path, tensors: Tensors, expected: set[str]) -> None:
    """Load the tensors in place from a verified checkpoint of any layout, collectively. expected: tensor names that the
    checkpoint may contain; "a" also allows all names that begin with "a/". Raises a ConfigError that lists mismatched tensors."""
    with manifest.damage_as_config_error(checkpoint):
        index = tensor_files.read_index(checkpoint)
    problems = [f"{name} is not a tensor of this run" for name in index if not _is_expected(name, expected)]
    require_match(checkpoint, index, tensors, cast=False, problems=problems)
    targets = {name: local_region(tensor) for name, tensor in tensors.items()}
    read_on_all_ranks(checkpoint, lambda: tensor_files.read_regions(checkpoint, index, targets))


def _is_expected(name: str, expected: set[str]) -> bool:
    parts = name.split("/")
    return any("/".join(parts[: i + 1]) in expected for i in range(len(parts)))


def read_on_all_ranks(folder: Path, read: Callable[[], None], alone: bool = False) -> None:
    """Call `read`, which reads this rank's shards from the folder. Collective unless `alone`. Raises ConfigError on all ranks if
    one of them finds damaged files."""
    damage = ""
    try:
        read()
    except CorruptError as error:
        damage = str(error)
    except Exception as error:
        if not alone:
            first_problem(repr(error))  # the other ranks must not wait for this one
        raise
    if not alone:
        damage = first_problem(damage)
    if damage:
        raise ConfigError("", f"{folder}: {damage}")


def require_match(
    folder: Path, index: Mapping[str, TensorMetadata], tensors: Tensors, *, cast: bool, problems: Sequence[str] = ()
) -> None:
    """Raise a ConfigError that lists `problems`, and the tensors that are missing in the index or differ from it in shape or
    dtype. cast: whether a stored tensor may have another dtype, if both are floating-point dtypes."""
    problems = [*problems]
    for name, tensor in tensors.items():
        stored = index.get(name)
        if stored is None:
            problems.append(f"{name} is missing")
        elif stored.shape != tuple(tensor.shape):
            problems.append(f"{name} has shape {list(stored.shape)}, expected {list(tensor.shape)}")
        elif stored.dtype != tensor.dtype and not (cast and stored.dtype.is_floating_point):
            problems.append(f"{name} has dtype {stored.dtype}, expected {tensor.dtype}")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise ConfigError("", f"cannot load {folder}: {'; '.join(problems[:5])}{more}")

"""Selection of the checkpoint that a run resumes from, and rollbacks."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.base.config import ConfigError, errors_about
from trainer.base.config.checkpoints import best_checkpoint, list_checkpoints
from trainer.base.config.fields import settings
from trainer.base.config.render import differing_settings, setting_texts
from trainer.base.system import console
from trainer.base.system.files import atomic_write, read_json_object, sync
from trainer.base.system.run_files import CONFIG_FILE, LARGEST_CONFIG, STATE_FILE, committed, step_of
from trainer.base.system.spelling import counted
from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import CorruptError
from trainer.runtime.distributed import first_problem, run_on_rank_0
from trainer.state import TrainState

LINEAGE = "lineage.json"
LARGEST_STATE = 16 * 2**20
FAMILY = "model.name"
"""Key of the model family in a fingerprint."""


# ---------------------------------------------------------------- finding a checkpoint


@dataclass(frozen=True)
class ResumePoint:
    """A verified checkpoint to resume from."""

    path: Path
    state: TrainState
    rollback: bool = False
    """Whether all checkpoints newer than this one must be discarded."""
    requested: int | str = 0
    """Value of checkpoint.load_step that has led to the rollback."""


def find_resume_point(folder: Path, load_step: int | str = 0) -> ResumePoint | None:
    """Return, collectively, the checkpoint of load_step. If load_step is 0, or if the run was already rolled back to load_step,
    return the newest intact checkpoint, or None if no checkpoint exists. Damaged checkpoints are ignored with a warning.
    load_step "best" stands for the step of the best checkpoint.

    Only rank 0 lists checkpoints, because all ranks must resume from the same step but may see different states of a file
    system. Raises ConfigError if the checkpoint of load_step is missing or damaged. Raises ConfigError if all checkpoints are
    damaged, because a new run would overwrite data that may still be useful."""
    steps = run_on_rank_0(lambda: list_checkpoints(folder))
    rolls_back = load_step != 0 and load_step not in run_on_rank_0(lambda: _rollbacks(folder))[-1:]
    if rolls_back:
        available = ", ".join(str(step_of(path)) for path in reversed(steps)) or "none"
        step = run_on_rank_0(lambda: _best_step_to_load(folder)) if load_step == "best" else load_step
        steps = [path for path in steps if step_of(path) == step]
        if not steps:
            raise ConfigError("checkpoint.load_step", f"{folder} has no such checkpoint; available steps: {available}")
    elif load_step and steps:
        console.info(
            f"the run was already rolled back (load_step = {load_step}) and resumes from the newest checkpoint; "
            "to repeat the rollback, remove "
            f"{folder / LINEAGE}"
        )
    for path in steps:
        problem = verify(path, of_run=True)
        if not problem:
            return ResumePoint(path, _read_state(path), rolls_back, load_step)
        if rolls_back:
            raise ConfigError("checkpoint.load_step", f"{path}: {problem}")
        console.warning(f"ignoring damaged checkpoint {path}: {problem}")
    if steps:
        damaged = f"all {len(steps)} checkpoints are damaged" if len(steps) > 1 else "its only checkpoint is damaged"
        message = f"{folder}: {damaged}; set another --run.name for a new run"
        raise ConfigError("", message)
    if load_step:
        raise ConfigError("checkpoint.load_step", f"{folder} contains no checkpoint")
    return None


def _best_step_to_load(folder: Path) -> int:
    with errors_about("checkpoint.load_step"):
        return step_of(best_checkpoint(folder))


def verify(checkpoint: Path, of_run: bool = False, alone: bool = False) -> str:
    """Return, collectively, a line that describes the damage to a checkpoint, or "". Each rank reads some of the files.

    Args:
        of_run: Whether to check train_state.json too.
        alone: Whether only this rank calls the function.
    """
    if alone:
        return manifest.find_damage(checkpoint)
    problem = manifest.find_damage(checkpoint, (dist.get_rank(), dist.get_world_size()))
    if of_run and not problem and dist.get_rank() == 0:
        problem = check_train_state(checkpoint)
    return first_problem(problem)


def check_train_state(checkpoint: Path) -> str:
    try:
        state = _read_state(checkpoint)
    except CorruptError as damage:
        return str(damage)
    return "" if state.step == step_of(checkpoint) else f"train_state.json contains the state of step {state.step}"


def _read_state(checkpoint: Path) -> TrainState:
    try:
        return TrainState.from_json(manifest.read_text(checkpoint / STATE_FILE, LARGEST_STATE))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CorruptError("train_state.json is not a valid training state") from None


def require_compatible(point: ResumePoint, now: Mapping[str, Any]) -> None:
    """Raise a ConfigError that lists the differences from the fingerprint of a checkpoint, if there are any. now: all or part
    of the current fingerprint."""
    declared = settings()
    # A checkpoint that is older than a setting was saved with its default.
    defaults = {key: declared[key].default for key in now if key in declared}
    now, defaults = json.loads(json.dumps([now, defaults]))  # tuples become lists, as in the checkpoint
    before = defaults | point.state.fingerprint
    keys = [key for key, value in sorted(now.items()) if before.get(key) != value and key != FAMILY]
    if not keys:
        return
    # The family explains other dimensions. Alone it is no difference: it may follow from the folder of the same model.
    if FAMILY in before and FAMILY in now and before[FAMILY] != now[FAMILY]:
        keys.insert(0, FAMILY)
    differences = [f"{key} was {json.dumps(before.get(key))}, is {json.dumps(now[key])}" for key in keys]
    message = f"cannot resume from {point.path}: {'; '.join(differences)}; set another --run.name for a new run"
    raise ConfigError("", message)


def changed_settings(point: ResumePoint, config: str) -> list[str]:
    """Return one line per setting that differs between the checkpoint and the current configuration. config: TOML text."""
    path = point.path / CONFIG_FILE
    try:
        before = setting_texts(manifest.read_text(path, LARGEST_CONFIG), path)
        return differing_settings(before, setting_texts(config, path))
    except (CorruptError, ConfigError):
        return [f"{path} cannot be read"]


# ---------------------------------------------------------------- rolling back


def _rollbacks(folder: Path) -> list[int | str]:
    """Return the values of load_step that the run was rolled back to, oldest first. Raises ConfigError."""
    try:
        steps = read_json_object(folder / LINEAGE)["rolled_back_to"]
        if all(type(step) is int or step == "best" for step in steps):
            return steps
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigError(
        "",
        f"{folder / LINEAGE} cannot be read, so earlier rollbacks are unknown; remove this file and start the run again",
    ) from None


def discard_newer(point: ResumePoint) -> None:
    """Move checkpoints newer than the resume point to discarded-N/. The newest one is moved first, so that an interruption
    leaves no gap between checkpoints. Raises ConfigError if the folder cannot be written."""
    folder, step = point.path.parent, step_of(point.path)
    steps = _rollbacks(folder)
    try:
        newer = [path for path in committed(folder) if step_of(path) > step]
        if newer:
            discarded = next(path for n in count(1) if not (path := folder / f"discarded-{n}").exists())
            discarded.mkdir()
            for path in newer:
                path.rename(discarded / path.name)
                sync(folder)
            console.info(f"moved {counted(len(newer), 'newer checkpoint')} to {discarded}")
        atomic_write(folder / LINEAGE, json.dumps({"rolled_back_to": [*steps, point.requested]}))
    except OSError as error:
        message = f"{error.filename or folder} cannot be written ({error.strerror})"
        raise ConfigError("run.output_folder", message) from None

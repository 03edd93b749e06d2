"""Which checkpoint a run goes on from, and what becomes of those that it leaves behind."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import tomli
import torch.distributed as dist

from trainer.checkpoint import manifest
from trainer.checkpoint.commit import committed, latest_per_step, step_of
from trainer.checkpoint.manifest import CorruptError
from trainer.config import ConfigError
from trainer.config.schema import toml_value
from trainer.runtime.distributed import run_on_rank_0
from trainer.state import TrainState
from trainer.system import logging
from trainer.system.files import atomic_write, read_json_object, sync

_LINEAGE = "lineage.json"
LARGEST_STATE = 16 * 2**20
_LARGEST_CONFIG = 2**20


# ---------------------------------------------------------------- finding what to go on from


@dataclass(frozen=True)
class ResumePoint:
    """A verified checkpoint that a run can go on from."""

    path: Path
    state: TrainState
    rollback: bool = False
    """Whether newer ones are to be left."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Of each step the checkpoint that counts, newest first. Raises ConfigError where the folder cannot be read: that is not one
    without checkpoints."""
    try:
        return latest_per_step(folder)
    except OSError as error:
        raise ConfigError("", f"{folder} cannot be read ({error.strerror})") from None


def find_resume_point(folder: Path, load_step: int = 0) -> ResumePoint | None:
    """The checkpoint to go on from, or None, on all ranks together: the newest whose content is what was written, or that of
    load_step. Rank 0 looks, since ranks that see different states of a file system must not go on from different steps.

    Other folders are ignored; a damaged checkpoint is passed over with a warning. Raises ConfigError where all are damaged:
    starting afresh would write over what may still be of use; and where load_step is missing or damaged.
    """
    steps = run_on_rank_0(lambda: list_checkpoints(folder))
    if load_step > 0:
        before = run_on_rank_0(lambda: _rollbacks(folder))
        if load_step not in before[-1:]:
            return _find_step(folder, steps, load_step)
        if steps:
            logging.info(
                f"went back to step {load_step} before; going on from there. To do it again, remove {folder / _LINEAGE}"
            )
    for path in steps:
        problem = verify(path, of_run=True)
        if not problem:
            return ResumePoint(path, _read_state(path))
        logging.warning(f"passed over {path}: {problem}")
    if steps:
        rule = f"{folder}: all {len(steps)} checkpoints are damaged; another --run.name starts a new run"
        raise ConfigError("", rule)
    if load_step:
        raise ConfigError("checkpoint.load_step", f"there is no checkpoint in {folder}")
    return None


def _find_step(folder: Path, steps: list[Path], step: int) -> ResumePoint:
    path = next((path for path in steps if step_of(path) == step), None)
    if path is None:
        there = ", ".join(str(step_of(path)) for path in reversed(steps)) or "none"
        raise ConfigError("checkpoint.load_step", f"no such step in {folder}; there are: {there}")
    problem = verify(path, of_run=True)
    if problem:
        raise ConfigError("checkpoint.load_step", f"{path}: {problem}")
    return ResumePoint(path, _read_state(path), rollback=True)


def verify(checkpoint: Path, of_run: bool = False) -> str:
    """What is wrong with it, or "", on all ranks together: each reads a share of the files, whole. of_run: whether a run shall
    go on from it."""
    mine = manifest.find_damage(checkpoint, (dist.get_rank(), dist.get_world_size()))
    if of_run and not mine and dist.get_rank() == 0:
        mine = check_train_state(checkpoint)
    problems = [""] * dist.get_world_size()
    dist.all_gather_object(problems, mine)
    return next(filter(None, problems), "")


def check_train_state(checkpoint: Path) -> str:
    try:
        state = _read_state(checkpoint)
    except CorruptError as damage:
        return str(damage)
    return "" if state.step == step_of(checkpoint) else f"train_state.json is of step {state.step}"


def _read_state(checkpoint: Path) -> TrainState:
    try:
        return TrainState.from_json(manifest.read_text(checkpoint / "train_state.json", LARGEST_STATE))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CorruptError("train_state.json is not the state of a run") from None


def require_compatible(saved: ResumePoint, now: Mapping[str, Any]) -> None:
    """Raises ConfigError, with every difference, where a resumed run would not mean what the checkpoint holds.

    now: as in the state's "fingerprint", or a part of it.
    """
    before = saved.state.fingerprint
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


def changed_settings(saved: ResumePoint, config: str) -> list[str]:
    """Return one line per setting whose value differs between the checkpoint and the configuration, a TOML text."""
    path = saved.path / "config.toml"
    try:
        before = _flat(tomli.loads(manifest.read_text(path, _LARGEST_CONFIG)))
    except (CorruptError, tomli.TOMLDecodeError, AttributeError, RecursionError):
        return [f"{path} cannot be read"]
    now = _flat(tomli.loads(config))
    return [f"{key} {before.get(key)} -> {now.get(key)}" for key in now | before if before.get(key) != now.get(key)]


def _flat(document: dict[str, Any]) -> dict[str, str]:
    return {f"{s}.{k}": toml_value(v) for s, section in document.items() for k, v in section.items()}


# ---------------------------------------------------------------- rolling back


def _rollbacks(folder: Path) -> list[int]:
    """The steps that the run was rolled back to, the last one last."""
    try:
        steps = read_json_object(folder / _LINEAGE)["rolled_back_to"]
        if all(type(step) is int for step in steps):
            return steps
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigError("", f"{folder / _LINEAGE} cannot be read; remove it to roll back anew") from None


def discard_newer(saved: ResumePoint) -> None:
    """Move checkpoints newer than the resume point to discarded-N/, newest first, so that an interruption leaves nothing that a
    later start could take for a checkpoint of this run. Raise ConfigError if the folder cannot be written."""
    folder = saved.path.parent
    try:
        _discard_newer(folder, step_of(saved.path))
    except OSError as error:
        raise ConfigError(
            "run.output_folder", f"{error.filename or folder} cannot be written ({error.strerror})"
        ) from None


def _discard_newer(folder: Path, step: int) -> None:
    steps = _rollbacks(folder)
    newer = [path for path in committed(folder) if step_of(path) > step]
    if newer:
        away = next(path for n in count(1) if not (path := folder / f"discarded-{n}").exists())
        away.mkdir()
        for path in newer:
            path.rename(away / path.name)
            sync(folder)
        logging.info(f"{len(newer)} newer checkpoints are left in {away}")
    atomic_write(folder / _LINEAGE, json.dumps({"rolled_back_to": [*steps, step]}))

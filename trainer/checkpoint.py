"""Checkpoints: one folder a step, committed by one rename or not there at all, and trusted only after it was verified.

checkpoints/
    step-00000100/
        rank-00000.safetensors ...   model, optimizer and random state: each rank's parts (shards.py)
        index.json                   where each tensor's parts are
        train_state.json             step, data cursor, and what a run that resumes must have in common
        config.toml                  the resolved configuration
        model.json, tokenizer.*      what the network is, and its tokenizer
        manifest.json                every file, its size and the hash of its content; written last (manifest.py)
    step-00000100.saving-...         a save that is not finished; nothing reads it
    step-00000100.old                what a second save of the step has just replaced; counts where that never came to its end
    abandoned-1/                     the newer checkpoints that a run left when it was rolled back
    lineage.json                     what it was rolled back to
"""

import json
import re
import shutil
import uuid
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

from trainer import logging, manifest
from trainer.config import ConfigError
from trainer.distributed import from_rank_0
from trainer.manifest import Damaged, File, Manifest
from trainer.shards import Planner, ShardReader, ShardWriter, Stored, read_index, with_patience
from trainer.system import sync, write_durably

_NAME = re.compile(r"step-(\d{8,15})(\.old)?")
_LEFT_BEHIND = re.compile(r"step-\d+\.(saving|deleting)-\w+")
_LARGEST_STATE = 16 * 2**20

Tensors = Mapping[str, Tensor]


# ---------------------------------------------------------------- finding what to go on from


@dataclass(frozen=True)
class Saved:
    """A verified checkpoint that a run can go on from."""

    path: Path
    state: dict[str, Any]
    """The content of train_state.json."""
    rollback: bool = False
    """Whether newer ones are to be left."""


def find(folder: Path, load_step: int = 0) -> Saved | None:
    """The checkpoint to go on from, or None, on all ranks together: the newest whose content is what was written, or that of
    load_step. Rank 0 looks, since ranks that see different states of a file system must not go on from different steps.

    Other folders are ignored; a damaged checkpoint is passed over with a warning. Raises ConfigError where all are damaged:
    starting afresh would write over what may still be of use; and where load_step is missing or damaged.
    """
    candidates = from_rank_0(lambda: steps_in(folder))
    rollback = load_step > 0 and from_rank_0(lambda: _rolled_back_to(folder)) != load_step
    if rollback:
        return _find_step(folder, candidates, load_step)
    for path in candidates:
        problem = verify(path, of_run=True)
        if not problem:
            return Saved(path, _read_state(path))
        logging.warning(f"passed over {path}: {problem}")
    if candidates:
        rule = f"{folder}: all {len(candidates)} checkpoints are damaged; another --run.name starts a new run"
        raise ConfigError("", rule)
    if load_step:
        raise ConfigError("checkpoint.load_step", f"there is no checkpoint in {folder}")
    return None


def _find_step(folder: Path, candidates: list[Path], step: int) -> Saved:
    path = next((path for path in candidates if step_of(path) == step), None)
    if path is None:
        there = ", ".join(str(step_of(path)) for path in reversed(candidates)) or "none"
        raise ConfigError("checkpoint.load_step", f"no such step in {folder}; there are: {there}")
    problem = verify(path, of_run=True)
    if problem:
        raise ConfigError("checkpoint.load_step", f"{path}: {problem}")
    return Saved(path, _read_state(path), rollback=True)


def step_of(checkpoint: Path) -> int:
    return int(_NAME.fullmatch(checkpoint.name)[1])


def steps_in(folder: Path) -> list[Path]:
    """The folders of committed checkpoints, newest first; whether they are whole is not looked at."""
    found = {}
    for path in sorted(folder.glob("step-*"), reverse=True):  # the one that replaced it comes after an .old
        if _NAME.fullmatch(path.name) and path.is_dir():
            found[step_of(path)] = path
    return [path for _, path in sorted(found.items(), reverse=True)]


def verify(checkpoint: Path, of_run: bool = False) -> str:
    """What is wrong with it, or "", on all ranks together: each reads a share of the files, whole. of_run: whether a run shall
    go on from it."""
    mine = manifest.problem(checkpoint, (dist.get_rank(), dist.get_world_size()))
    if of_run and not mine and dist.get_rank() == 0:
        mine = state_problem(checkpoint)
    problems = [""] * dist.get_world_size()
    dist.all_gather_object(problems, mine)
    return next(filter(None, problems), "")


def state_problem(checkpoint: Path) -> str:
    try:
        state = _read_state(checkpoint)
    except Damaged as damage:
        return str(damage)
    return "" if state["step"] == step_of(checkpoint) else f"train_state.json is of step {state['step']}"


def _read_state(checkpoint: Path) -> dict[str, Any]:
    try:
        state = json.loads(manifest.read_text(checkpoint / "train_state.json", _LARGEST_STATE))
        if {"step", "cursor", "identity"} <= set(state):
            return state
    except (ValueError, TypeError, RecursionError):
        pass
    raise Damaged("train_state.json is not the state of a run")


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


# ---------------------------------------------------------------- rolling back


def _rolled_back_to(folder: Path) -> int | None:
    """The step that the run was last rolled back to."""
    try:
        return json.loads((folder / "lineage.json").read_text())["rolled_back_to"][-1]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, IndexError):
        raise ConfigError("", f"{folder / 'lineage.json'} cannot be read; remove it to roll back anew") from None


def abandon_newer(saved: Saved) -> None:
    """Begin a new lineage: what is newer is moved out of the way, newest first, so that a stop in between leaves nothing
    that a later start could take for this lineage's."""
    folder = saved.path.parent
    try:
        steps = json.loads((folder / "lineage.json").read_text())["rolled_back_to"]
    except FileNotFoundError:
        steps = []
    away = folder / f"abandoned-{len(steps) + 1}"
    newer = [path for path in steps_in(folder) if step_of(path) > step_of(saved.path)]
    if newer:
        away.mkdir(exist_ok=True)
        for path in newer:
            path.rename(away / path.name)
            sync(folder)
        logging.info(f"{len(newer)} newer checkpoints are left in {away}")
    write_durably(folder / "lineage.json", json.dumps({"rolled_back_to": [*steps, step_of(saved.path)]}))
    sync(folder)


# ---------------------------------------------------------------- saving


@dataclass(frozen=True)
class Request:
    """What is to be saved besides tensors, and where."""

    folder: Path
    step: int
    files: Mapping[str, bytes]
    """Small ones: name -> content."""
    about: Mapping[str, Any]
    """For the manifest."""
    keep: int
    """Newest checkpoints that are kept; 0: all."""
    keep_every: int
    """Steps whose multiples are kept too; 0: none."""
    aside: Path
    """A folder of its own until all is written, made by `prepare`."""

    @property
    def final(self) -> Path:
        return self.folder / f"step-{self.step:08d}"


class SaveFailed(Exception):
    """One line: what could not be saved and why. What was saved before is untouched."""


def prepare(folder: Path, step: int) -> Path:
    """A new folder to save a step in, on all ranks together; what saves that never came to their end left behind is
    removed. Raises SaveFailed."""

    def work() -> Path | str:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if _LEFT_BEHIND.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)
            aside = folder / f"step-{step:08d}.saving-{uuid.uuid4().hex[:8]}"
            with_patience(aside.mkdir)
            return aside
        except OSError as error:
            return f"{error.filename}: {error.strerror}"

    made = from_rank_0(work)
    if isinstance(made, str):
        raise SaveFailed(f"step {step} could not be saved: {made}")
    return made


def write(request: Request, plan: SavePlan, contents: Tensors, group: dist.ProcessGroup | None) -> None:
    """Write and commit a checkpoint, on all ranks together. plan: of this rank (shards.plan_of); contents: its tensors, or
    copies. group: of all ranks, None where there is one rank only. Raises SaveFailed."""
    commit = partial(_commit, request)
    try:
        with _collectives():
            dcp.save(
                {},
                storage_writer=ShardWriter(request.aside, commit),
                planner=Planner(plan, contents),
                process_group=group,
                no_dist=group is None,
            )
    except (CheckpointException, OSError) as error:
        # All ranks have ended their work when this is raised on each.
        if group is None or dist.get_rank(group) == 0:
            shutil.rmtree(request.aside, ignore_errors=True)
        cause = _cause(error)
        if not cause:
            raise
        raise SaveFailed(f"step {request.step} could not be saved: {cause}") from error
    if group is None or dist.get_rank(group) == 0:
        retain(request.folder, request.keep, request.keep_every)


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


def _commit(request: Request, files: dict[str, File]) -> None:
    """Everything is written: make it a checkpoint."""
    aside, final = request.aside, request.final
    for name, content in request.files.items():
        with_patience(partial((aside / name).write_bytes, content))
        files[name] = File((aside / name).stat().st_size, manifest.digest_of(aside / name))
    for name in files:
        with_patience(partial(sync, aside / name))
    with_patience(lambda: manifest.write(aside, Manifest(files, request.about)))
    with_patience(partial(sync, aside))
    replaced = final.with_name(f"{final.name}.old")
    if final.exists():
        if replaced.exists():
            _remove(replaced)
        final.rename(replaced)
    aside.rename(final)
    sync(final.parent)
    if replaced.exists():
        _remove(replaced)


def retain(folder: Path, keep: int, keep_every: int) -> None:
    """Remove old checkpoints. Never fatal, and never the newest that is whole, nor what stands between it and those to
    be kept: a damaged one does not count."""
    if not keep:
        return
    try:
        whole, surplus = 0, []
        for path in steps_in(folder):
            if whole >= keep and not (keep_every and step_of(path) % keep_every == 0):
                surplus.append(path)
            try:
                manifest.read(path)
                whole += 1
            except Damaged:
                continue
        for path in surplus:
            if not path.is_symlink():
                _remove(path)
    except OSError as error:
        logging.warning(f"old checkpoints were not removed: {error.filename}: {error.strerror}")


def _remove(checkpoint: Path) -> None:
    """Under another name first, so that what is half removed is no checkpoint."""
    away = checkpoint.with_name(f"{checkpoint.name.removesuffix('.old')}.deleting-{uuid.uuid4().hex[:8]}")
    checkpoint.rename(away)
    shutil.rmtree(away, ignore_errors=True)


# ---------------------------------------------------------------- loading


def load(checkpoint: Path, tensors: Tensors, expected: Collection[str]) -> None:
    """Fill the tensors from a verified checkpoint, on all ranks together, whatever ranks and layout it was saved by.

    expected: every name that some rank fills, or that need not be filled; a stored tensor whose name does not begin with
    one of them is an error, as are missing ones and other shapes or dtypes: ConfigError, with the names.
    """
    try:
        index = read_index(checkpoint)
    except Damaged as damage:
        raise ConfigError("", f"{checkpoint}: {damage}") from None
    problems = [f"{name} belongs to no part of this run" for name in index if not _is_expected(name, expected)]
    fill(checkpoint, ShardReader(checkpoint, index), index, tensors, problems=problems)


def fill(
    folder: Path,
    reader: StorageReader,
    index: Mapping[str, Stored],
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
        damage = next((cause for cause, _ in error.failures.values() if isinstance(cause, Damaged)), None)
        if damage is None:
            raise
        raise ConfigError("", f"{folder}: {damage}") from None


def _is_expected(name: str, expected: Collection[str]) -> bool:
    """Whether the name, or a part of it that ends at a slash, is among them."""
    parts = name.split("/")
    return any("/".join(parts[:n]) in expected for n in range(1, len(parts) + 1))

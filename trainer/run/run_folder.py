"""The folder of a run: its lock, its resume point, and the record of its configuration and environment."""

import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from trainer.adapters.select import SCALE_SETTINGS
from trainer.base.config import Config, ConfigError, errors_about
from trainer.base.config.checkpoints import resolve_checkpoint
from trainer.base.config.render import to_toml
from trainer.base.system import console
from trainer.base.system.environment import environment
from trainer.base.system.files import atomic_write, creation_error, file_error, folder_error, lock_holder, try_lock
from trainer.base.system.run_files import CHECKPOINTS, CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, MODEL_FILE, TASKS
from trainer.checkpoint import resume
from trainer.checkpoint.formats.export import export_run
from trainer.checkpoint.formats.folders import metadata_and_generation
from trainer.checkpoint.formats.model_metadata import CHAT_TEMPLATE, GENERATION_CONFIG, ModelMetadata, ids_of_ends
from trainer.checkpoint.formats.weights import Weights
from trainer.checkpoint.resume import ResumePoint
from trainer.run.context_window import window_of_new_run
from trainer.run.resolve import ResolvedRun
from trainer.run.text_format import TextFormat
from trainer.runtime import device as devices
from trainer.runtime.distributed import run_on_rank_0
from trainer.state import TrainState

_LIBRARIES = ("torch", "safetensors", "xxhash", "tiktoken", "sentencepiece")
_LOCK = ".lock"
_FOLDERS = (CHECKPOINTS, "tb")
_FILES = (METRICS_FILE, CONFIG_FILE, ENVIRONMENT_FILE)
_LOG = "log.txt"
_HELD: WeakValueDictionary[Path, TextIO] = WeakValueDictionary()
"""Locks of this process. To close one file of a lock would release it, so there is only one."""


def acquire_lock(folder: Path) -> TextIO | None:
    """Lock the run folder, and append all that rank 0 logs from now on to its log too. Return the lock file on rank 0 and None on
    other ranks. The lock is held until the file is closed; a process that holds it already gets the same file. Raises ConfigError
    if another process holds the lock or the folder cannot be written."""
    lock = None

    def work() -> None:
        nonlocal lock
        lock = _HELD.get(folder.absolute())
        if lock is not None and not lock.closed and folder.exists():
            return
        _require_place(folder)
        with _writing(folder):
            (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            result = try_lock(folder / _LOCK, timeout_s=5)
        if isinstance(result, str):
            raise ConfigError("", f"{folder} is in use by {result}; choose another --run.name")
        lock = _HELD[folder.absolute()] = result
        console.log_to(folder / _LOG)

    run_on_rank_0(work)
    return lock


def require_usable(folder: Path) -> str:
    """Raise ConfigError if a run could not use the folder, like `acquire_lock`, without creating or changing a file. If it
    only has to wait for another run, return which process that is, otherwise ""."""
    _require_place(folder)
    return lock_holder(folder / _LOCK)


def _require_place(folder: Path) -> None:
    """Raise ConfigError if the folder, or what a run would write in it, cannot be created or written. Nothing is created."""
    if os.path.lexists(folder) and (problem := folder_error(folder)):
        raise ConfigError("run.name", f"{folder} {problem}")
    _check_types(folder)
    if problem := creation_error(folder):
        raise ConfigError("run.output_folder", problem)


def _check_types(folder: Path) -> None:
    """Raise ConfigError if a name in the run folder belongs to something that is not the run's file or folder. Opening a named
    pipe would wait forever."""
    problems = {folder / name: file_error(folder / name) for name in (_LOCK, _LOG, *_FILES)}
    folders = (folder / name for name in (*_FOLDERS, TASKS))
    problems |= {path: folder_error(path) for path in folders if os.path.lexists(path)}
    for path, problem in problems.items():
        if problem:
            message = f"{path} {problem}; move it away, or choose another --run.name"
            raise ConfigError("run.output_folder", message)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Context manager that turns an OSError into a ConfigError."""
    try:
        yield
    except OSError as error:
        path = error.filename or folder  # an ENOSPC error contains no file name
        raise ConfigError("run.output_folder", f"{path} cannot be written ({error.strerror})") from None


def release_if_empty(folder: Path, lock: TextIO | None) -> None:
    """Remove the folder of a rejected run if it contains no data. lock: result of `acquire_lock`."""
    if lock is None:
        return
    with suppress(OSError):
        remaining = {path.name: path for path in folder.iterdir()}
        subfolders = [remaining.pop(name) for name in _FOLDERS if name in remaining]
        files = [remaining.pop(name) for name in _FILES if name in remaining]
        is_empty = not any(map(os.listdir, subfolders)) and not any(file.stat().st_size for file in files)
        if set(remaining) - {_LOG} == {_LOCK} and is_empty:  # the log of a rejected run tells only the rejection
            for path in subfolders:
                path.rmdir()
            for path in (*files, *remaining.values()):
                path.unlink()
            folder.rmdir()


def resume_point(folder: Path, load_step: int | str, fingerprint: Mapping[str, Any]) -> ResumePoint | None:
    """Return the checkpoint to resume from, or None for a new run.

    Args:
        folder: Run folder.
        load_step: See find_resume_point.
        fingerprint: Values that must be equal in the checkpoint.

    Raises:
        ConfigError: The checkpoint is incompatible, or find_resume_point finds no intact one.
    """
    point = resume.find_resume_point(folder / CHECKPOINTS, load_step)
    if point is not None:
        resume.require_compatible(point, fingerprint)
    return point


def how_it_ended(config: Config, state: TrainState, stopped_early: str = "") -> str:
    """Return how a run without a step left has ended and how to continue it, or "". The arguments are those of
    `already_finished`."""
    if not state.step or config.training.epochs is not None:
        return ""
    if state.step >= config.training.steps:
        length = "epochs" if "training.epochs" in config.origins else "steps"
        return f"already finished at step {state.step}; raise --training.{length} to continue"
    if stopped_early:
        advice = "raise --evaluation.early_stopping_patience, or set it to 0, to continue"
        return f"already stopped early at step {state.step}: {stopped_early}; {advice}"
    return ""


def already_finished(config: Config, state: TrainState, stopped_early: str = "") -> bool:
    """Return whether the run has no step left. If so, log it, and write the export if it is missing.

    Args:
        config: Epochs are steps only once the data is open: until then, the function returns False.
        state: Progress of the run.
        stopped_early: Why the run has ended before its last step, or "".
    """
    if not (end := how_it_ended(config, state, stopped_early)):
        return False
    console.info(f"{config.run.name} {end}")
    export_run(config.run.folder, config.checkpoint, skip_existing=True)
    return True


def create_run_folder(folder: Path) -> None:
    """Create the run folder with its subfolders and files. Raises ConfigError if one of them cannot be written."""

    def work() -> None:
        with _writing(folder):
            for name in _FOLDERS:
                (folder / name).mkdir(parents=True, exist_ok=True)
            for file in _FILES:
                (folder / file).open("a").close()

    run_on_rank_0(work)


def model_files(
    config: Config,
    resolved: ResolvedRun,
    text: TextFormat,
    base: Mapping[str, str],
    point: ResumePoint | None,
    weights: Weights | None,
) -> dict[str, bytes]:
    """Return the files that make a checkpoint self-contained: model sizes, tokenizer, chat template and generation_config.json,
    which is that of the initial model, with the tokens that end answers in training added.

    Args:
        config: Settings of the run.
        resolved: Result of `resolve` for these settings.
        text: Tokenizer and chat template.
        base: Path and hash of the base model, if only an adapter is saved.
        point: Checkpoint to resume from.
        weights: Those with which a new run begins.

    Raises:
        ConfigError: The initial model's files cannot be read.
    """
    scale = (
        {name: getattr(config.lora, name) for name in (*SCALE_SETTINGS, "base_dtype", "base_format")} if base else {}
    )
    tokenizer = text.tokenizer
    initial, generation = run_on_rank_0(lambda: _initial_model(config, point))
    window = window_of_new_run(config, resolved.sizes, weights) if point is None else initial.context_window
    window = config.model.context_window or window
    ends = list(dict.fromkeys([tokenizer.eos, *text.end_of_turn, *ids_of_ends(generation)]))
    special_token_ids = {"bos_token_id": tokenizer.bos, "eos_token_id": ends if len(ends) > 1 else ends[0]}
    if generation.get("pad_token_id") in range(
        resolved.sizes.vocab_size
    ):  # transformers refuses another id in config.json
        special_token_ids["pad_token_id"] = generation["pad_token_id"]
    model = ModelMetadata(
        family=resolved.family,
        sizes=asdict(resolved.sizes),
        seq_len=config.training.seq_len,
        context_window=window,
        tokenizer=config.tokenizer.backend,
        tokenizer_files=tuple(tokenizer.files),
        special_token_ids=special_token_ids,
        reuse_reserved_tokens=dict(config.tokenizer.reuse_reserved_tokens),
        extra_special_tokens=config.tokenizer.extra_special_tokens,
        pattern=config.tokenizer.pattern or ("llama3" if config.tokenizer.backend == "tiktoken" else ""),
        other_config={} if initial is None else initial.other_config,
        lora={**scale, **base},
    )
    template = {CHAT_TEMPLATE: text.chat_template.encode()} if text.chat_template else {}
    generation_config = {GENERATION_CONFIG: json.dumps(generation | special_token_ids, indent=2).encode()}
    return {MODEL_FILE: model.text().encode(), **tokenizer.files, **template, **generation_config}


def _initial_model(config: Config, point: ResumePoint | None) -> tuple[ModelMetadata | None, dict[str, Any]]:
    """Return what is said about the model that the run continues, and its generation_config.json, or (None, {})."""
    if point is not None:
        return metadata_and_generation(point.path)
    if not config.checkpoint.init_from:
        return None, {}
    with errors_about("checkpoint.init_from"):
        return metadata_and_generation(resolve_checkpoint(Path(config.checkpoint.init_from)))


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {library: metadata.version(library) for library in _LIBRARIES}


def save_run_info(config: Config, resolved: ResolvedRun, device: torch.device) -> None:
    """Write config.toml and environment.json. Raises ConfigError if they cannot be written."""

    def work() -> None:
        folder = config.run.folder
        record = environment(Path(__file__).parents[2]) | {
            "device": devices.name(device),
            "driver": devices.driver_version(device),
            "world_size": dist.get_world_size(),
            "optimizer": [str(group) for group in resolved.optimizer.groups],
        }
        with _writing(folder):
            atomic_write(folder / CONFIG_FILE, to_toml(config))
            atomic_write(folder / ENVIRONMENT_FILE, json.dumps(record, indent=1))

    run_on_rank_0(work)

"""The folder of a run: whose it is, what it goes on from, what it says of the run."""

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from trainer.checkpoint import resume
from trainer.checkpoint.huggingface import CHAT_TEMPLATE, MODEL_FILE, ModelMetadata
from trainer.checkpoint.resume import ResumePoint
from trainer.config import Config, ConfigError
from trainer.config.render import to_toml
from trainer.run.resolve import ResolvedRun
from trainer.runtime import device as devices
from trainer.runtime.distributed import run_on_rank_0
from trainer.system import logging
from trainer.system.files import atomic_write, folder_error, try_lock

_LIBRARIES = ("torch", "torchdata", "safetensors", "xxhash", "tiktoken", "sentencepiece")
_LARGEST_CONFIG = 2**20
_LOCK = ".lock"
_FOLDERS = ("checkpoints", "tb")
_FILES = ("metrics.jsonl", "config.toml", "environment.json")


def run_folder(config: Config) -> Path:
    return Path(config.run.output_folder) / config.run.name


def acquire_lock(config: Config) -> TextIO | None:
    """Make the run folder this run's alone, for as long as the file that rank 0 gets stays open. Raises ConfigError where
    another has it, or it cannot be written."""
    folder = run_folder(config)
    lock = None

    def work() -> None:
        nonlocal lock
        if os.path.exists(folder) and (problem := folder_error(folder)):
            raise ConfigError("run.name", f"{folder} {problem}")
        with _writing(folder):
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            held = try_lock(folder / _LOCK, timeout_s=5)
        if isinstance(held, str):
            raise ConfigError("", f"{folder} is in use by {held}; another --run.name starts a run beside it")
        lock = held

    run_on_rank_0(work)
    return lock


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raises ConfigError for what the file system refuses."""
    try:
        yield
    except OSError as error:
        what = error.filename or folder  # a full disk tells no name
        raise ConfigError("run.output_folder", f"{what} cannot be written ({error.strerror})") from None


def release_if_empty(config: Config, lock: TextIO | None) -> None:
    """Of a run that was refused: its folder goes where nothing is in it yet. lock: from `claim`; ranks that have none leave it to
    the first."""
    if lock is None:
        return
    folder = run_folder(config)
    with suppress(OSError):
        there = {path.name: path for path in folder.iterdir()}
        inner = [there.pop(name) for name in _FOLDERS if name in there]
        files = [there.pop(name) for name in _FILES if name in there]
        if set(there) == {_LOCK} and not any(map(os.listdir, inner)) and not any(f.stat().st_size for f in files):
            for path in inner:
                path.rmdir()
            for path in (*files, there[_LOCK]):
                path.unlink()
            folder.rmdir()


def resume_point(config: Config, resolved: ResolvedRun) -> ResumePoint | None:
    """The checkpoint that this run goes on from, or None for a new run. Raises ConfigError where it is another's."""
    saved = resume.find_resume_point(run_folder(config) / "checkpoints", config.checkpoint.load_step)
    if saved is not None:
        resume.require_compatible(saved, resolved.fingerprint)
    return saved


def create_run_folder(folder: Path) -> None:
    """Raises ConfigError where something in it cannot be written."""

    def work() -> None:
        with _writing(folder):
            for inner in _FOLDERS:
                (folder / inner).mkdir(parents=True, exist_ok=True)
            for file in _FILES:
                (folder / file).open("a").close()

    run_on_rank_0(work)


def model_files(config: Config, resolved: ResolvedRun) -> dict[str, bytes]:
    """What makes a checkpoint a model by itself: the network's sizes, and the tokenizer."""
    kind = config.tokenizer.backend
    files = resolved.tokenizer.files
    ends = list(dict.fromkeys([resolved.tokenizer.eos, *(resolved.chat.end_of_turn if resolved.chat else ())]))
    special_token_ids = {"bos_token_id": resolved.tokenizer.bos, "eos_token_id": ends if len(ends) > 1 else ends[0]}
    model = ModelMetadata(
        family=config.model.name,
        sizes=asdict(resolved.sizes),
        seq_len=config.training.seq_len,
        tokenizer=kind,
        tokenizer_files=tuple(files),
        special_token_ids=special_token_ids,
        reuse_reserved_tokens=dict(config.tokenizer.reuse_reserved_tokens),
        extra_special_tokens=config.tokenizer.extra_special_tokens,
    )
    template = {CHAT_TEMPLATE: resolved.chat.self_contained().encode()} if resolved.chat else {}
    return {MODEL_FILE: model.text().encode(), **files, **template}


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {library: metadata.version(library) for library in _LIBRARIES}


def save_run_info(config: Config, device: torch.device) -> None:
    """The configuration and what it runs on, when nothing else can be refused any more. Raises ConfigError."""

    def work() -> None:
        folder = run_folder(config)
        environment = versions() | {
            "platform": platform.platform(),
            "device": devices.name(device),
            "world_size": dist.get_world_size(),
        }
        with _writing(folder):
            atomic_write(folder / "config.toml", to_toml(config))
            atomic_write(folder / "environment.json", json.dumps(environment, indent=1))

    run_on_rank_0(work)


def log_summary(config: Config, resolved: ResolvedRun, device: torch.device, repeats: bool, data: str) -> None:
    """Say what runs on what. data: its name and number of samples."""
    dims, training = resolved.dims, config.training
    logging.info(
        f"{config.run.name}: {config.model.name}/{config.model.size}, {resolved.num_parameters:,} parameters, computing in "
        f"{training.compute_dtype} on {dims.world_size} x {devices.name(device)} "
        f"({dims}), repeats {'bit by bit' if repeats else 'to rounding'}"
    )
    logging.info(
        f"data {data} samples of {training.seq_len} tokens, {training.global_batch_size} a step in "
        f"{resolved.grad_accum} microbatches on each rank"
    )
    schedule, steps = config.lr_schedule, training.steps
    if schedule.warmup_steps + schedule.decay_steps > steps:
        logging.warning(
            f"warmup_steps {schedule.warmup_steps} + decay_steps {schedule.decay_steps} are more than the {steps} steps "
            "of this run: the learning rate will not go all its way"
        )

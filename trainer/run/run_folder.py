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

import torch
import torch.distributed as dist

from models.spec import meta_model
from models.width import KINDS, width_kind
from trainer.adapters.select import SCALE_SETTINGS, excessive_rank, expert_adapters, unaligned_rank
from trainer.base.config import Config, ConfigError, TrainingConfig, errors_about
from trainer.base.config.checkpoints import resolve_checkpoint
from trainer.base.config.render import to_toml
from trainer.base.system import console
from trainer.base.system.checkpoint_folder import MODEL_FILE
from trainer.base.system.environment import environment
from trainer.base.system.files import atomic_write, existing_part, file_error, folder_error, lock_holder, try_lock
from trainer.base.system.spelling import counted
from trainer.base.system.units import GIB
from trainer.checkpoint import resume
from trainer.checkpoint.formats.export import export_run
from trainer.checkpoint.formats.folders import window_and_generation
from trainer.checkpoint.formats.model_metadata import CHAT_TEMPLATE, GENERATION_CONFIG, ModelMetadata
from trainer.checkpoint.resume import ResumePoint
from trainer.data.build import Datasets
from trainer.parallel.parallelize import block_forms
from trainer.run.resolve import ResolvedRun
from trainer.run.text_format import TextFormat
from trainer.runtime import device as devices
from trainer.runtime.distributed import run_on_rank_0
from trainer.state import TrainState

_LIBRARIES = ("torch", "safetensors", "xxhash", "tiktoken", "sentencepiece")
_LOCK = ".lock"
_FOLDERS = ("checkpoints", "tb")
_FILES = ("metrics.jsonl", "config.toml", "environment.json")
_LOG = "log.txt"
_MANY_EPOCHS = 10
"""Number of epochs above which a run warns that it repeats its data."""


def acquire_lock(folder: Path) -> TextIO | None:
    """Lock the run folder. Return the lock file on rank 0 and None on other ranks. The lock is held until the file is closed.
    Raises ConfigError if another process holds the lock or the folder cannot be written."""
    lock = None

    def work() -> None:
        nonlocal lock
        if os.path.exists(folder) and (problem := folder_error(folder)):
            raise ConfigError("run.name", f"{folder} {problem}")
        _check_types(folder)
        with _writing(folder):
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            result = try_lock(folder / _LOCK, timeout_s=5)
        if isinstance(result, str):
            raise _in_use(folder, result)
        lock = result

    run_on_rank_0(work)
    return lock


def require_usable(folder: Path) -> None:
    """Raise ConfigError if a run could not use the folder, like `acquire_lock`, without creating or changing a file."""
    if os.path.exists(folder) and (problem := folder_error(folder)):
        raise ConfigError("run.name", f"{folder} {problem}")
    _check_types(folder)
    place = existing_part(folder)
    if not place.is_dir():
        raise ConfigError("run.output_folder", f"{place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError("run.output_folder", f"{place} cannot be written")
    if holder := lock_holder(folder / _LOCK):
        raise _in_use(folder, holder)


def _in_use(folder: Path, holder: str) -> ConfigError:
    return ConfigError("", f"{folder} is in use by {holder}; choose another --run.name")


def open_log(folder: Path) -> None:
    """Append all that rank 0 logs from now on to the log of the run folder too."""
    if dist.get_rank() == 0:
        console.log_to(folder / _LOG)


def _check_types(folder: Path) -> None:
    """Raise ConfigError if a name in the run folder belongs to something that is not the run's file or folder. Opening a named
    pipe would wait forever."""
    problems = {folder / name: file_error(folder / name) for name in (_LOCK, _LOG, *_FILES)}
    folders = (folder / name for name in _FOLDERS)
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
    saved = resume.find_resume_point(folder / "checkpoints", load_step)
    if saved is not None:
        resume.require_compatible(saved, fingerprint)
    return saved


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
    if config.checkpoint.export_huggingface:
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
    config: Config, resolved: ResolvedRun, text: TextFormat, base: Mapping[str, str], point: ResumePoint | None
) -> dict[str, bytes]:
    """Return the files that make a checkpoint self-contained: model sizes, tokenizer, chat template and generation_config.json,
    which is that of the initial model, with the tokens that end answers in training added. base: path and hash of the base model,
    if only an adapter is saved. Raises ConfigError."""
    scale = {name: getattr(config.lora, name) for name in (*SCALE_SETTINGS, "base_dtype")} if base else {}
    tokenizer = text.tokenizer
    window, generation = run_on_rank_0(lambda: _window_and_generation(config, point))
    inherited = generation.get("eos_token_id")
    inherited = inherited if isinstance(inherited, list) else [] if inherited is None else [inherited]
    ends = list(dict.fromkeys([tokenizer.eos, *text.end_of_turn, *inherited]))
    special_token_ids = {"bos_token_id": tokenizer.bos, "eos_token_id": ends if len(ends) > 1 else ends[0]}
    if generation.get("pad_token_id") in range(
        resolved.sizes.vocab_size
    ):  # transformers refuses another id in config.json
        special_token_ids["pad_token_id"] = generation["pad_token_id"]
    model = ModelMetadata(
        family=resolved.family,
        sizes=asdict(resolved.sizes),
        seq_len=config.training.seq_len,
        context_window=max(config.training.seq_len, window),
        tokenizer=config.tokenizer.backend,
        tokenizer_files=tuple(tokenizer.files),
        special_token_ids=special_token_ids,
        reuse_reserved_tokens=dict(config.tokenizer.reuse_reserved_tokens),
        extra_special_tokens=config.tokenizer.extra_special_tokens,
        pattern=config.tokenizer.pattern or ("llama3" if config.tokenizer.backend == "tiktoken" else ""),
        lora={**scale, **base},
    )
    template = {CHAT_TEMPLATE: text.chat_template.encode()} if text.chat_template else {}
    generation_config = {GENERATION_CONFIG: json.dumps(generation | special_token_ids, indent=2).encode()}
    return {MODEL_FILE: model.text().encode(), **tokenizer.files, **template, **generation_config}


def _window_and_generation(config: Config, point: ResumePoint | None) -> tuple[int, dict[str, Any]]:
    """Return the context window and the generation_config.json of the model that the run continues, or (0, {})."""
    if point is not None:
        return window_and_generation(point.path)
    if not config.checkpoint.init_from:
        return 0, {}
    with errors_about("checkpoint.init_from"):
        return window_and_generation(resolve_checkpoint(Path(config.checkpoint.init_from)))


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
            atomic_write(folder / "config.toml", to_toml(config))
            atomic_write(folder / "environment.json", json.dumps(record, indent=1))

    run_on_rank_0(work)


def log_summary(
    config: Config, resolved: ResolvedRun, device: torch.device, deterministic: bool, attention: str
) -> None:
    """Log the model and the device of the run. attention: name of the attention kernel."""
    dims, training = resolved.dims, config.training
    trained = "all" if resolved.num_trained == resolved.num_parameters else f"{resolved.num_trained:,}"
    console.info(
        f"{config.run.name}: {resolved.model_name}, {resolved.num_parameters:,} parameters, {trained} trained, computing in "
        f"{training.compute_dtype}{compiled_blocks(config, resolved)} on {dims.world_size} x {devices.name(device)} "
        f"({dims}), {'bitwise deterministic' if deterministic else 'deterministic up to rounding'}, "
        f"attention: {attention}"
    )
    if quantized := resolved.storage.quantized:
        size = f"{resolved.base_bytes / GIB:.3g} GiB in all"
        console.info(f"base model: {counted(len(quantized), 'weight')} in 4 bits ({config.lora.base_dtype}), {size}")
    for line in optimizer_lines(config, resolved):
        console.info(f"optimizer: {line}")
    if resolved.float8.modules:
        console.info(f"float8: {counted(len(resolved.float8.modules), 'linear module')}, {training.float8}")
    if resolved.optimizer.fp32_moments:
        console.warning(resolved.optimizer.fp32_moments)
    for line in [*adapter_notes(config, resolved), *float8_notes(config, resolved, device)]:
        console.warning(line)


def optimizer_lines(config: Config, resolved: ResolvedRun) -> list[str]:
    """Return lines about the parameter groups, the average of the weights and the transfer of the width."""
    lines = [str(group) for group in resolved.optimizer.groups]
    if config.optimizer.ema_decay is not None:
        used = ", evaluated" * config.evaluation.averaged
        lines.append(f"average of the weights, decay {config.optimizer.ema_decay:g}{used}")
    if config.optimizer.base_width is not None:
        lines.append(width_transfer(config, resolved))
    return lines


def width_transfer(config: Config, resolved: ResolvedRun) -> str:
    """Return a line about the initial values, which follow the width of the model as the rates of the groups do."""
    line = f"width: dim {resolved.sizes.dim}, rates tuned at {config.optimizer.base_width}"
    if config.checkpoint.init_from:
        excluded = "; those of init_exclude follow the width" if config.checkpoint.init_exclude else ""
        return f"{line}; loaded weights keep their values{excluded}"
    model = meta_model(resolved.spec.model, resolved.sizes)
    factors: dict[float, list[str]] = {}
    for name, _ in model.named_parameters():
        factors.setdefault(resolved.optimizer.width_ratio ** KINDS[width_kind(model, name)], []).append(name)
    changed = [f"{names[0]}{' ...' * (len(names) > 1)} x {f:g}" for f, names in factors.items() if f != 1]
    return f"{line}; initial values: {', '.join([*changed, 'others x 1'])}"


def compiled_blocks(config: Config, resolved: ResolvedRun) -> str:
    """Return the part of a line that says which blocks are compiled, or "" if none should be."""
    if not resolved.compiled:
        return ""
    blocks = dict(
        meta_model(resolved.spec.model, resolved.sizes).get_submodule(resolved.plan.blocks_path).named_children()
    )
    forms = block_forms(
        blocks, resolved.dims, resolved.plan, config.parallel, config.activation_checkpoint, resolved.compiled
    )
    whole = sum(form.is_one_graph for form in forms.values())
    if whole == len(forms):
        return ", compiled,"
    compiled = sum(form.compiled for form in forms.values())
    numbers = {
        "compiled": whole,
        "compiled except around experts": compiled - whole,
        "uncompiled": len(forms) - compiled,
    }
    parts = [f"{counted(number, 'block')} {how}" for how, number in numbers.items() if number]
    return f", {', '.join(parts)},"


def adapter_notes(config: Config, resolved: ResolvedRun) -> list[str]:
    """Return lines about adapters that do less, or more, than a user may expect."""
    if config.lora.rank is None:
        return []
    trained, model = resolved.trained, meta_model(resolved.spec.model, resolved.sizes)
    lines = (
        excessive_rank(trained, config.lora.rank),
        expert_adapters(trained, model, resolved.model_name),
        unaligned_rank(trained, model, config.lora.rank, config.training.compute_dtype),
    )
    return list(filter(None, lines))


def float8_notes(config: Config, resolved: ResolvedRun, device: torch.device) -> list[str]:
    """Return lines about products that are not computed in float8, or slowly. device: of the run."""
    if not resolved.float8.modules:
        return []
    notes = []
    if resolved.plan.has_experts:
        notes.append(
            f"training.float8 = {config.training.float8}: products of experts stay in {config.training.compute_dtype}"
        )
    if not resolved.compiled and device.type != "cpu":
        notes.append("training.float8: is slower than bf16 unless blocks are compiled; see [compile] enabled")
    return notes


def log_data(config: Config, grad_accum: int, data: Datasets, epochs: float, targets: float) -> None:
    """Log the data of the run, and warn if the schedule does not fit into it.

    Args:
        grad_accum: Largest number of microbatches per step on each rank.
        epochs: Number of epochs at the end of the run.
        targets: Share of the tokens that are targets.
    """
    training = config.training
    console.info(
        f"data {data.name}: {counted(len(data.training), 'sample')} of {training.seq_len} tokens "
        f"({100 * targets:.3g} % targets), "
        f"{training.global_batch_size} per step{later_batch_sizes(training)}, in "
        f"{'up to ' * bool(training.batch_schedule)}{counted(grad_accum, 'microbatch', plural='microbatches')} per rank; "
        f"{counted(training.steps, 'step')} make{'s' * (training.steps == 1)} {counted(epochs, 'epoch', '.3g')}"
    )
    schedule, steps = config.lr_schedule, training.steps
    if schedule.warmup_steps + schedule.decay_steps > steps:
        console.warning(
            f"warmup_steps {schedule.warmup_steps} + decay_steps {schedule.decay_steps} exceed the "
            f"{counted(steps, 'step')} of this run: the schedule will not complete"
        )
    if line := many_epochs(config, len(data.training), epochs):
        console.info(line)


def later_batch_sizes(training: TrainingConfig) -> str:
    """Return " (64 after step 1000, 128 after step 4000)", or "" if the batch size does not change."""
    changes = ", ".join(f"{size} after step {steps}" for steps, size in training.batch_sizes[1:])
    return f" ({changes})" if changes else ""


def many_epochs(config: Config, num_samples: int, epochs: float) -> str:
    """Return a line about a number of steps that repeats few samples many times, or "".

    Args:
        config: Settings of the run, whose epochs are steps.
        num_samples: Number of training samples.
        epochs: Number of epochs at the end of the run.
    """
    if epochs <= _MANY_EPOCHS or "training.epochs" in config.origins:  # a number of epochs is chosen on purpose
        return ""
    return (
        f"training.steps = {config.training.steps}: passes over the {counted(num_samples, 'sample')} of the data "
        f"{epochs:.3g} times, so the model may memorize them; training.epochs chooses the number of passes"
    )

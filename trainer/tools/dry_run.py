"""Dry run: everything that a run checks before its first step, and what it would do, without a change on the disk."""

import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from models.spec import meta_model
from trainer.base.config import Config, ConfigError, EvaluationConfig
from trainer.base.system.children import end_children
from trainer.base.system.files import read_json_lines
from trainer.base.system.process import memory_available
from trainer.base.system.run_files import METRICS_FILE
from trainer.base.system.spelling import counted
from trainer.base.system.units import GIB, duration, format_bytes
from trainer.checkpoint.best import BestTracker
from trainer.checkpoint.formats.initial_weights import load_adapter
from trainer.checkpoint.formats.weights import Weights
from trainer.checkpoint.resume import ResumePoint
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.resilience.early_stopping import EarlyStopping
from trainer.run.notes import Note, course_notes, model_notes, start_note, start_warnings
from trainer.run.preflight import CheckedRun, check_run
from trainer.run.resolve import ResolvedRun
from trainer.run.run_folder import how_it_ended, require_usable, resume_point
from trainer.runtime import device as devices
from trainer.runtime import distributed
from trainer.runtime.accelerators import ACCELERATORS
from trainer.state import TrainState
from trainer.tools.planner.estimate import Hardware, RunEstimate, estimate, this_machine
from trainer.tools.planner.limits import GPU_RESERVE_BYTES
from trainer.tools.planner.report import margin_text
from trainer.tools.trial import trial_stores

_RECORDS = 20
"""Number of records from which the time of a step is taken."""


def dry_run(config: Config, resolved: ResolvedRun, ranks_per_node: int) -> int:
    """Print what a run would do. Return 0, or 1 if its planned memory exceeds that of this node. The process is no rank of a run.

    Args:
        config: Settings of the run.
        resolved: The same, resolved for the ranks of the run.
        ranks_per_node: Number of ranks on this node.

    Raises:
        ConfigError: The run would be refused.
    """
    device = devices.select_device(config.run.device)
    distributed.init_process_group(config.distributed, torch.device("cpu"))  # of this process alone
    try:
        return report(config, resolved, ranks_per_node, device)
    finally:
        end_children()  # the caller skips the interpreter's clean-up, which would remove multiprocessing's temporary folder


def report(config: Config, resolved: ResolvedRun, ranks_per_node: int, device: torch.device) -> int:
    """Like `dry_run`, in a process group that exists."""
    _print(model_notes(config, resolved, device))
    holder = require_usable(config.run.folder)
    if holder:
        _line("run folder", f"{config.run.folder} is in use by {holder}: until it ends, this run would be refused")
    point = resume_point(config.run.folder, config.checkpoint.load_step, resolved.fingerprint)
    state = TrainState() if point is None else point.state
    if ended := how_it_ended(config, state):
        return _end(config, ended, holder=holder)
    with trial_stores(Path(config.data.store_folder)) as stores:
        run = check_run(config, resolved, point, stores.open, (), device)
        _try_adapter(config, resolved, point, run.weights)
        _print([_tokenizer(config, run.text.tokenizer), _weights(point, run.weights)])
        print(*stores.lines, sep="\n")
        if ended := how_it_ended(run.config, state, _stopped_early(run, state)):
            return _end(config, ended, holder=holder)
        _print([_start(run, point), *start_warnings(run.config, resolved, run.weights, point)])
        _print(course_notes(run.config, resolved, state, run.datasets, run.eval_sets, run.tasks))
    has_steps = run.config.training.epochs is None
    fits = _plan(run.config, resolved.dims.world_size, ranks_per_node, device, state.step if has_steps else None)
    if has_steps and (sample_s := _measured_sample_s(config.run.folder)):
        training = run.config.training
        seconds = training.samples_between(state.step, training.steps) * sample_s
        _line("", f"{duration(seconds)}, if steps take as long as those of the run so far")
    return _end(config, fits=fits, holder=holder)


def _line(name: str, text: str) -> None:
    print(f"{name:<14}{text}", flush=True)


def _print(notes: Iterable[Note]) -> None:
    for note in notes:
        _line(note.name, note.text)


def _end(config: Config, ended: str = "", fits: bool = True, holder: str = "") -> int:
    """Print the verdict and return the exit code.

    Args:
        config: Settings of the run.
        ended: How the run has ended, if it has.
        fits: Whether it would fit into memory.
        holder: Process that uses the run folder.
    """
    if ended:
        _line("run folder", f"{config.run.folder}: {ended}")
    written = " but the download to the cache of huggingface_hub" if config.model.revision else ""
    verdict = "" if fits else "; the run would not fit into memory"
    verdict += f"; it would be refused now, because {config.run.folder} is in use" if holder else ""
    print(f"dry run complete: nothing was written{written}{verdict}", flush=True)
    return 1 if verdict else 0


def _start(run: CheckedRun, point: ResumePoint | None) -> Note:
    """Return the note on the folder of a run that, as far as is known, has steps left."""
    note = start_note(run.config, point)
    depends_on_data = run.config.training.epochs is not None or _is_identified_by_data(run.config.evaluation)
    is_unknown = point is not None and run.datasets is None and depends_on_data
    return note._replace(text=f"{note.text}, unless the prepared data show that it has ended") if is_unknown else note


def _stopped_early(run: CheckedRun, state: TrainState) -> str:
    """Return why the run has ended before its last step, or "" if it has not, or if that is unknown without the data."""
    evaluation, datasets = run.config.evaluation, run.datasets
    if datasets is None and _is_identified_by_data(evaluation):
        return ""
    return EarlyStopping(
        evaluation, BestTracker(evaluation, run.identity_of(evaluation.criterion.name)).identity
    ).reason(state)


def _is_identified_by_data(evaluation: EvaluationConfig) -> bool:
    """Return whether the memory of early stopping is valid only for one content of an evaluation-only dataset."""
    return bool(evaluation.early_stopping_patience) and evaluation.keep_best_on in evaluation.datasets


def _tokenizer(config: Config, tokenizer: Tokenizer) -> Note:
    return Note("tokenizer", f"{config.tokenizer.path or config.tokenizer.backend}, {tokenizer.vocab_size:,} tokens")


def _weights(point: ResumePoint | None, weights: Weights | None) -> Note:
    origin = "random" if point is None else f"of {point.path}, which is intact"
    if weights is None:
        return Note("weights", origin)
    base = "" if point is None else f"{origin}, on the base model "
    files = f" ({read})" if (read := weights.files()) else ""
    return Note("weights", f"{base}{weights.folder}{files}: names and shapes fit")


def _try_adapter(config: Config, resolved: ResolvedRun, point: ResumePoint | None, weights: Weights | None) -> None:
    """Load the adapter that a new run continues with, as the run does after its checks. Raises ConfigError."""
    if config.lora.init_from and point is None:
        trained = resolved.trained.tensors(meta_model(resolved.spec.model, resolved.sizes))
        tensors = {name: torch.empty(p.shape) for name, p in trained.items()}
        load_adapter(config.lora, resolved.spec, resolved.sizes, tensors, trained, weights.digest())


# ---------------------------------------------------------------- memory and time


def _plan(config: Config, world_size: int, ranks_per_node: int, device: torch.device, done: int | None) -> bool:
    """Print the planned memory and time. Return false if the memory exceeds that of this node. done: number of completed steps,
    or None if the last step is unknown."""
    is_gpu = device.type != "cpu"
    known = ACCELERATORS.get(devices.name(device))
    machine = this_machine()
    if is_gpu:
        accelerator = known or replace(machine, memory_gib=(devices.memory_free(device) or 0) / GIB)
    else:  # the ranks share the machine
        share = {name: getattr(machine, name) / ranks_per_node for name in ("memory_gib", "memory_bandwidth")}
        flops = {dtype: rate / ranks_per_node for dtype, rate in machine.flops.items()}
        accelerator = replace(machine, flops=flops, host_memory_gib=share["memory_gib"], **share)
    hardware = Hardware(world_size, accelerator, is_gpu, GPU_RESERVE_BYTES if is_gpu and known else 0)
    try:
        plan = estimate(config, hardware)
    except ConfigError as error:
        if error.key != "activation_checkpoint.mode":
            raise
        _line("memory, time", f"{error.key} {error.message}")
        return True
    return _report_plan(plan, ranks_per_node, device, done, is_rate_known=known is not None or not is_gpu)


def _report_plan(
    plan: RunEstimate, ranks_per_node: int, device: torch.device, done: int | None, is_rate_known: bool
) -> bool:
    peak = plan.largest.peak
    if device.type == "cpu":
        needed, free, place = peak * ranks_per_node, memory_available(), "this node"
    else:
        needed, free, place = peak, devices.memory_free(device), "the GPU"
    fits = plan.fits and (free is None or needed <= free)
    where = f"{format_bytes(peak)} at the peak of a rank (planned)"
    where += "" if free is None else f"; {format_bytes(free)} of {place} are free"
    if fits and plan.is_tight:
        where += f"; tight: {margin_text(plan)} should stay free"
    _line("memory", where)
    if is_rate_known:
        rough = " from typical rates of a CPU; small models take longer" if device.type == "cpu" else ""
        steps = plan.config.training.steps
        total = "" if done is None else f"{duration(plan.seconds_after(done))} for {counted(steps - done, 'step')}, "
        text = f"{total}{plan.tokens_per_second:,.0f} tokens/s (planned{rough})"
        _line("time", f"{text}, without preparation, evaluation and checkpoints")
    else:
        _line("time", f"unknown, because the trainer has no figures for {devices.name(device)}")
    return fits


def _measured_sample_s(folder: Path) -> float | None:
    """Return the median time of a step in the last records of a run, divided by its samples, or None if it has none."""
    path = folder / METRICS_FILE
    records = [record for record in read_json_lines(path) if record.get("kind") == "train"] if path.exists() else []
    complete = (r for r in records[-_RECORDS:] if {"step_time_s", "global_batch_size"} <= r.keys())
    times = [r["step_time_s"] / r["global_batch_size"] for r in complete]
    return statistics.median(times) if times else None

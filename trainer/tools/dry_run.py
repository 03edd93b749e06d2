"""Dry run: everything that a run checks before its first step, and what it would do, without a change on the disk."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from models.spec import meta_model
from trainer.base.config import Config, ConfigError, EvaluationConfig, SamplesConfig
from trainer.base.system.children import end_children
from trainer.base.system.files import read_json_lines
from trainer.base.system.process import memory_available
from trainer.base.system.spelling import counted, every
from trainer.base.system.units import GIB, duration
from trainer.checkpoint.best import BestTracker
from trainer.checkpoint.formats.initial_weights import load_adapter
from trainer.checkpoint.resume import ResumePoint, require_compatible
from trainer.data.build import Datasets
from trainer.data.datasets import all_dataset_configs
from trainer.data.prepare.prepare import prepare
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.evaluate import EvalSet, build_eval_sets
from trainer.inference.samples import encode_prompts
from trainer.initial_model import open_weights
from trainer.resilience.early_stopping import EarlyStopping
from trainer.run.preflight import check_disk, checkpoint_bytes, disk_free, remaining_checkpoints
from trainer.run.resolve import ResolvedRun, require_profiled_step
from trainer.run.run_folder import (
    adapter_notes,
    how_it_ended,
    later_batch_sizes,
    many_epochs,
    optimizer_lines,
    require_usable,
    resume_point,
)
from trainer.run.sinks.services import require_access
from trainer.run.sinks.sink import METRICS_FILE
from trainer.run.text_format import TextFormat, load_text_format, require_same_tokenizer
from trainer.run.training_data import epochs_of, prepare_and_open, require_unchanged_mixture, with_steps
from trainer.runtime import device as devices
from trainer.runtime import distributed
from trainer.runtime.accelerators import ACCELERATORS
from trainer.state import TrainState
from trainer.tools.planner.estimate import Hardware, RunEstimate, estimate, this_machine
from trainer.tools.planner.limits import GPU_RESERVE_BYTES
from trainer.tools.planner.report import format_bytes, margin_text
from trainer.tools.report.view.figures import as_table, refusals, split_figures
from trainer.tools.report.view.text import table_lines
from trainer.tools.trial import large_datasets, trial_stores

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
    training, dims = config.training, resolved.dims
    _line("model", f"{resolved.model_name}, {resolved.num_parameters:,} parameters, {resolved.num_trained:,} trained")
    for note in adapter_notes(config, resolved):
        _line("adapters", note)
    for line in optimizer_lines(config, resolved):
        _line("optimizer", line)
    if resolved.optimizer.fp32_moments:
        _line("moments", resolved.optimizer.fp32_moments)
    _line("ranks", f"{dims.world_size} x {devices.name(device)} ({dims})")
    require_usable(config.run.folder)
    point = resume_point(config.run.folder, config.checkpoint.load_step, resolved.fingerprint)
    state = TrainState() if point is None else point.state
    if ended := how_it_ended(config, state):
        _line("run folder", f"{config.run.folder}: {ended}")
        return _end(config)
    require_access(config.metrics)
    text = load_text_format(config, resolved)
    encode_prompts(config.samples, config.data, text.tokenizer, text.is_chat, training.seq_len)
    if point is not None:
        require_same_tokenizer(point, config.tokenizer, text.tokenizer)
    _line("tokenizer", f"{config.tokenizer.path or config.tokenizer.backend}, {text.tokenizer.vocab_size:,} tokens")
    _line("weights", _weights(config, resolved, point))
    with trial_stores(Path(config.data.store_folder)) as stores:
        trial = replace(config, data=replace(config.data, store_folder=str(stores)))
        data = _data(trial, text, point)
    if data is not None:
        config = with_steps(config, data.datasets, state)
        require_profiled_step(config.profiling, config.training.steps)
    if ended := how_it_ended(config, state, _stopped_early(config, data, state)):
        _line("run folder", f"{config.run.folder}: {ended}")
        return _end(config)
    _line("run folder", _start(config, point, data))
    steps = config.training.steps if config.training.epochs is None else None
    _line("steps", _steps(config, resolved, state.step, steps))
    if data is not None:
        _line("epochs", "; ".join(_epochs(config, data.datasets, state)))
        if note := many_epochs(config, len(data.datasets.training), epochs_of(config, data.datasets, state)[0]):
            _line("", note)
    _line("checkpoints", _checkpoints(config, resolved, state.step, steps))
    _line("evaluation", _evaluation(config, data))
    _line("early stop", _early_stopping(config.evaluation))
    _line("samples", _samples(config.samples))
    fits = _plan(config, dims.world_size, ranks_per_node, device, None if steps is None else state.step)
    if steps is not None and (sample_s := _measured_sample_s(config.run.folder)):
        seconds = config.training.samples_between(state.step, steps) * sample_s
        _line("", f"{duration(seconds)}, if steps take as long as those of the run so far")
    return _end(config, fits)


def _line(name: str, text: str) -> None:
    print(f"{name:<14}{text}", flush=True)


def _end(config: Config, fits: bool = True) -> int:
    written = " but the download to the cache of huggingface_hub" * bool(config.model.revision)
    verdict = "; the run would not fit into memory" * (not fits)
    print(f"dry run complete: nothing was written{written}{verdict}", flush=True)
    return 0 if fits else 1


def _steps(config: Config, resolved: ResolvedRun, done: int, steps: int | None) -> str:
    """steps: number of steps of the run, or None if it is known only when the data are prepared."""
    training = config.training
    number = f"those of {counted(training.epochs, 'epoch', 'g')}" if steps is None else f"{done + 1} to {steps}"
    sizes = counted(training.global_batch_size, "sample") + later_batch_sizes(training)
    microbatches = counted(resolved.grad_accum, "microbatch", plural="microbatches")
    up_to = "up to " * bool(training.batch_schedule)
    return f"{number}, each of {sizes} of {training.seq_len} tokens, in {up_to}{microbatches} on each rank"


def _start(config: Config, point: ResumePoint | None, data: "_Data | None") -> str:
    """Return the folder of a run that has steps left, and whether it resumes."""
    folder = config.run.folder
    if point is None:
        return f"{folder}: a new run"
    rollback = ", after newer checkpoints are moved to a folder discarded-N" if point.rollback else ""
    depends_on_data = config.training.epochs is not None or _is_identified_by_data(config.evaluation)
    unknown = ", unless the prepared data show that it has ended" if data is None and depends_on_data else ""
    return f"{folder}: resumes from step {point.state.step}{rollback}{unknown}"


def _stopped_early(config: Config, data: "_Data | None", state: TrainState) -> str:
    """Return why the run has ended before its last step, or "" if it has not, or if that is unknown without the data."""
    if data is None and _is_identified_by_data(config.evaluation):
        return ""
    name = "" if data is None else data.datasets.evaluation_names.get(config.evaluation.keep_best_on, "")
    return EarlyStopping(config.evaluation, BestTracker(config.evaluation, name).identity).reason(state)


def _is_identified_by_data(evaluation: EvaluationConfig) -> bool:
    """Return whether the memory of early stopping is valid only for one content of an evaluation-only dataset."""
    return bool(evaluation.early_stopping_patience) and evaluation.keep_best_on in evaluation.datasets


def _weights(config: Config, resolved: ResolvedRun, point: ResumePoint | None) -> str:
    """Check the initial weights and the initial adapter, and return where the weights come from."""
    origin = "random" if point is None else f"of {point.path}, which is intact"
    if (weights := open_weights(config, resolved, point)) is None:
        return origin
    if config.lora.init_from and point is None:
        trained = resolved.trained.tensors(meta_model(resolved.spec.model, resolved.sizes))
        tensors = {name: torch.empty(p.shape) for name, p in trained.items()}
        load_adapter(config.lora, resolved.spec, resolved.sizes, tensors, trained, weights.digest())
    origin = "" if point is None else f"{origin}, on the base model "
    files = f" ({read})" if (read := weights.files()) else ""
    return f"{origin}{weights.folder}{files}: names and shapes fit"


# ---------------------------------------------------------------- data


@dataclass(frozen=True)
class _Data:
    datasets: Datasets
    eval_sets: list[EvalSet]


def _data(config: Config, text: TextFormat, point: ResumePoint | None) -> _Data | None:
    """Print the figures of the data, and return it, or None if a dataset is too large to be prepared here. config: with the
    folder of the trial as store_folder."""
    data, sets = config.data, config.evaluation.datasets
    if large := large_datasets(data, sets, text.tokenizer):
        for dataset in large:
            _line("data", dataset.check_first_documents(text.tokenizer))
        return None
    datasets = prepare_and_open(config, text.tokenizer, None if point is None else point.state)
    if point is not None:
        require_unchanged_mixture(config, datasets, point.state)
        require_compatible(point, {"data": datasets.name})
    stores = _stores(config, text.tokenizer)
    figures = split_figures(data, sets, stores, config.training, datasets.phases, config.evaluation.interval_steps > 0)
    print(*table_lines(as_table(figures, data)), *refusals(data, sets, stores), "", sep="\n")
    return _Data(datasets, build_eval_sets(datasets.evaluation, config.evaluation, text.tokenizer.text_bytes))


def _stores(config: Config, tokenizer: Tokenizer) -> dict[str, Path]:
    """Return the name of each dataset -> its store, which is prepared."""
    configs = all_dataset_configs(config.data, config.evaluation.datasets)
    return {name: prepare(dataset, config.tokenizer, tokenizer) for name, _, dataset in configs}


def _epochs(config: Config, datasets: Datasets, state: TrainState) -> Sequence[str]:
    """Return how often the run reads each training dataset."""
    _, each = epochs_of(config, datasets, state)
    return [f"{epochs:.2f}" + f" of {name}" * (len(datasets.sizes) > 1) for name, epochs in each.items()]


# ---------------------------------------------------------------- what the run writes


def _checkpoints(config: Config, resolved: ResolvedRun, done: int, steps: int | None) -> str:
    """Check the disk, if the number of steps is known, and return what is saved."""
    checkpoint, folder = config.checkpoint, config.run.folder / "checkpoints"
    if not checkpoint.enabled:
        return "none"
    if steps is None:
        number = "an unknown number"
    else:
        check_disk(config, resolved, done)
        number = str(remaining_checkpoints(checkpoint, done, steps))
    size = format_bytes(checkpoint_bytes(config, resolved))
    when = (
        f"after {every(checkpoint.interval_steps, 'step')} and the last"
        if checkpoint.interval_steps
        else "after the last step"
    )
    kept = f", of which {checkpoint.keep} are kept" if checkpoint.keep else ""
    return f"{number} of {size}, {when}{kept}; {format_bytes(disk_free(folder))} are free"


def _evaluation(config: Config, data: _Data | None) -> str:
    if not config.evaluation.interval_steps:
        return "none"
    when = f"after {every(config.evaluation.interval_steps, 'step')} and the last"
    if data is None:
        return when
    return when + ": " + ", ".join(f"{s.name} ({counted(s.num_samples, 'sample')})" for s in data.eval_sets)


def _early_stopping(evaluation: EvaluationConfig) -> str:
    if not (patience := evaluation.early_stopping_patience):
        return "none"
    delta = evaluation.early_stopping_min_delta
    falls = f"falls by more than {delta:g}" if delta else "falls"
    number = f"{patience} evaluations in a row in" if patience > 1 else "an evaluation in"
    return f"after {number} which the loss on {evaluation.keep_best_on} no longer {falls}"


def _samples(samples: SamplesConfig) -> str:
    if not samples.prompts:
        return "none"
    when = f"{every(samples.interval_steps, 'step')} and " if samples.interval_steps else ""
    tokens = counted(samples.max_new_tokens, "token")
    return f"of {counted(len(samples.prompts), 'prompt')}, up to {tokens} each, after {when}the last step"


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
    hardware = Hardware(world_size, accelerator, is_gpu, GPU_RESERVE_BYTES * is_gpu * (known is not None))
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

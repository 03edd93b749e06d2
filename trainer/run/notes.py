"""What a run is and what it will do, as notes (name, text). A run logs them when it starts, and a dry run prints them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from models.spec import meta_model
from models.width import WIDTH_ROLES, width_role
from trainer.adapters.select import excessive_rank, expert_adapters, unaligned_rank
from trainer.base.config import Config, EvaluationConfig, SamplesConfig, TrainingConfig
from trainer.base.system import console
from trainer.base.system.run_files import CHECKPOINTS
from trainer.base.system.spelling import counted, every
from trainer.base.system.units import GIB, format_bytes
from trainer.checkpoint.formats.weights import Weights
from trainer.checkpoint.resume import ResumePoint
from trainer.data.build import Datasets
from trainer.data.datasets import mixture_phases
from trainer.data.sampling.loader import SampleOrder
from trainer.evaluate import EvalSet
from trainer.parallel.mixers import kernel_name
from trainer.parallel.parallelize import block_executions
from trainer.parallel.sample_layout import SampleLayout
from trainer.run.context_window import window_warning
from trainer.run.rate_jump import rate_jump
from trainer.run.resolve import ResolvedRun
from trainer.run.resources import checkpoint_bytes, disk_free, remaining_checkpoints
from trainer.run.training_data import epochs_of, phase_steps, target_share
from trainer.runtime import device as devices
from trainer.runtime.distributed import run_on_rank_0
from trainer.state import TrainState
from trainer.tasks import Task

_MANY_EPOCHS = 10
"""Number of epochs above which a run says that it repeats its data."""


class Note(NamedTuple):
    name: str
    text: str
    warns: bool = False
    """Whether it is logged as a warning."""


def log(notes: Iterable[Note]) -> None:
    for note in notes:
        (console.warning if note.warns else console.info)(f"{note.name}: {note.text}")


# ---------------------------------------------------------------- the model and its computation


def model_notes(config: Config, resolved: ResolvedRun, device: torch.device) -> list[Note]:
    """Return the notes that need neither texts nor data. device: of the run."""
    training, dims = config.training, resolved.dims
    trained = "all" if resolved.num_trained == resolved.num_parameters else f"{resolved.num_trained:,}"
    exact = devices.is_deterministic(config.run.deterministic, device)
    order = "bitwise deterministic" if exact else "deterministic up to rounding"
    predictions = resolved.structure.num_predictions
    further = f", {counted(predictions, 'layer')} for multi-token prediction" if predictions else ""
    compiled = f", {how}" if (how := compiled_blocks(config, resolved)) else ""
    notes = [
        Note("model", f"{resolved.model_name}, {resolved.num_parameters:,} parameters, {trained} trained{further}"),
        Note("ranks", f"{dims.world_size} x {devices.name(device)} ({dims})"),
        Note("computation", f"{training.compute_dtype}{compiled}, {order}"),
    ]
    if quantized := resolved.parameter_storage.quantized:
        size = f"{resolved.base_bytes / GIB:.3g} GiB in all"
        notes.append(
            Note("base model", f"{counted(len(quantized), 'weight')} in 4 bits ({config.lora.base_dtype}), {size}")
        )
    notes += [Note("optimizer", line) for line in _optimizer_lines(config, resolved)]
    if modules := resolved.float8.modules:
        notes.append(Note("float8", f"{counted(len(modules), 'linear module')}, {training.float8}"))
    if resolved.optimizer.fp32_moments:
        notes.append(Note("moments", resolved.optimizer.fp32_moments, warns=True))
    notes += [Note("adapters", line, warns=True) for line in adapter_warnings(config, resolved)]
    return notes + [Note("float8", line, warns=True) for line in _float8_warnings(config, resolved, device)]


def kernel_note(resolved: ResolvedRun, layout: SampleLayout, device: torch.device) -> Note:
    """Return the names of the mixers' kernels, for which tensors are allocated on the device: a dry run, which may share it with
    a run, has no such note."""
    names = (kernel_name(kind, layout, resolved.dims.tp, device) for kind in resolved.structure.kinds.values())
    return Note("kernels", ", ".join(dict.fromkeys(names)))


def _optimizer_lines(config: Config, resolved: ResolvedRun) -> list[str]:
    """Return lines about the parameter groups, the average of the weights and the transfer of the width."""
    lines = [str(group) for group in resolved.optimizer.groups]
    if config.optimizer.ema_decay is not None:
        used = ", evaluated" if config.evaluation.averaged else ""
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
        factors.setdefault(resolved.optimizer.width_ratio ** WIDTH_ROLES[width_role(model, name)], []).append(name)
    changed = [f"{names[0]}{' ...' if len(names) > 1 else ''} x {f:g}" for f, names in factors.items() if f != 1]
    return f"{line}; initial values: {', '.join([*changed, 'others x 1'])}"


def compiled_blocks(config: Config, resolved: ResolvedRun) -> str:
    """Return which blocks are compiled, or "" if none should be."""
    if not resolved.compiled:
        return ""
    blocks = dict(
        meta_model(resolved.spec.model, resolved.sizes).get_submodule(resolved.structure.blocks_path).named_children()
    )
    executions = block_executions(
        blocks, resolved.dims, resolved.structure, config.parallel, config.activation_checkpoint, resolved.compiled
    )
    whole = sum(execution.is_one_graph for execution in executions.values())
    if whole == len(executions):
        return "compiled"
    compiled = sum(execution.compiled for execution in executions.values())
    numbers = {
        "compiled": whole,
        "compiled except around experts": compiled - whole,
        "uncompiled": len(executions) - compiled,
    }
    return ", ".join(f"{counted(number, 'block')} {how}" for how, number in numbers.items() if number)


def adapter_warnings(config: Config, resolved: ResolvedRun) -> list[str]:
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


def _float8_warnings(config: Config, resolved: ResolvedRun, device: torch.device) -> list[str]:
    """Return lines about products that are not computed in float8, or slowly."""
    if not resolved.float8.modules:
        return []
    lines = []
    if resolved.structure.has_experts:
        lines.append(
            f"training.float8 = {config.training.float8}: products of experts stay in {config.training.compute_dtype}"
        )
    if not resolved.compiled and device.type != "cpu":
        lines.append("training.float8: is slower than bf16 unless blocks are compiled; see [compile] enabled")
    return lines


# ---------------------------------------------------------------- the data and the steps


def start_note(config: Config, point: ResumePoint | None) -> Note:
    """Return the folder of a run that has steps left, and whether it resumes. point: Checkpoint to resume from."""
    folder = config.run.folder
    if point is None:
        return Note("run folder", f"{folder}: a new run")
    rollback = ", after newer checkpoints are moved to a folder discarded-N" if point.rollback else ""
    return Note("run folder", f"{folder}: resumes from step {point.state.step}{rollback}")


def start_warnings(
    config: Config, resolved: ResolvedRun, weights: Weights | None, point: ResumePoint | None
) -> list[Note]:
    """Return what a user may not expect of the start of a run.

    Args:
        config: Settings of the run, whose epochs are steps if the data are known.
        resolved: The same, resolved.
        weights: Those with which a new run begins.
        point: Checkpoint to resume from.
    """
    if point is None:
        lines = {
            "context window": window_warning(config, resolved.sizes, weights),
            "initial weights": _left_out(config, resolved, weights),
        }
    else:
        lines = {"schedule": rate_jump(config, point)}
    return [Note(name, line, warns=True) for name, line in lines.items() if line]


def _left_out(config: Config, resolved: ResolvedRun, weights: Weights | None) -> str:
    """Return a warning if the initial model has layers for multi-token prediction that the run does not train, or ""."""
    stored = 0 if weights is None else len(weights.sizes.predictions)
    if (left_out := stored - resolved.structure.num_predictions) <= 0:
        return ""
    layers = counted(left_out, "layer")
    lost = "does not train; merged models keep them" if config.lora.rank else "neither trains nor keeps"
    has = f"{weights.folder} has {layers} for multi-token prediction"
    return f"{has}, which this run {lost}; see [training] prediction_weight"


def course_notes(
    config: Config,
    resolved: ResolvedRun,
    state: TrainState,
    datasets: Datasets | None,
    eval_sets: Sequence[EvalSet],
    tasks: Sequence[Task],
) -> list[Note]:
    """Return the notes on the data, and on what happens from the first step to the last, collectively.

    Args:
        config: Settings of the run, whose epochs are steps if there are datasets.
        resolved: The same, resolved.
        state: Progress of the run.
        datasets: Of the run. None: they are unknown.
        eval_sets: Evaluation datasets.
        tasks: Tasks of the evaluations.
    """
    steps = config.training.steps if config.training.epochs is None else None
    notes = []
    if datasets is not None:
        share = run_on_rank_0(lambda: target_share(datasets.training))
        samples = f"{counted(len(datasets.training), 'sample')} of {config.training.seq_len} tokens"
        notes.append(Note("data", f"{datasets.name}: {samples} ({100 * share:.3g} % targets)"))
    notes.append(Note("steps", steps_text(config.training, resolved.grad_accum, state.step, steps)))
    schedule = config.lr_schedule
    if steps is not None and schedule.warmup_steps + schedule.decay_steps > steps:
        line = (
            f"warmup_steps {schedule.warmup_steps} + decay_steps {schedule.decay_steps} exceed the "
            f"{counted(steps, 'step')} of this run: the schedule will not complete"
        )
        notes.append(Note("schedule", line, warns=True))
    if datasets is not None:
        epochs, of_each = epochs_of(config, datasets, state)
        several = len(datasets.sizes) > 1
        each = (f"{number:.3g}{f' of {name}' if several else ''}" for name, number in of_each.items())
        notes.append(Note("epochs", "; ".join(each)))
        if line := many_epochs(config, len(datasets.training), epochs):
            notes.append(Note("epochs", line))
    return [
        *notes,
        *mixture_notes(config, datasets, state, steps),
        Note("checkpoints", _checkpoints(config, resolved, state.step, steps)),
        Note("evaluation", _evaluation(config.evaluation, eval_sets)),
        *(Note("task", task_text(config.evaluation, task)) for task in tasks),
        *(Note("task", f"{name}: not used, because interval_steps = 0") for name in unused_tasks(config.evaluation)),
        Note("early stop", _early_stopping(config.evaluation)),
        Note("samples", samples_text(config.samples)),
    ]


def mixture_notes(config: Config, datasets: Datasets | None, state: TrainState, steps: int | None) -> list[Note]:
    """Return notes on the weights of several datasets, and on the steps in which they change.

    Args:
        config: Settings of the run.
        datasets: Of the run. None: they are unknown.
        state: Progress of the run.
        steps: Number of steps of the run, or None if it is known only when the data are prepared.
    """
    phases = mixture_phases(config.data) if datasets is None else datasets.phases
    if len(phases[0].names) == 1:
        return []
    order = SampleOrder((), phases, config.run.seed, config.data.shuffle, tuple(state.skipped_samples))
    now = [phase for start, phase in order.phase_starts() if start < max(1, state.cursor)][-1]
    notes = [Note("mixture", f"{now.weights_text} {'now' if state.step else 'from the first step on'}")]
    for step, phase in phase_steps(config.training, order, state):
        late = steps is not None and step > steps
        when = f"from sample {phase.start} on, in step {step}"
        unreached = f"; the run ends after step {steps}, so it has no sample with these weights" if late else ""
        notes.append(Note("mixture", f"{phase.weights_text} {when}{unreached}", warns=late))
    return notes


def steps_text(training: TrainingConfig, grad_accum: int, done: int, steps: int | None) -> str:
    """Return which steps the run makes, and of what size.

    Args:
        training: Settings of the run.
        grad_accum: Largest number of microbatches per step on each rank.
        done: Number of completed steps.
        steps: Number of steps of the run, or None if it is known only when the data are prepared.
    """
    number = f"those of {counted(training.epochs, 'epoch', 'g')}" if steps is None else f"{done + 1} to {steps}"
    changes = ", ".join(f"{size} after step {first}" for first, size in training.batch_sizes[1:])
    sizes = counted(training.global_batch_size, "sample") + (f" ({changes})" if changes else "")
    up_to = "up to " if training.batch_schedule else ""
    microbatches = counted(grad_accum, "microbatch", plural="microbatches")
    return f"{number}, each of {sizes} of {training.seq_len} tokens, in {up_to}{microbatches} on each rank"


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


def _checkpoints(config: Config, resolved: ResolvedRun, done: int, steps: int | None) -> str:
    checkpoint, folder = config.checkpoint, config.run.folder / CHECKPOINTS
    if not checkpoint.enabled:
        return "none"
    number = "an unknown number" if steps is None else str(remaining_checkpoints(checkpoint, done, steps))
    size = format_bytes(checkpoint_bytes(config, resolved))
    interval = checkpoint.interval_steps
    when = f"after {every(interval, 'step')} and the last" if interval else "after the last step"
    kept = f", of which {checkpoint.keep} are kept" if checkpoint.keep else ""
    return f"{number} of {size}, {when}{kept}; {format_bytes(disk_free(folder))} are free"


def _evaluation(evaluation: EvaluationConfig, eval_sets: Sequence[EvalSet]) -> str:
    """eval_sets: empty if they are unknown."""
    if not evaluation.interval_steps:
        return "none"
    when = f"after {every(evaluation.interval_steps, 'step')} and the last"
    sets = ", ".join(f"{s.name} ({counted(s.num_samples, 'sample')})" for s in eval_sets)
    return f"{when}: {sets}" if sets else when


def _early_stopping(evaluation: EvaluationConfig) -> str:
    if not (patience := evaluation.early_stopping_patience):
        return "none"
    delta, criterion = evaluation.early_stopping_min_delta, evaluation.criterion
    improves = "falls" if criterion.falls else "rises"
    improves += f" by more than {delta:g}" if delta else ""
    number = f"{patience} evaluations in a row in" if patience > 1 else "an evaluation in"
    return f"after {number} which {criterion} no longer {improves}"


def unused_tasks(evaluation: EvaluationConfig) -> list[str]:
    return [name for name in evaluation.tasks if not evaluation.interval_of(name)]


def task_text(evaluation: EvaluationConfig, task: Task) -> str:
    """Return what a task asks, and when."""
    asked = counted(len(task.questions), "question")
    if task.config.kind == "exact":
        asked += f" of up to {counted(task.config.max_new_tokens, 'new token')}"
    else:
        samples = counted(len(task.packed), "sample")
        asked += f" in {samples}, {counted(task.packed.num_tokens, 'token', ',')}"
    return f"{task.name} ({asked}), after {every(evaluation.interval_of(task.name), 'step')} and the last"


def samples_text(samples: SamplesConfig) -> str:
    if not samples.prompts:
        return "none"
    when = f"{every(samples.interval_steps, 'step')} and " if samples.interval_steps else ""
    tokens = counted(samples.max_new_tokens, "token")
    return f"of {counted(len(samples.prompts), 'prompt')}, up to {tokens} each, after {when}the last step"

"""Construction of the Trainer of a run and of all its components."""

import json
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from trainer import initial_model
from trainer.base.config import Config, ConfigError, compatibility
from trainer.base.config.pretrained import provenance
from trainer.base.config.render import to_toml
from trainer.base.config.schema.condition import Known
from trainer.base.config.schema.facts import OWN_OBJECTIVE
from trainer.base.system import console
from trainer.base.system.files import digest
from trainer.base.system.run_files import CHECKPOINTS, CONFIG_FILE, committed
from trainer.base.system.signals import StopRequest
from trainer.checkpoint.async_save import WRITERS
from trainer.checkpoint.best import BestTracker
from trainer.checkpoint.formats.model_metadata import GENERATION_CONFIG, ids_of_ends
from trainer.checkpoint.manager import CheckpointManager, saved_tensors
from trainer.checkpoint.mirror import Mirror
from trainer.checkpoint.resume import ResumePoint
from trainer.data.sampling.loader import BatchPartition
from trainer.engine import Engine, build_model_parts, build_objective, sample_layout
from trainer.evaluate import Evaluator
from trainer.inference.in_training import TrainingGenerator
from trainer.inference.samples import SampleGenerator
from trainer.initial_model import InitialModel
from trainer.objective.objective import Objective
from trainer.parallel.attention import backend_of
from trainer.parallel.mesh import Meshes
from trainer.parallel.mixers import mixers_by_document
from trainer.resilience.early_stopping import EarlyStopping
from trainer.resilience.guard import StepMonitor
from trainer.resilience.straggler import StragglerDetector
from trainer.resilience.watchdog import Watchdog
from trainer.run import notes
from trainer.run.metrics import Metrics
from trainer.run.preflight import CheckedRun, check_run
from trainer.run.profiler import Profiler
from trainer.run.resolve import ResolvedRun
from trainer.run.run_folder import acquire_lock, create_run_folder, save_run_info, versions
from trainer.run.sinks import build_sinks
from trainer.run.sinks.sink import LoggedRun
from trainer.run.training_data import TrainingData, partition_of_batch, prepare_and_open
from trainer.runtime import device as devices
from trainer.runtime.distributed import run_on_rank_0
from trainer.runtime.host_memory import keep_freed_memory
from trainer.state import TrainState
from trainer.tasks import TaskEvaluator
from trainer.trainer import Trainer


def build_trainer(
    config: Config,
    resolved: ResolvedRun,
    device: torch.device,
    point: ResumePoint | None,
    objective: Objective | None = None,
    mirror: Mirror | None = None,
) -> Trainer:
    """Build the Trainer of a run, collectively, and lock its folder. The process group must exist.

    Args:
        config: Settings of the run.
        resolved: Result of `resolve` for these settings.
        device: Device of this rank.
        point: Checkpoint to resume from.
        objective: What the run minimizes. None: what the settings select.
        mirror: Result of `open_mirror`, which comes before `resume_point`.

    Raises:
        ConfigError: The data, the model, the checkpoint or the run folder cannot be used, the folder is in use, or z_loss is set
            too.
    """
    compatibility.check(config, {OWN_OBJECTIVE: Known(objective is not None)})
    lock = acquire_lock(config.run.folder)
    if config.checkpoint.mirror and run_on_rank_0(lambda: mirror is None):
        raise ConfigError("checkpoint.mirror", "a program calls open_mirror before resume_point, and passes its result")
    _prepare_run_folder(config, is_new=point is None)
    _set_up_process(config, device)
    meshes = _build_meshes(config, resolved, device)
    # On the meta device: until the checks have passed, they take no memory.
    model_parts = build_model_parts(config, resolved, meshes, backend_of(device))
    run = check_run(config, resolved, point, prepare_and_open, model_parts.values(), device)
    partition = partition_of_batch(config.training, meshes.data["batch"])
    training_objective = objective or build_objective(config, resolved, meshes)
    evaluation_objective = objective or build_objective(config, resolved, meshes, evaluates=True)
    engine = Engine(run.config, resolved, device, meshes, model_parts, training_objective)
    start = initial_model.Start(run.config, resolved, point, run.weights)
    data = initial_model.Data(run.datasets.training, run.eval_sets, partition)
    initial = initial_model.load(start, run.text, engine, data)
    state = _first_state(run, resolved, initial)
    checkpoints = _build_checkpoints(run, resolved, engine, initial, mirror)
    if point is not None:
        checkpoints.restore(point, state)
    _record_start(run, resolved, device, meshes, point, state)
    stop = StopRequest(console.info)
    generator = _build_generator(run, resolved, initial, partition, device)
    return Trainer(
        config=run.config,
        state=state,
        engine=engine,
        data=TrainingData(run.config, replace(run.datasets, training=initial.training), partition, device),
        samples=_build_samples(run, generator),
        evaluator=_build_evaluator(run, initial, partition, device, evaluation_objective),
        tasks=_build_tasks(run, resolved, engine, meshes, generator),
        checkpoints=checkpoints,
        early_stopping=EarlyStopping(config.evaluation, checkpoints.best.identity),
        monitor=StepMonitor(config.resilience, engine.optimizer.device),
        metrics=_build_metrics(run, resolved, engine, epochs=config.training.epochs),
        stragglers=_build_stragglers(config, resolved, model_parts.values(), device),
        profiler=Profiler(config.profiling, device, config.run.folder, state.step),
        watchdog=Watchdog(config.resilience.hang_timeout_s, stop),
        stop=stop,
        lock=lock,
    )


def _prepare_run_folder(config: Config, is_new: bool) -> None:
    """Create the run folder. Raises ConfigError, also if a run that is new would begin in a folder with checkpoints."""
    folder = config.run.folder
    if line := provenance(config):
        console.info(line)
    if is_new and run_on_rank_0(lambda: committed(folder / CHECKPOINTS)):
        raise ConfigError(
            "run.name", f"{folder} has checkpoints of an earlier run; resume_point returns the one to resume from"
        )
    create_run_folder(folder)


def _set_up_process(config: Config, device: torch.device) -> None:
    """Set threads, allocator and random generators of this process."""
    devices.set_cpu_threads(config.training.cpu_threads)
    if device.type == "cpu":
        keep_freed_memory()
    devices.set_deterministic(config.run.deterministic, device)
    torch.manual_seed(config.run.seed + dist.get_rank())


def _build_meshes(config: Config, resolved: ResolvedRun, device: torch.device) -> Meshes:
    timeout = timedelta(seconds=config.distributed.timeout_s)
    return Meshes(resolved.dims, device, timeout, resolved.structure.has_experts, resolved.exchanges_matrices)


def _first_state(run: CheckedRun, resolved: ResolvedRun, initial: InitialModel) -> TrainState:
    data = {"tokenizer": run.text.tokenizer.fingerprint, "data": run.datasets.name}
    return TrainState(
        mixture=[[phase.start, *phase.quotas] for phase in run.datasets.phases],
        world_size=dist.get_world_size(),
        fingerprint=resolved.fingerprint | data | initial.hashes,
    )


def _build_stragglers(
    config: Config, resolved: ResolvedRun, model_parts: Iterable[nn.Module], device: torch.device
) -> StragglerDetector:
    stragglers = StragglerDetector(config.resilience.straggler_ratio, device)
    for part in model_parts:
        stragglers.time_blocks_of(part.get_submodule(resolved.structure.blocks_path))
    return stragglers


def _build_checkpoints(
    run: CheckedRun, resolved: ResolvedRun, engine: Engine, initial: InitialModel, mirror: Mirror | None
) -> CheckpointManager:
    """Start the writer of checkpoints, and build their manager."""
    config = run.config
    files = {CONFIG_FILE: to_toml(config).encode(), **initial.files}
    tensors = saved_tensors(engine.tensors(), devices.rng_state(engine.device))
    writer = WRITERS[config.checkpoint.async_mode if config.checkpoint.enabled else "off"](engine.device, tensors)
    return CheckpointManager(
        config.checkpoint,
        config.run.folder / CHECKPOINTS,
        engine.device,
        tensors=engine.tensors,
        after_load=partial(engine.optimizer.sync_master_weights, state_loaded=True),
        best=BestTracker(config.evaluation, run.identity_of(config.evaluation.criterion.name)),
        writer=writer,
        mirror=mirror,
        steps=config.training.steps,
        stored_names={
            f"{group}/{name}" for group in ("model", "optimizer", "average") for name in resolved.saved_names
        },
        files=files,
        metadata=versions() | {"config": digest(files[CONFIG_FILE])},
    )


def _record_start(
    run: CheckedRun,
    resolved: ResolvedRun,
    device: torch.device,
    meshes: Meshes,
    point: ResumePoint | None,
    state: TrainState,
) -> None:
    """Write the configuration of a run that has steps left, and log what the run is and will do."""
    config = run.config
    if state.step >= config.training.steps:
        return
    save_run_info(config, resolved, device)
    notes.log(
        [
            *notes.model_notes(config, resolved, device),
            notes.kernel_note(resolved, sample_layout(config, meshes), device),
            notes.start_note(config, point),
            *notes.start_warnings(config, resolved, run.weights, point),
            *notes.course_notes(config, resolved, state, run.datasets, run.eval_sets, run.tasks),
        ]
    )


def _build_generator(
    run: CheckedRun, resolved: ResolvedRun, initial: InitialModel, partition: BatchPartition, device: torch.device
) -> TrainingGenerator:
    return TrainingGenerator(
        tokenizer=run.text.tokenizer,
        stop_tokens=frozenset(ids_of_ends(json.loads(initial.files[GENERATION_CONFIG]))),
        partition=partition,
        device=device,
        seq_len=run.config.training.seq_len,
        vocab_size=resolved.sizes.vocab_size,
    )


def _build_samples(run: CheckedRun, generator: TrainingGenerator) -> SampleGenerator:
    return SampleGenerator(
        config=run.config.samples,
        prompts=run.prompts,
        is_chat=run.text.is_chat,
        generator=generator,
        steps=run.config.training.steps,
    )


def _build_evaluator(
    run: CheckedRun, initial: InitialModel, partition: BatchPartition, device: torch.device, objective: Objective
) -> Evaluator:
    return Evaluator(
        config=run.config.evaluation,
        datasets=initial.eval_sets,
        partition=partition,
        num_microbatches=partition.num_microbatches(run.config.training.global_batch_size),
        device=device,
        steps=run.config.training.steps,
        objective=objective,
    )


def _build_tasks(
    run: CheckedRun,
    resolved: ResolvedRun,
    engine: Engine,
    meshes: Meshes,
    generator: TrainingGenerator,
) -> TaskEvaluator:
    config, training = run.config, run.config.training
    by_document = nullcontext
    if run.tasks and not config.data.document_mask:
        layout = replace(sample_layout(config, meshes), by_document=True)
        parts, backend = engine.model_parts.values(), backend_of(engine.device)
        by_document = mixers_by_document(parts, resolved.structure, layout, backend)
    return TaskEvaluator(
        config=run.config.evaluation,
        tasks=run.tasks,
        partition=generator.partition,
        device=engine.device,
        steps=training.steps,
        chunk_tokens=training.loss_chunk_tokens,
        compiled=resolved.compiled,
        by_document=by_document,
        generator=generator,
        folder=run.config.run.folder,
    )


def _build_metrics(run: CheckedRun, resolved: ResolvedRun, engine: Engine, epochs: float | None) -> Metrics:
    """epochs: of the settings, if they replace training.steps."""
    config = run.config
    logged = LoggedRun(config.run.name, config.run.folder, config.training, config.metrics, epochs)
    sinks = build_sinks(config.metrics.sinks, logged, is_writer=dist.get_rank() == 0)
    samples = len(run.datasets.training)
    return Metrics(config.metrics, config.training, resolved, engine.device, engine.timer, sinks, samples)

"""Construction of the Trainer of a run and of all its components."""

import json
from collections.abc import Iterable
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
from trainer.base.system.checkpoint_folder import committed
from trainer.base.system.files import digest
from trainer.base.system.signals import StopRequest
from trainer.checkpoint.async_save import WRITERS
from trainer.checkpoint.best import BestTracker
from trainer.checkpoint.formats.model_metadata import GENERATION_CONFIG
from trainer.checkpoint.manager import CheckpointManager, saved_tensors
from trainer.checkpoint.resume import ResumePoint
from trainer.data.build import Datasets
from trainer.data.sampling.loader import BatchPartition
from trainer.engine import Engine, build_model_parts, build_objective
from trainer.evaluate import Evaluator, build_eval_sets
from trainer.inference.samples import SampleGenerator, encode_prompts, stop_tokens
from trainer.initial_model import InitialModel
from trainer.objective.objective import Objective
from trainer.parallel.attention import CPU_BACKEND, GPU_BACKEND, kernel_name
from trainer.parallel.mesh import Meshes
from trainer.resilience.early_stopping import EarlyStopping
from trainer.resilience.guard import StepMonitor
from trainer.resilience.straggler import StragglerDetector
from trainer.resilience.watchdog import Watchdog
from trainer.run.metrics import Metrics
from trainer.run.preflight import check_disk, check_memory
from trainer.run.profiler import Profiler
from trainer.run.resolve import ResolvedRun, require_profiled_step
from trainer.run.run_folder import create_run_folder, log_data, log_summary, save_run_info, versions
from trainer.run.sinks import build_sinks
from trainer.run.sinks.services import require_access
from trainer.run.sinks.sink import LoggedRun, Sink
from trainer.run.text_format import TextFormat, load_text_format, require_same_tokenizer
from trainer.run.training_data import (
    TrainingData,
    epochs_of,
    partition_of_batch,
    prepare_and_open,
    require_unchanged_mixture,
    target_share,
    with_steps,
)
from trainer.runtime import device as devices
from trainer.runtime.distributed import run_on_rank_0
from trainer.runtime.host_memory import keep_freed_memory
from trainer.state import TrainState
from trainer.trainer import Trainer


def build_trainer(
    config: Config,
    resolved: ResolvedRun,
    device: torch.device,
    point: ResumePoint | None,
    objective: Objective | None = None,
) -> Trainer:
    """Build the Trainer of a run, collectively. The process group must exist.

    Args:
        config: Settings of the run.
        resolved: Result of `resolve` for these settings.
        device: Device of this rank.
        point: Checkpoint to resume from.
        objective: What the run minimizes. None: what the settings select.

    Raises:
        ConfigError: The data, the model, the checkpoint or the run folder cannot be used, or z_loss is set too.
    """
    compatibility.check(config, {OWN_OBJECTIVE: Known(objective is not None)})
    saved = None if point is None else point.state
    _prepare_run_folder(config, is_new=point is None)
    deterministic = _set_up_process(config, device)

    text = load_text_format(config, resolved)
    prompts = encode_prompts(config.samples, config.data, text.tokenizer, text.is_chat, config.training.seq_len)
    if point is not None:
        require_same_tokenizer(point, config.tokenizer, text.tokenizer)

    timeout = timedelta(seconds=config.distributed.timeout_s)
    meshes = Meshes(resolved.dims, device, timeout, resolved.plan.has_experts, resolved.exchanges_matrices)
    backend = CPU_BACKEND if device.type == "cpu" else GPU_BACKEND
    model_parts = build_model_parts(config, resolved, meshes, backend)  # on the meta device: they take no memory yet
    check_memory(config, resolved, model_parts.values(), device)

    weights = initial_model.open_weights(config, resolved, point)
    datasets = prepare_and_open(config, text.tokenizer, saved)
    epochs, config = config.training.epochs, with_steps(config, datasets, saved)
    require_profiled_step(config.profiling, config.training.steps)
    check_disk(config, resolved, 0 if saved is None else saved.step)
    if saved is not None:
        require_unchanged_mixture(config, datasets, saved)
    eval_sets = build_eval_sets(datasets.evaluation, config.evaluation, text.tokenizer.text_bytes)
    partition = partition_of_batch(config.training, meshes.data["batch"])

    evaluated = objective
    if objective is None:
        objective = build_objective(config, resolved, meshes)
        evaluated = build_objective(config, resolved, meshes, evaluates=True)
    engine = Engine(config, resolved, device, meshes, model_parts, objective)
    start = initial_model.Start(config, resolved, point, weights)
    data = initial_model.Data(datasets.training, eval_sets, partition)
    initial = initial_model.load(start, text, engine, data)
    datasets = replace(datasets, training=initial.training)

    state = _first_state(resolved, text, datasets, initial)
    checkpoints = _build_checkpoints(config, resolved, engine, datasets, initial)
    if point is not None:
        checkpoints.restore(point, state)
    _record_start(config, resolved, device, datasets, state, deterministic)

    stop = StopRequest(console.info)
    return Trainer(
        config=config,
        state=state,
        engine=engine,
        data=TrainingData(config, datasets, partition, device),
        samples=_build_samples(config, resolved, text, prompts, initial, partition, device),
        evaluator=_build_evaluator(config, initial, partition, device, evaluated),
        checkpoints=checkpoints,
        early_stopping=EarlyStopping(config.evaluation, checkpoints.best.identity),
        monitor=StepMonitor(config.resilience, engine.optimizer.device),
        metrics=Metrics(
            config.metrics,
            config.training,
            resolved,
            device,
            engine.phases,
            _build_sinks(config, epochs),
            len(datasets.training),
        ),
        stragglers=_build_stragglers(config, resolved, model_parts.values(), device),
        profiler=Profiler(config.profiling, device, config.run.folder, state.step),
        watchdog=Watchdog(config.resilience.hang_timeout_s, stop),
        stop=stop,
    )


def _prepare_run_folder(config: Config, is_new: bool) -> None:
    """Create the run folder, after a check that the services accept the run. Raises ConfigError, also if a run that is new would
    begin in a folder with checkpoints."""
    folder = config.run.folder
    if line := provenance(config):
        console.info(line)
    if is_new and run_on_rank_0(lambda: committed(folder / "checkpoints")):
        raise ConfigError(
            "run.name", f"{folder} has checkpoints of an earlier run; resume_point returns the one to resume from"
        )
    run_on_rank_0(lambda: require_access(config.metrics))
    create_run_folder(folder)


def _set_up_process(config: Config, device: torch.device) -> bool:
    """Set threads, allocator and random generators of this process. Return whether all operators are deterministic."""
    devices.set_cpu_threads(config.training.cpu_threads)
    if device.type == "cpu":
        keep_freed_memory()
    deterministic = devices.set_deterministic(config.run.deterministic, device)
    torch.manual_seed(config.run.seed + dist.get_rank())
    return deterministic


def _first_state(resolved: ResolvedRun, text: TextFormat, datasets: Datasets, initial: InitialModel) -> TrainState:
    data = {"tokenizer": text.tokenizer.fingerprint, "data": datasets.name}
    return TrainState(
        mixture=[[phase.start, *phase.quotas] for phase in datasets.phases],
        world_size=dist.get_world_size(),
        fingerprint=resolved.fingerprint | data | initial.hashes,
    )


def _attention_kernels(config: Config, resolved: ResolvedRun, device: torch.device) -> str:
    """Return the names of the attention kernels, separated by commas."""
    sizes, dims, seq_len = resolved.sizes, resolved.dims, config.training.seq_len
    width, v_width = sizes.head_widths
    q = 1, sizes.n_heads // dims.tp, seq_len // dims.cp, width
    k, v = ((1, sizes.n_kv_heads // dims.tp, seq_len, w) for w in (width, v_width))
    dtype, by_document = devices.DTYPES[config.training.compute_dtype], config.data.document_mask
    kinds = resolved.plan.kinds.values()
    return ", ".join(dict.fromkeys(kernel_name(kind, (q, k, v), dims.cp, by_document, dtype, device) for kind in kinds))


def _build_stragglers(
    config: Config, resolved: ResolvedRun, model_parts: Iterable[nn.Module], device: torch.device
) -> StragglerDetector:
    stragglers = StragglerDetector(config.resilience.straggler_ratio, device)
    for part in model_parts:
        stragglers.time_blocks_of(part.get_submodule(resolved.plan.blocks_path))
    return stragglers


def _build_checkpoints(
    config: Config, resolved: ResolvedRun, engine: Engine, datasets: Datasets, initial: InitialModel
) -> CheckpointManager:
    """Start the writer of checkpoints, and build their manager."""
    files = {"config.toml": to_toml(config).encode(), **initial.files}
    tensors = saved_tensors(engine.tensors(), devices.rng_state(engine.device))
    writer = WRITERS[config.checkpoint.async_mode if config.checkpoint.enabled else "off"](engine.device, tensors)
    return CheckpointManager(
        config.checkpoint,
        config.run.folder / "checkpoints",
        engine.device,
        tensors=engine.tensors,
        after_load=partial(engine.optimizer.sync_master_weights, state_loaded=True),
        best=BestTracker(config.evaluation, datasets.evaluation_names.get(config.evaluation.keep_best_on, "")),
        writer=writer,
        steps=config.training.steps,
        stored_names={
            f"{group}/{name}" for group in ("model", "optimizer", "average") for name in resolved.saved_names
        },
        files=files,
        metadata=versions() | {"config": digest(files["config.toml"])},
    )


def _record_start(
    config: Config,
    resolved: ResolvedRun,
    device: torch.device,
    datasets: Datasets,
    state: TrainState,
    deterministic: bool,
) -> None:
    """Write the configuration of a run that has steps left, and log what the run is."""
    if state.step < config.training.steps:
        save_run_info(config, resolved, device)
    log_summary(config, resolved, device, deterministic, _attention_kernels(config, resolved, device))
    epochs, _ = epochs_of(config, datasets, state)
    share = run_on_rank_0(lambda: target_share(datasets.training))
    log_data(config, resolved.grad_accum, datasets, epochs, share)


def _build_samples(
    config: Config,
    resolved: ResolvedRun,
    text: TextFormat,
    prompts: list[list[int]],
    initial: InitialModel,
    partition: BatchPartition,
    device: torch.device,
) -> SampleGenerator:
    """prompts: result of encode_prompts."""
    return SampleGenerator(
        config=config.samples,
        prompts=prompts,
        is_chat=text.is_chat,
        tokenizer=text.tokenizer,
        stop=stop_tokens(text.tokenizer, json.loads(initial.files[GENERATION_CONFIG])),
        vocab_size=resolved.sizes.vocab_size,
        seq_len=config.training.seq_len,
        partition=partition,
        device=device,
        steps=config.training.steps,
    )


def _build_evaluator(
    config: Config, initial: InitialModel, partition: BatchPartition, device: torch.device, objective: Objective
) -> Evaluator:
    return Evaluator(
        config=config.evaluation,
        datasets=initial.eval_sets,
        partition=partition,
        num_microbatches=partition.num_microbatches(config.training.global_batch_size),
        device=device,
        steps=config.training.steps,
        objective=objective,
    )


def _build_sinks(config: Config, epochs: float | None) -> list[Sink]:
    """epochs: of the settings, if they replace training.steps."""
    run = LoggedRun(config.run.name, config.run.folder, config.training, config.metrics, epochs)
    return build_sinks(config.metrics.sinks, run, is_writer=dist.get_rank() == 0)

"""Construction of the Trainer of a run and of all its components."""

from collections.abc import Mapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from models.spec import meta_model
from trainer.checkpoint.adapter import load_adapter
from trainer.checkpoint.best import BestTracker
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume import ResumePoint
from trainer.checkpoint.weights import init_weights_from, names_loaded
from trainer.config import Config
from trainer.config.render import to_toml
from trainer.engine import Engine, build_model_parts
from trainer.evaluate import Evaluator, build_eval_sets
from trainer.parallel.attention import CPU_BACKEND, GPU_BACKEND, kernel_name
from trainer.parallel.mesh import Meshes
from trainer.resilience.guard import StepMonitor
from trainer.resilience.straggler import StragglerDetector
from trainer.resilience.watchdog import Watchdog
from trainer.run.metrics import Metrics
from trainer.run.preflight import check_disk, check_memory
from trainer.run.profiler import Profiler
from trainer.run.resolve import ResolvedRun
from trainer.run.run_folder import create_run_folder, log_summary, model_files, run_folder, save_run_info, versions
from trainer.run.training_data import TrainingData
from trainer.runtime import device as devices
from trainer.runtime.host_memory import keep_freed_memory
from trainer.state import TrainState
from trainer.system.files import digest
from trainer.trainer import Trainer


def build_trainer(config: Config, resolved: ResolvedRun, device: torch.device, point: ResumePoint | None) -> Trainer:
    """Build the Trainer of a run. The process group must exist. point: checkpoint to resume from. Raise ConfigError if the data,
    the model or the run folder cannot be used."""
    folder, names = run_folder(config), resolved.parameter_names
    create_run_folder(folder)
    devices.set_cpu_threads(config.training.cpu_threads)
    if device.type == "cpu":
        keep_freed_memory()
    deterministic = devices.set_deterministic(config.run.deterministic, device)
    torch.manual_seed(config.run.seed + dist.get_rank())

    meshes = Meshes(resolved.dims, device, timedelta(seconds=config.distributed.timeout_s))
    backend = CPU_BACKEND if device.type == "cpu" else GPU_BACKEND
    model_parts = build_model_parts(config, resolved, meshes, backend)
    parameters = [parameter for part in model_parts.values() for parameter in part.parameters()]
    check_memory(config, resolved, parameters, device)
    check_disk(config, resolved.num_trained, 0 if point is None else point.state.step)

    data = TrainingData(config, resolved.tokenizer, meshes.data["batch"], device)
    eval_sets = build_eval_sets(data.datasets.evaluation, config.evaluation, resolved.tokenizer.text_bytes)
    fingerprint = resolved.fingerprint | {"data": data.datasets.name}
    mixture = [[phase.start, *phase.quotas] for phase in data.datasets.phases]
    state = TrainState(mixture=mixture, world_size=dist.get_world_size(), fingerprint=fingerprint)
    if point is not None:
        data.require_unchanged_mixture(point.state)

    loaded = names_loaded(config.checkpoint, names)
    if point is not None or config.lora.init_from:
        loaded = names | resolved.trained.names
    engine = Engine(config, resolved, device, meshes, model_parts, loaded)
    base = _load_weights(config, resolved, engine, point is None)
    if base:
        state.fingerprint["base model"] = base["base_digest"]
    checkpoints = _build_checkpoints(config, resolved, engine, data, state, point, base)

    save_run_info(config, device)
    log_summary(config, resolved, device, deterministic, _attention_kernels(config, resolved, device), data.datasets)
    stragglers = StragglerDetector(config.resilience.straggler_ratio, device)
    for part in model_parts.values():
        stragglers.time_blocks_of(part.get_submodule(resolved.plan.blocks))
    records = folder if dist.get_rank() == 0 else None
    return Trainer(
        config=config,
        state=state,
        engine=engine,
        data=data,
        evaluator=Evaluator(config.evaluation, eval_sets, data.partition, data.to_device, config.training.steps),
        checkpoints=checkpoints,
        monitor=StepMonitor(config.resilience, engine.optimizer.device),
        metrics=Metrics(config.metrics, config.training, resolved, device, engine.phases, records, state.step),
        stragglers=stragglers,
        profiler=Profiler(config.profiling, device, folder, state.step),
        watchdog=Watchdog(config.resilience.hang_timeout_s),
    )


def _load_weights(config: Config, resolved: ResolvedRun, engine: Engine, is_new: bool) -> dict[str, str]:
    """Load the initial weights of a new run, and the base model of adapters. Return the base model's path and hash, or {}."""
    trains_adapters = config.lora.rank is not None
    if not config.checkpoint.init_from or not (is_new or trains_adapters):
        return {}
    spec, sizes, names = resolved.spec, resolved.sizes, resolved.parameter_names
    weights, base = init_weights_from(config.checkpoint, spec, sizes, engine.parameters, names), {}
    if trains_adapters:
        base = {"base": str(weights.folder.resolve()), "base_digest": weights.digest()}
    if config.lora.init_from and is_new:
        trained = resolved.trained.tensors(meta_model(spec.model, sizes))
        load_adapter(config.lora, spec, sizes, engine.parameters, trained, base["base_digest"])
    engine.optimizer.sync_master_weights(state_loaded=False)
    return base


def _attention_kernels(config: Config, resolved: ResolvedRun, device: torch.device) -> str:
    """Return the names of the attention kernels, separated by commas."""
    sizes, dims, seq_len = resolved.sizes, resolved.dims, config.training.seq_len
    q = 1, sizes.n_heads // dims.tp, seq_len // dims.cp, sizes.head_dim
    k = 1, sizes.n_kv_heads // dims.tp, seq_len, sizes.head_dim
    dtype, by_document = devices.DTYPES[config.training.compute_dtype], config.data.document_mask
    kinds = resolved.plan.kinds.values()
    return ", ".join(dict.fromkeys(kernel_name(kind, (q, k), dims.cp, by_document, dtype, device) for kind in kinds))


def _build_checkpoints(
    config: Config,
    resolved: ResolvedRun,
    engine: Engine,
    data: TrainingData,
    state: TrainState,
    point: ResumePoint | None,
    base: Mapping[str, str],
) -> CheckpointManager:
    """Build the checkpoint manager, which restores the checkpoint to resume from. base: result of _load_weights."""
    files = {"config.toml": to_toml(config).encode(), **model_files(config, resolved, base)}
    return CheckpointManager(
        config.checkpoint,
        run_folder(config) / "checkpoints",
        engine.device,
        tensors=engine.tensors,
        after_load=partial(engine.optimizer.sync_master_weights, state_loaded=True),
        best=BestTracker(config.evaluation, data.datasets.evaluation_names.get(config.evaluation.keep_best_on, "")),
        state=state,
        point=point,
        steps=config.training.steps,
        stored_names={f"{group}/{name}" for group in ("model", "optimizer") for name in resolved.trained.names},
        files=files,
        metadata=versions() | {"config": digest(files["config.toml"])},
    )

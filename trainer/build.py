"""Construction of a run: all components of the Trainer."""

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from trainer.checkpoint.best import BestTracker
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume import ResumePoint
from trainer.checkpoint.weights import init_weights_from, names_loaded
from trainer.config import Config
from trainer.config.render import to_toml
from trainer.data.sampling.loader import BatchPartition
from trainer.engine import Engine, build_model_parts
from trainer.evaluate import Evaluator, build_eval_sets
from trainer.parallel.attention import CPU_BACKEND, GPU_BACKEND
from trainer.parallel.mesh import Meshes
from trainer.resilience.guard import StepMonitor
from trainer.resilience.straggler import StragglerDetector
from trainer.resilience.watchdog import Watchdog
from trainer.run.metrics import Metrics
from trainer.run.preflight import check_disk, check_memory, state_bytes
from trainer.run.resolve import ResolvedRun
from trainer.run.run_folder import create_run_folder, log_summary, model_files, run_folder, save_run_info, versions
from trainer.run.training_data import TrainingData
from trainer.runtime import device as devices
from trainer.state import TrainState
from trainer.system.files import digest
from trainer.trainer import Trainer


def build_trainer(config: Config, resolved: ResolvedRun, device: torch.device, point: ResumePoint | None) -> Trainer:
    """Build the Trainer of a run in a started process group. point: checkpoint to resume from. Raise ConfigError if the
    data, the model or the run folder cannot be used."""
    training = config.training
    folder = run_folder(config)
    create_run_folder(folder)
    devices.set_cpu_threads(training.cpu_threads)
    deterministic = devices.set_deterministic(config.run.deterministic, device)
    torch.manual_seed(config.run.seed + dist.get_rank())

    meshes = Meshes(resolved.dims, device)
    backend = CPU_BACKEND if device.type == "cpu" else GPU_BACKEND
    model_parts = build_model_parts(config, resolved, meshes, backend)
    _check_resources(config, resolved, device, model_parts.values(), 0 if point is None else point.state.step)

    partition = BatchPartition(
        global_batch_size=training.global_batch_size,
        local_batch_size=training.local_batch_size,
        rank=meshes.data["batch"].get_local_rank(),
        ranks=resolved.dims.batch,
    )
    data = TrainingData(
        config.data,
        config.evaluation.datasets,
        config.tokenizer,
        resolved.tokenizer,
        partition,
        device,
        seq_len=training.seq_len,
        seed=config.run.seed,
    )
    eval_sets = build_eval_sets(data.datasets.evaluation, config.evaluation, resolved.tokenizer.text_bytes)
    state = TrainState(
        mixture=data.mixture,
        world_size=dist.get_world_size(),
        fingerprint=resolved.fingerprint | {"data": data.datasets.name},
    )
    if point is not None:
        data.require_unchanged_mixture(point.state)

    names = resolved.parameter_names
    loaded = names_loaded(config.checkpoint, names) if point is None else set(names)
    engine = Engine(config, resolved, device, meshes, model_parts, loaded)
    if point is None and config.checkpoint.init_from:
        init_weights_from(config.checkpoint, resolved.spec, resolved.sizes, engine.parameters, names)
        engine.optimizer.sync_master_weights(state_loaded=False)
    files = {"config.toml": to_toml(config).encode(), **model_files(config, resolved)}
    checkpoints = CheckpointManager(
        config.checkpoint,
        folder / "checkpoints",
        device,
        tensors=engine.tensors,
        after_load=partial(engine.optimizer.sync_master_weights, state_loaded=True),
        best=BestTracker(config.evaluation, data.datasets.evaluation_names.get(config.evaluation.keep_best_on, "")),
        state=state,
        point=point,
        steps=training.steps,
        stored_names={f"{group}/{name}" for group in ("model", "optimizer") for name in names},
        files=files,
        metadata=versions() | {"config": digest(files["config.toml"])},
    )

    save_run_info(config, device)
    log_summary(config, resolved, device, deterministic, data.description)
    stragglers = StragglerDetector(config.resilience.straggler_ratio, device)
    for part in model_parts.values():
        stragglers.time_blocks_of(part.get_submodule(resolved.spec.plan(resolved.sizes).blocks))
    return Trainer(
        config,
        folder,
        state,
        engine,
        data,
        Evaluator(
            config.evaluation, eval_sets, engine.forward_backward, partition, data.to_device, steps=training.steps
        ),
        checkpoints,
        StepMonitor(config.resilience, late=engine.optimizer.device.type != "cpu"),
        Metrics(
            config.metrics,
            folder if dist.get_rank() == 0 else None,
            device,
            first_step=state.step,
            steps=training.steps,
            ranks=dist.get_world_size(),
            tokens_per_step=training.global_batch_size * training.seq_len,
            flops_per_token=resolved.flops_per_token,
            peak_flops=devices.peak_flops(device, training.compute_dtype),
        ),
        stragglers,
        Watchdog(config.resilience.hang_timeout_s),
    )


def _check_resources(
    config: Config, resolved: ResolvedRun, device: torch.device, model_parts: Iterable[nn.Module], step: int
) -> None:
    """Raise ConfigError if host, device or disk cannot hold what the run needs. model_parts: stages on the meta device."""
    parameters = [parameter for part in model_parts for parameter in part.parameters()]
    check_memory(parameters, config.training, config.optimizer, config.parallel, device)
    num_bytes = resolved.num_parameters * state_bytes(config.training, config.optimizer)
    check_disk(run_folder(config) / "checkpoints", config.checkpoint, num_bytes, step, config.training.steps)

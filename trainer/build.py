"""Construction of the Trainer of a run and of all its components."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from models.spec import meta_model
from trainer.checkpoint.adapter import load_adapter
from trainer.checkpoint.best import BestTracker
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume import ResumePoint, require_compatible
from trainer.checkpoint.weights import init_weights_from, names_loaded
from trainer.config import Config
from trainer.config.render import to_toml
from trainer.data.build import Datasets
from trainer.data.sampling.samples import Samples
from trainer.engine import Engine, build_model_parts
from trainer.evaluate import Evaluator, build_eval_sets
from trainer.parallel.attention import CPU_BACKEND, GPU_BACKEND, kernel_name
from trainer.parallel.mesh import Meshes
from trainer.resilience.guard import StepMonitor
from trainer.resilience.stop_signals import StopRequest
from trainer.resilience.straggler import StragglerDetector
from trainer.resilience.watchdog import Watchdog
from trainer.run.metrics import Metrics
from trainer.run.preflight import check_disk, check_memory
from trainer.run.profiler import Profiler
from trainer.run.reference import ReferenceStore
from trainer.run.resolve import ResolvedRun
from trainer.run.run_folder import create_run_folder, log_summary, model_files, run_folder, save_run_info, versions
from trainer.run.training_data import TrainingData, partition_of_batch, prepare_and_open, require_unchanged_mixture
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

    datasets = prepare_and_open(config, resolved.tokenizer)
    eval_sets = build_eval_sets(datasets.evaluation, config.evaluation, resolved.tokenizer.text_bytes)
    partition = partition_of_batch(config.training, meshes.data["batch"])
    sets = [(datasets.training, len(datasets.training)), *((s.samples, s.num_samples) for s in eval_sets)]
    open_references = partial(_open_references, config, sets)
    references, needs_initial_weights = [], point is None
    if point is not None:
        require_unchanged_mixture(config, datasets, point.state)
        references = open_references(point.state.fingerprint)
        needs_initial_weights = not all(store.is_complete for store in references)

    loaded = names_loaded(config.checkpoint, names)
    if not needs_initial_weights or config.lora.init_from:
        loaded = names | resolved.trained.names
    engine = Engine(config, resolved, device, meshes, model_parts, loaded)
    base, hashes = _load_weights(config, resolved, engine, needs_initial_weights)
    if point is not None:
        require_compatible(point, hashes)
        hashes = {name: point.state.fingerprint[name] for name in _MODEL_HASHES if name in point.state.fingerprint}
    if references := references or open_references(hashes):
        training, *evaluation = (store.complete(engine.forward_backward, partition) for store in references)
        datasets = replace(datasets, training=training)
        eval_sets = [replace(s, samples=samples) for s, samples in zip(eval_sets, evaluation, strict=True)]
    state = TrainState(
        mixture=[[phase.start, *phase.quotas] for phase in datasets.phases],
        world_size=dist.get_world_size(),
        fingerprint=resolved.fingerprint | {"data": datasets.name} | hashes,
    )
    checkpoints = _build_checkpoints(config, resolved, engine, datasets, state, point, base)

    save_run_info(config, device)
    log_summary(config, resolved, device, deterministic, _attention_kernels(config, resolved, device), datasets)
    stragglers = StragglerDetector(config.resilience.straggler_ratio, device)
    for part in model_parts.values():
        stragglers.time_blocks_of(part.get_submodule(resolved.plan.blocks))
    records = folder if dist.get_rank() == 0 else None
    stop = StopRequest()
    return Trainer(
        config=config,
        state=state,
        engine=engine,
        data=TrainingData(config, datasets, partition, device, stop),
        evaluator=Evaluator(config.evaluation, eval_sets, partition, device, config.training.steps),
        checkpoints=checkpoints,
        monitor=StepMonitor(config.resilience, engine.optimizer.device),
        metrics=Metrics(config.metrics, config.training, resolved, device, engine.phases, records, state.step),
        stragglers=stragglers,
        profiler=Profiler(config.profiling, device, folder, state.step),
        watchdog=Watchdog(config.resilience.hang_timeout_s, stop),
        stop=stop,
    )


_MODEL_HASHES = ("base model", "reference model")
"""Keys of the fingerprint that `_load_weights` returns."""


def _load_weights(
    config: Config, resolved: ResolvedRun, engine: Engine, needs_initial_weights: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Load the initial weights, if they are needed, and the base model of adapters. Return the base model's path and hash, or {},
    and the hashes of the base model and of the reference model, if the run has them."""
    lora, checkpoint, training = config.lora, config.checkpoint, config.training
    trains_adapters = lora.rank is not None
    if not checkpoint.init_from or not (needs_initial_weights or trains_adapters):
        return {}, {}
    spec, sizes, names = resolved.spec, resolved.sizes, resolved.parameter_names
    weights, base, hashes, adapter = init_weights_from(checkpoint, spec, sizes, engine.parameters, names), {}, {}, ""
    is_reference = needs_initial_weights and config.preference.needs_reference
    weights_digest = weights.digest() if trains_adapters or is_reference else ""
    if trains_adapters:
        hashes["base model"] = weights_digest
        base = {"base": str(weights.folder.resolve()), "base_digest": weights_digest}
    if lora.init_from and needs_initial_weights:
        trained = resolved.trained.tensors(meta_model(spec.model, sizes))
        adapter = load_adapter(lora, spec, sizes, engine.parameters, trained, weights_digest)
    engine.optimizer.sync_master_weights(state_loaded=False)
    if is_reference:
        # Everything on which the log-probabilities of the initial model depend, except the layout.
        changes = [checkpoint.init_exclude, checkpoint.resize_embeddings, checkpoint.init_exclude and config.run.seed]
        adapted = adapter and [adapter, lora.scale, lora.dtype]
        precision = [training.compute_dtype, training.parameter_dtype]
        if lora.train_fully:
            precision += [lora.dtype, *lora.train_fully]
        content = json.dumps([weights_digest, adapted, asdict(sizes), changes, precision], sort_keys=True)
        hashes["reference model"] = digest(content.encode())
    return base, hashes


def _open_references(
    config: Config, sets: Sequence[tuple[Samples, int]], hashes: Mapping[str, str]
) -> list[ReferenceStore]:
    """Return the stores of the training samples and of each evaluation dataset, or [] if the loss has no reference. sets:
    samples, and the number of those that are read. hashes: must contain the reference model's."""
    if not config.preference.needs_reference:
        return []
    folder = Path(config.data.store_folder) / "references"
    return [ReferenceStore(folder, hashes["reference model"], *of_set) for of_set in sets]


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
    datasets: Datasets,
    state: TrainState,
    point: ResumePoint | None,
    base: Mapping[str, str],
) -> CheckpointManager:
    """Build the checkpoint manager, which restores the checkpoint to resume from. base: result of _load_weights."""
    files = {"config.toml": to_toml(config).encode(), **model_files(config, resolved, base, point)}
    return CheckpointManager(
        config.checkpoint,
        run_folder(config) / "checkpoints",
        engine.device,
        tensors=engine.tensors,
        after_load=partial(engine.optimizer.sync_master_weights, state_loaded=True),
        best=BestTracker(config.evaluation, datasets.evaluation_names.get(config.evaluation.keep_best_on, "")),
        state=state,
        point=point,
        steps=config.training.steps,
        stored_names={f"{group}/{name}" for group in ("model", "optimizer") for name in resolved.trained.names},
        files=files,
        metadata=versions() | {"config": digest(files["config.toml"])},
    )

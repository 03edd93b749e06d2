"""Resolution of a configuration for a given world size: arithmetic, without a process group and without the files of the data."""

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from models import MODELS
from models.sizes import text_of
from models.spec import Model, ModelSpec, SizeError, Structure, meta_model, saved_buffers, saved_weights
from trainer.adapters.select import TrainedParameters, select_parameters, select_quantized
from trainer.base.config import Config, ConfigError, ModelConfig, ProfilingConfig, compatibility, errors_about
from trainer.base.config.fields import Setting, coerce, parse_text, settings, type_name
from trainer.base.config.pretrained import is_from_pretrained
from trainer.base.system.spelling import did_you_mean
from trainer.checkpoint.formats.folders import read_architecture
from trainer.checkpoint.resume import FAMILY
from trainer.optim.rules import RULES
from trainer.parallel.compilation import resolve_compilation
from trainer.parallel.float8 import Float8, check_shapes, resolve_float8
from trainer.parallel.mesh import ParallelDims
from trainer.parallel.parameter_storage import ParameterStorage, require_storable
from trainer.parallel.stages import Stage, check_microbatches, check_stages_per_rank, partition_blocks, stages_of_rank
from trainer.parallel.validate import check_divisibility
from trainer.run.facts import model_facts, trained_facts
from trainer.run.resolve_optimizer import ResolvedOptimizer, resolve_optimizer
from trainer.runtime import device as devices
from trainer.runtime.device import DTYPES


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """Everything that follows from the settings and the number of ranks alone."""

    family: str
    model_name: str
    """Family and size, or the folder or Hub name of the model. It is used in messages."""
    spec: ModelSpec
    sizes: Any
    structure: Structure
    dims: ParallelDims
    stages: list[Stage]
    hidden_shape: tuple[int, int, int]
    """Shape of the hidden state between blocks, on each rank: (batch, seq, dim)."""
    weight_names: frozenset[str]
    """Names of the complete model's parameters and saved buffers. A parameter shared by two modules is listed once."""
    saved_names: frozenset[str]
    """Names of the trained parameters and, without adapters, of the buffers: of what a checkpoint contains of the model."""
    num_parameters: int
    """Number of values of the complete model."""
    base_bytes: int
    """Bytes of the complete model as it is kept, without adapters."""
    trained: TrainedParameters
    num_trained: int
    """Number of trained values, of which a checkpoint consists."""
    parameter_storage: ParameterStorage
    """How parameters are kept between uses."""
    optimizer: ResolvedOptimizer
    float8: Float8
    """The linear modules with products in float8."""
    compiled: bool
    """Whether blocks are compiled and, without tensor parallelism, the loss."""
    grad_accum: int
    """Number of microbatches per step on each rank; with [training] batch_schedule, of the steps with the largest batch."""
    flops_per_token: int
    fingerprint: dict[str, Any]
    """Setting or dimension -> value. The values must be equal in a checkpoint and in a run that resumes from it."""
    shared: dict[str, Any]
    """Setting -> value. The values must be equal on all ranks."""

    @property
    def exchanges_matrices(self) -> bool:
        """Whether the ranks of a pipeline stage exchange matrices to update them (trainer/optim/exchange.py)."""
        return self.dims.ranks_per_stage > 1 and any(RULES[group.rule].only_matrices for group in self.optimizer.groups)


def resolve(config: Config, world_size: int) -> ResolvedRun:
    """Resolve a configuration. Raises ConfigError if its combination of settings cannot run."""
    family, sizes = resolve_model(config.model)
    sizes = _with_trained_layers(sizes, config)
    spec, sizes = MODELS[family], _for_seq_len(sizes, config.training.seq_len, config.model.overrides)
    model = meta_model(spec.model, sizes)
    structure = model.structure()
    of_folder = is_from_pretrained(config, "model.huggingface")
    folder = config.model.pretrained if of_folder else config.model.huggingface
    name = folder or f"{family}/{config.model.size}"
    training = config.training
    on_gpu = devices.uses_gpus(config.run.device)
    compiled = resolve_compilation(config.compile.enabled, config.parallel, on_gpu)
    # Before the degrees: ep of a model without experts has no right value but 1.
    known = model_facts(model, structure, name, config.parallel, compiled, on_gpu)
    compatibility.check(config, known)
    dims = ParallelDims.from_config(config.parallel, world_size)
    check_stages_per_rank(config.parallel)
    _check_profiled_rank(config.profiling, world_size)
    if training.epochs is None:
        require_profiled_step(config.profiling, training.steps)
    check_divisibility(dims, structure, sizes, name, config.parallel, training.seq_len)
    _check_batch_sizes(config, dims)
    trained = select_parameters(model, structure, config.lora)
    quantized = select_quantized(model, structure, config.lora)
    require_storable(quantized, model, structure, dims)
    parameter_storage = ParameterStorage(
        dtype=training.compute_dtype, quantized=quantized, is_double=config.lora.quantizes_scales
    )
    stages = partition_blocks(model, structure, config.parallel)
    _check_stages(config, structure, stages, trained)
    float8 = resolve_float8(model, structure, training)
    check_shapes(float8, model, structure, dims, training, config.parallel.sequence_parallel)
    buffers = frozenset(saved_buffers(model))
    optimizer = resolve_optimizer(config.optimizer, model, trained, sizes, name, dims.tp)
    compatibility.check(config, known | trained_facts(config, model, spec, sizes, dims, trained, optimizer))
    names = {"prediction_layers": "prediction_layers ([training] prediction_weight)"}
    dimensions = {f"model.{names.get(name, name)}": value for name, value in asdict(sizes).items()}
    sequence_shards = dims.cp * (dims.tp if config.parallel.sequence_parallel else 1)
    return ResolvedRun(
        family=family,
        model_name=name,
        spec=spec,
        sizes=sizes,
        structure=structure,
        dims=dims,
        stages=stages,
        hidden_shape=(training.local_batch_size, training.seq_len // sequence_shards, sizes.dim),
        weight_names=frozenset(saved_weights(model)),
        saved_names=trained.names | (buffers if config.lora.rank is None else frozenset()),
        float8=float8,
        compiled=compiled,
        grad_accum=training.largest_batch_size // (training.local_batch_size * dims.batch),
        num_parameters=sum(p.numel() for p in model.parameters()),
        base_bytes=parameter_storage.parameter_bytes(model, DTYPES[training.parameter_dtype]),
        trained=trained,
        num_trained=sum(p.numel() for p in trained.tensors(model).values()),
        optimizer=optimizer,
        parameter_storage=parameter_storage,
        flops_per_token=trained.flops_per_token(model, training.seq_len),
        fingerprint=_fingerprint(config)
        | {FAMILY: family}
        | dimensions
        | _adapters_of_experts(trained, model)
        | optimizer.fingerprint,
        shared=_values(config, lambda setting: not setting.constraint.per_node)
        | {"compile.enabled": compiled, "model.type": spec.huggingface.model_type, **dimensions},
    )


def resolve_on_this_node(config: Config, ranks: int, num_nodes: int) -> ResolvedRun:
    """Like `resolve`. Raises ConfigError, also if this node cannot run its ranks. ranks: of each node."""
    resolved = resolve(config, ranks * num_nodes)
    devices.require_enough_gpus(config.run.device, ranks)
    compatibility.check(config, devices.float8_facts(config.run.device))
    return resolved


def _check_batch_sizes(config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError if the ranks cannot divide one of the batch sizes into microbatches."""
    training = config.training
    samples = training.local_batch_size * dims.batch
    for steps, size in training.batch_sizes:
        if size % samples:
            key = f"training.batch_schedule.{steps}" if steps else "training.global_batch_size"
            factors = f"local_batch_size {training.local_batch_size} x {dims.batch} data-parallel ranks"
            raise ConfigError(key, f"must be a multiple of {factors} = {samples}")
        if dims.pp > 1:
            try:
                check_microbatches(config.parallel, size // samples)
            except ConfigError as error:
                key = f"training.batch_schedule.{steps}" if steps else error.key
                raise ConfigError(key, error.message) from None


def _check_stages(config: Config, structure: Structure, stages: list[Stage], trained: TrainedParameters) -> None:
    """Raise ConfigError if a pipeline rank has no trained parameter."""
    for rank in range(config.parallel.pp if config.lora.rank else 0):
        own = stages_of_rank(stages, rank, config.parallel)
        modules = [f"{structure.blocks_path}.{i}" for stage in own for i in stage.blocks]
        modules += structure.pre_blocks if any(stage.is_first for stage in own) else ()
        modules += structure.post_blocks if any(stage.is_last for stage in own) else ()
        if not any(name.startswith(f"{module}.") for name in trained.names for module in modules):
            message = f"rank {rank} of the pipeline ({', '.join(modules)}) would have no trained parameter"
            raise ConfigError("lora.targets", message)


def _for_seq_len(sizes: Any, seq_len: int, overrides: Collection[str]) -> Any:
    """Return the sizes for sequences of this length. Raises ConfigError if the length contradicts an override."""
    resulting = sizes.for_seq_len(seq_len)
    for name in overrides:
        if getattr(resulting, name) != getattr(sizes, name):
            message = f"must be {text_of(getattr(resulting, name))} for [training] seq_len = {seq_len}"
            raise ConfigError(f"model.overrides.{name}", message)
    return resulting


def _with_trained_layers(sizes: Any, config: Config) -> Any:
    """Return the sizes without layers for multi-token prediction, if the run does not train them. Raises ConfigError if the
    settings ask for them."""
    if config.training.prediction_weight:
        if len(sizes.predictions) >= config.training.seq_len:
            message = f"must be above the number of layers for multi-token prediction, {sizes.prediction_layers}"
            raise ConfigError("training.seq_len", f"{message}, of which the last would have no target")
        return sizes
    if "prediction_layers" in config.model.overrides and sizes.prediction_layers:
        message = "has an effect only with [training] prediction_weight"
        raise ConfigError("model.overrides.prediction_layers", message)
    return sizes.without_prediction()


def _adapters_of_experts(trained: TrainedParameters, model: Model) -> dict[str, int]:
    """Return an entry of the fingerprint if experts have adapters. In older checkpoints, the targets "*" were linear modules."""
    num_stacks = len(trained.of_experts(model))
    return {"number of adapters of experts": num_stacks // 2} if num_stacks else {}


def _fingerprint(config: Config) -> dict[str, Any]:
    """Return the part of the fingerprint that consists of settings. It has no settings of the model, because its sizes count. A
    run without adapters or without a preference loss has only the setting that states this."""
    absent = {"lora": not config.lora.rank, "preference": not config.preference.enabled, "model": True}
    fingerprint = _values(config, lambda s: s.constraint.fixed_on_resume and not absent.get(s.section))
    fingerprint["lora.rank"] = config.lora.rank
    fingerprint["preference.loss"] = None if absent["preference"] else config.preference.loss
    if config.lora.rank and config.lora.quantizes_scales:
        fingerprint["form of [lora] base_dtype"] = (
            config.lora.base_format
        )  # null: the linear scales of an older version
    if config.trained_dtype == "bf16":
        # If this changed, the resumed run would lose the copy, or have none to load.
        fingerprint["fp32 copy of the parameters ([optimizer] offload)"] = config.optimizer.offload != "none"
    return fingerprint


def require_profiled_step(config: ProfilingConfig, steps: int) -> None:
    """Raise ConfigError if the first profiled step is beyond the run's steps."""
    if config.first_step > steps:
        raise ConfigError("profiling.first_step", f"exceeds [training] steps = {steps}")


def _check_profiled_rank(config: ProfilingConfig, world_size: int) -> None:
    """Raise ConfigError if the run does not have the rank to profile."""
    if config.rank != "all" and config.rank >= world_size:
        raise ConfigError("profiling.rank", f"must be below the number of ranks, {world_size}")


def _values(config: Config, select: Callable[[Setting], bool]) -> dict[str, Any]:
    """Return the values of the settings for which `select` returns true. The keys are "section.name"."""
    return {key: config.value(key) for key, setting in settings().items() if select(setting)}


def resolve_model(config: ModelConfig) -> tuple[str, Any]:
    """Return the name of the model family and the dimensions of the model, with the overrides applied."""
    family, sizes = config.name, None
    if config.huggingface:
        with errors_about("model.huggingface"):
            family, sizes = read_architecture(Path(config.huggingface))
    elif family not in MODELS:
        raise ConfigError("model.name", f"expected one of {', '.join(MODELS)}{did_you_mean(family, MODELS)}")
    elif config.size not in MODELS[family].by_size:
        by_name = MODELS[family].by_size
        message = f"expected one of {', '.join(by_name)} for {family}{did_you_mean(config.size, by_name)}"
        raise ConfigError("model.size", message)
    sizes = sizes or MODELS[family].by_size[config.size]
    values, types = asdict(sizes), {field.name: field.type for field in fields(sizes)}
    for name, value in config.overrides.items():
        key = f"model.overrides.{name}"
        if name not in values:
            raise ConfigError(key, f"{family} has no dimension of this name{did_you_mean(name, values)}")
        type_ = types[name]
        try:
            raw = list(value) if isinstance(value, tuple) else value
            values[name] = parse_text(raw, type_) if isinstance(raw, str) else coerce(raw, type_)
        except ValueError:
            raise ConfigError(key, f"expected {type_name(type_)}") from None
    try:
        return family, type(sizes)(**values)
    except SizeError as error:
        setting = next(
            (f"model.overrides.{name}" for name in error.names if name in config.overrides), "model.overrides"
        )
        raise ConfigError(setting, str(error)) from None

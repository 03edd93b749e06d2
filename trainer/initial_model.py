"""The model that a run starts from: its weights, its base model, and its log-probabilities as the reference of a loss."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from models.spec import meta_model, saved_weights
from trainer.base.config import Config
from trainer.base.config.model_source import resolve_checkpoint
from trainer.base.config.pretrained import is_from_pretrained
from trainer.base.config.render import to_toml
from trainer.base.system import console
from trainer.base.system.checkpoint_folder import MANIFEST
from trainer.base.system.files import digest, digest_of, short_digest
from trainer.checkpoint.formats.huggingface import TEXT_MODEL
from trainer.checkpoint.formats.initial_adapter import load_adapter
from trainer.checkpoint.formats.weights import WeightSource, load_initial_weights, names_loaded, open_initial_weights
from trainer.checkpoint.resume import ResumePoint, changed_settings, require_compatible
from trainer.data.sampling.loader import BatchPartition
from trainer.data.sampling.samples import Samples
from trainer.engine import Engine
from trainer.evaluate import EvalSet
from trainer.objective.reference import ReferenceStore
from trainer.run.resolve import ResolvedRun
from trainer.run.run_folder import model_files
from trainer.run.text_format import TextFormat
from trainer.runtime.distributed import run_on_rank_0

_BASE, _REFERENCE, _INITIAL = "base model", "reference model", "initial weights"
"""Keys of InitialModel.hashes."""


@dataclass(frozen=True, kw_only=True)
class InitialModel:
    files: dict[str, bytes]
    """Files that make a checkpoint self-contained: model, tokenizer and chat template."""
    hashes: dict[str, str | None]
    """Hashes of the base model of adapters and of the reference model, if the run has them, and of the initial weights of a run
    without adapters (None: random). They are part of the fingerprint."""
    training: Samples
    """The training data, with the reference's log-probabilities if the loss has a reference."""
    eval_sets: list[EvalSet]
    """The evaluation data, likewise."""


def open_weights(config: Config, resolved: ResolvedRun, point: ResumePoint | None) -> WeightSource | None:
    """Open the weights of checkpoint.init_from, collectively, and check that they are those of the model, before the data are
    prepared. None: the run starts from random weights, or its checkpoint replaces them. Raises ConfigError."""
    is_replaced = point is not None and config.lora.rank is None
    return None if is_replaced or not config.checkpoint.init_from else _open(config, resolved)


def _open(config: Config, resolved: ResolvedRun) -> WeightSource:
    parameters = saved_weights(meta_model(resolved.spec.model, resolved.sizes))
    return open_initial_weights(config.checkpoint, resolved.spec, resolved.sizes, parameters)


def load(
    config: Config,
    resolved: ResolvedRun,
    text: TextFormat,
    engine: Engine,
    training: Samples,
    eval_sets: Sequence[EvalSet],
    partition: BatchPartition,
    point: ResumePoint | None,
    weights: WeightSource | None,
) -> InitialModel:
    """Give the engine's parameters their initial values, collectively, and compute the reference's missing log-probabilities.

    A run that resumes needs only the frozen base model of its adapters. It needs the other initial weights only while
    log-probabilities are missing; its checkpoint replaces them afterwards.

    Args:
        config: Settings of the run.
        resolved: The same, resolved.
        text: Tokenizer and chat template.
        engine: Its parameters receive their values.
        training: The training data.
        eval_sets: The evaluation data.
        partition: Which rank reads which samples.
        point: Checkpoint to resume from.
        weights: Result of `open_weights`.

    Raises:
        ConfigError: The weights cannot be used, or the base model is not that of the checkpoint.
    """
    open_references = partial(_open_references, config, training, eval_sets)
    if point is not None:
        kinds = (_BASE, _REFERENCE, _INITIAL)
        saved = {name: point.state.fingerprint[name] for name in kinds if name in point.state.fingerprint}
        stores = open_references(saved)
        if all(store.is_complete for store in stores):
            loaded = _load_base(config, resolved, engine, weights)
        else:
            loaded = _load_weights(config, resolved, engine, weights or _open(config, resolved))
        _require_same_weights(config, resolved, point, loaded)
        hashes: dict[str, str | None] = saved
        console.info(_resumed_line(point, loaded))
    else:
        loaded = _load_weights(config, resolved, engine, weights)
        hashes = loaded.hashes
        console.info(f"weights: {loaded.origin}")
        stores = open_references(hashes)
    if stores:
        chunks = config.training.loss_chunk_tokens, resolved.compiled
        read = engine.forward_backward.read
        training, *evaluation = (store.complete(read, partition, engine.device, *chunks) for store in stores)
        eval_sets = [replace(s, samples=samples) for s, samples in zip(eval_sets, evaluation, strict=True)]
    files = model_files(config, resolved, text, loaded.base, point)
    return InitialModel(files=files, hashes=hashes, training=training, eval_sets=list(eval_sets))


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    hashes: dict[str, str | None]
    """See InitialModel."""
    origin: str
    """From where the weights were loaded, for the log."""
    base: dict[str, str] = field(default_factory=dict)
    """Path and hash of the base model, if the run trains adapters."""


def _load_weights(config: Config, resolved: ResolvedRun, engine: Engine, weights: WeightSource | None) -> _Loaded:
    """Give all parameters their initial values: drawn at random, or loaded from checkpoint.init_from and lora.init_from."""
    lora, names = config.lora, resolved.weight_names
    loaded = names_loaded(config.checkpoint, names)
    engine.initialize(loaded=names | resolved.trained.names if lora.init_from else loaded)
    if weights is None:
        folder = "" if config.model.pretrained else config.model.huggingface
        only = f"; {folder} gives only the dimensions, and --from {folder} would load its weights too" if folder else ""
        return _Loaded(hashes={_INITIAL: None}, origin=f"random{only}")
    load_initial_weights(config.checkpoint, weights, engine.weights, engine.quantized, names)
    weights_digest = weights.digest()
    adapter = ""
    if lora.init_from:
        trained = resolved.trained.tensors(meta_model(resolved.spec.model, resolved.sizes))
        adapter = load_adapter(lora, resolved.spec, resolved.sizes, engine.parameters, trained, weights_digest)
    engine.start_optimizer()
    is_base = lora.rank is not None
    hashes: dict[str, str | None] = {_BASE if is_base else _INITIAL: weights_digest}
    if config.preference.needs_reference:
        hashes[_REFERENCE] = _reference_hash(config, resolved, weights_digest, adapter)
    base = _base_of(weights, weights_digest) if is_base else {}
    excluded = sorted(names - loaded)
    exception = f", except {', '.join(excluded[:4])}{' ...' * (len(excluded) > 4)}" if excluded else ""
    return _Loaded(hashes=hashes, origin=f"{_origin(weights, weights_digest)}{exception}", base=base)


def _load_base(config: Config, resolved: ResolvedRun, engine: Engine, weights: WeightSource | None) -> _Loaded:
    """Load the base model, if the run trains adapters."""
    if weights is None:
        return _Loaded(hashes={}, origin="")
    load_initial_weights(config.checkpoint, weights, engine.weights, engine.quantized, resolved.weight_names)
    weights_digest = weights.digest()
    base, origin = _base_of(weights, weights_digest), _origin(weights, weights_digest)
    return _Loaded(hashes={_BASE: weights_digest}, origin=origin, base=base)


def _origin(weights: WeightSource, weights_digest: str) -> str:
    files = weights.files()
    averaged = "averages " * weights.averaged
    return f"{averaged}loaded from {weights.folder} ({short_digest(weights_digest)}{f', {files}' if files else ''})"


def _base_of(weights: WeightSource, weights_digest: str) -> dict[str, str]:
    text_model = TEXT_MODEL if weights.hf_folder is None else weights.hf_folder.text_model
    return {"base": str(weights.folder.resolve()), "base_digest": weights_digest, "text_model": text_model}


def _resumed_line(point: ResumePoint, loaded: _Loaded) -> str:
    of_checkpoint = run_on_rank_0(lambda: digest_of(point.path / MANIFEST))
    checkpoint = f"{point.path} ({short_digest(of_checkpoint)})"
    return f"weights: {loaded.origin}, adapter {checkpoint}" if loaded.base else f"weights: loaded from {checkpoint}"


def _require_same_weights(config: Config, resolved: ResolvedRun, point: ResumePoint, loaded: _Loaded) -> None:
    """Raise ConfigError if the run began with other weights than those that [model] pretrained names, with another base model or
    with another reference. Checkpoints of earlier versions do not name the initial weights."""
    now = {name: value for name, value in loaded.hashes.items() if name != _INITIAL}
    # Rank 0 decides: other nodes may have the weights at another path.
    if run_on_rank_0(lambda: _names_other_weights(config, point)):
        source = run_on_rank_0(lambda: resolve_checkpoint(Path(config.checkpoint.init_from)))
        averaged = config.checkpoint.init_averaged
        now[_INITIAL] = WeightSource.open(source, resolved.spec, averaged=averaged).digest()
    require_compatible(point, now)


def _names_other_weights(config: Config, point: ResumePoint) -> bool:
    """Return whether [model] pretrained may name other weights than those with which the run began. A folder of the same name is
    not read again: the checkpoint contains all weights."""
    if _INITIAL not in point.state.fingerprint or not is_from_pretrained(config, "checkpoint.init_from"):
        return False
    changed = changed_settings(point, to_toml(config))
    return any(line.startswith(("model.pretrained ", "model.revision ", f"{point.path}")) for line in changed)


def _reference_hash(config: Config, resolved: ResolvedRun, weights_digest: str, adapter: str) -> str:
    """Return a hash of everything on which the log-probabilities of the initial model depend, except the layout. adapter: hash of
    the initial adapter, or ""."""
    lora, checkpoint, training = config.lora, config.checkpoint, config.training
    changes = [checkpoint.init_exclude, checkpoint.resize_embeddings, checkpoint.init_exclude and config.run.seed]
    if checkpoint.init_exclude and config.optimizer.base_width:  # the excluded parameters are drawn
        changes.append(config.optimizer.base_width)
    adapted = adapter and [adapter, lora.scale, lora.dtype]
    precision = [training.compute_dtype, training.parameter_dtype]
    if training.float8 != "none":
        precision += [training.float8, *training.float8_exclude]
    if lora.train_fully:
        precision += [lora.dtype, *lora.train_fully]
    if lora.base_dtype != "keep":
        precision.append(lora.base_dtype)
    content = [weights_digest, adapted, asdict(resolved.sizes), changes, precision]
    return digest(json.dumps(content, sort_keys=True).encode())


def _open_references(
    config: Config, training: Samples, eval_sets: Sequence[EvalSet], hashes: Mapping[str, str | None]
) -> list[ReferenceStore]:
    """Return the stores of the log-probabilities of the training data and of each evaluation dataset, or [] if the loss has no
    reference."""
    if not config.preference.needs_reference:
        return []
    folder, model = Path(config.data.store_folder) / "references", hashes[_REFERENCE]
    sets = [(training, len(training)), *((s.samples, s.num_samples) for s in eval_sets)]
    return [ReferenceStore.open(folder, model, samples, num_samples) for samples, num_samples in sets]

"""The model that a run starts from: its weights, its base model, and its log-probabilities as the reference of a loss."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from models.spec import meta_model
from trainer.base.config import CheckpointConfig, Config
from trainer.base.config.checkpoints import resolve_checkpoint, why_chosen
from trainer.base.config.pretrained import is_from_pretrained
from trainer.base.config.render import to_toml
from trainer.base.system import console
from trainer.base.system.files import digest, digest_of, short_digest
from trainer.base.system.run_files import MANIFEST
from trainer.base.system.urls import with_urls
from trainer.checkpoint.formats.folders import open_complete
from trainer.checkpoint.formats.initial_weights import (
    load_adapter,
    load_initial_weights,
    names_loaded,
    open_initial_weights,
)
from trainer.checkpoint.formats.weights import Weights
from trainer.checkpoint.resume import ResumePoint, changed_settings, require_compatible
from trainer.data.sampling.loader import BatchPartition
from trainer.data.sampling.samples import Samples
from trainer.engine import Engine
from trainer.evaluate import EvalSet
from trainer.objective.reference import ReferenceStore
from trainer.run.context_window import extension_of_window
from trainer.run.resolve import ResolvedRun
from trainer.run.run_folder import model_files
from trainer.run.text_format import TextFormat
from trainer.runtime.distributed import run_on_rank_0

_BASE, _REFERENCE, _INITIAL = "base model", "reference model", "initial weights"
"""Keys of InitialModel.hashes."""


@dataclass(frozen=True)
class Start:
    """What a run starts from."""

    config: Config
    resolved: ResolvedRun
    point: ResumePoint | None
    """Checkpoint to resume from."""
    weights: Weights | None
    """Those of checkpoint.init_from, which `check_run` has opened."""

    @property
    def has_adapters(self) -> bool:
        return self.config.lora.rank is not None


@dataclass(frozen=True)
class Data:
    """The samples of a run. A loss with a reference needs its log-probabilities."""

    training: Samples
    eval_sets: Sequence[EvalSet]
    partition: BatchPartition
    """Which rank reads which samples."""


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


def load(start: Start, text: TextFormat, engine: Engine, data: Data) -> InitialModel:
    """Give the engine's parameters their initial values, collectively, and compute the reference's missing log-probabilities.

    Args:
        start: What the run starts from.
        text: Tokenizer and chat template.
        engine: Its parameters receive their values.
        data: The samples.

    Raises:
        ConfigError: The weights cannot be used, or the base model is not that of the checkpoint.
    """
    loaded, stores = _load_new(start, engine, data) if start.point is None else _load_resumed(start, engine, data)
    training, eval_sets = data.training, [*data.eval_sets]
    if stores:
        chunks = start.config.training.loss_chunk_tokens, start.resolved.compiled
        read = engine.forward_backward.read
        training, *evaluation = (store.complete(read, data.partition, engine.device, *chunks) for store in stores)
        eval_sets = [replace(s, samples=samples) for s, samples in zip(eval_sets, evaluation, strict=True)]
    files = model_files(start.config, start.resolved, text, loaded.base, start.point, start.weights)
    return InitialModel(files=files, hashes=loaded.hashes, training=training, eval_sets=eval_sets)


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    hashes: dict[str, str | None]
    """See InitialModel."""
    origin: str
    """From where the weights were loaded, for the log."""
    base: dict[str, str] = field(default_factory=dict)
    """Path and hash of the base model, if the run trains adapters."""


def _load_new(start: Start, engine: Engine, data: Data) -> tuple[_Loaded, list[ReferenceStore]]:
    """Return what a new run has loaded, and the stores of the reference's log-probabilities."""
    loaded = _load_weights(start, start.weights, engine)
    console.info(f"weights: {loaded.origin}")
    return loaded, _open_references(start.config, data, loaded.hashes)


def _load_resumed(start: Start, engine: Engine, data: Data) -> tuple[_Loaded, list[ReferenceStore]]:
    """Likewise, for a run that resumes. It needs only the frozen base model of its adapters, and the other initial weights only
    while log-probabilities are missing; its checkpoint replaces them afterwards. The hashes are those of the checkpoint."""
    config, resolved, saved = start.config, start.resolved, start.point.state.fingerprint
    hashes = {name: saved[name] for name in (_BASE, _REFERENCE, _INITIAL) if name in saved}
    stores = _open_references(config, data, hashes)
    if all(store.is_complete for store in stores):
        loaded = _load_base(start, engine)
    else:
        weights = start.weights or open_initial_weights(
            config.checkpoint, resolved.spec, resolved.sizes, extension_of_window(config)
        )
        loaded = _load_weights(start, weights, engine)
    _require_same_weights(start, loaded)
    console.info(_resumed_line(start.point, loaded))
    return replace(loaded, hashes=hashes), stores


def _load_weights(start: Start, weights: Weights | None, engine: Engine) -> _Loaded:
    """Give all parameters their initial values: drawn at random, or loaded from checkpoint.init_from and lora.init_from."""
    config, resolved, names = start.config, start.resolved, start.resolved.weight_names
    lora, loaded = config.lora, names_loaded(config.checkpoint, names)
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
    hashes: dict[str, str | None] = {_BASE if start.has_adapters else _INITIAL: weights_digest}
    if config.preference.needs_reference:
        hashes[_REFERENCE] = _reference_hash(config, resolved, weights_digest, adapter)
    base = _base_of(weights, weights_digest) if start.has_adapters else {}
    excluded = sorted(names - loaded)
    more = " ..." if len(excluded) > 4 else ""
    exception = f", except {', '.join(excluded[:4])}{more}" if excluded else ""
    origin = _origin(config.checkpoint, weights, weights_digest)
    return _Loaded(hashes=hashes, origin=f"{origin}{exception}", base=base)


def _load_base(start: Start, engine: Engine) -> _Loaded:
    """Load the base model, if the run trains adapters."""
    if (weights := start.weights) is None:
        return _Loaded(hashes={}, origin="")
    names = start.resolved.weight_names
    load_initial_weights(start.config.checkpoint, weights, engine.weights, engine.quantized, names)
    weights_digest = weights.digest()
    base, origin = _base_of(weights, weights_digest), _origin(start.config.checkpoint, weights, weights_digest)
    return _Loaded(hashes={_BASE: weights_digest}, origin=origin, base=base)


def _origin(config: CheckpointConfig, weights: Weights, weights_digest: str) -> str:
    why = run_on_rank_0(lambda: why_chosen(Path(config.init_from), weights.folder))
    files = ", ".join(filter(None, (weights.files(), why)))
    averaged = "averages " if weights.averaged else ""
    return f"{averaged}loaded from {weights.folder} ({short_digest(weights_digest)}{f', {files}' if files else ''})"


def _base_of(weights: Weights, weights_digest: str) -> dict[str, str]:
    folder = with_urls(str(weights.folder.resolve()))
    return {"base": folder, "base_digest": weights_digest, "text_model": weights.text_model}


def _resumed_line(point: ResumePoint, loaded: _Loaded) -> str:
    of_checkpoint = run_on_rank_0(lambda: digest_of(point.path / MANIFEST))
    checkpoint = f"{point.path} ({short_digest(of_checkpoint)})"
    return f"weights: {loaded.origin}, adapter {checkpoint}" if loaded.base else f"weights: loaded from {checkpoint}"


def _require_same_weights(start: Start, loaded: _Loaded) -> None:
    """Raise ConfigError if the run began with other weights than those that [model] pretrained names, with another base model or
    with another reference. Checkpoints of earlier versions do not name the initial weights."""
    checkpoint, now = start.config.checkpoint, {n: value for n, value in loaded.hashes.items() if n != _INITIAL}
    # Rank 0 decides: other nodes may have the weights at another path.
    if run_on_rank_0(lambda: _names_other_weights(start.config, start.point)):
        folder = run_on_rank_0(lambda: resolve_checkpoint(Path(checkpoint.init_from)))
        now[_INITIAL] = open_complete(folder, start.resolved.spec, averaged=checkpoint.init_averaged).digest()
    require_compatible(start.point, now)


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
        precision.append(lora.base_format)
    content = [weights_digest, adapted, asdict(resolved.sizes), changes, precision]
    return digest(json.dumps(content, sort_keys=True).encode())


def _open_references(config: Config, data: Data, hashes: Mapping[str, str | None]) -> list[ReferenceStore]:
    """Return the stores of the log-probabilities of the training data and of each evaluation dataset, or [] if the loss has no
    reference."""
    if not config.preference.needs_reference:
        return []
    folder, model = Path(config.data.store_folder) / "references", hashes[_REFERENCE]
    sets = [(data.training, len(data.training)), *((s.samples, s.num_samples) for s in data.eval_sets)]
    return [ReferenceStore.open(folder, model, samples, num_samples) for samples, num_samples in sets]

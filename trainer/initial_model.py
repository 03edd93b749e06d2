"""The model that a run starts from: its weights, its base model, and its log-probabilities as the reference of a loss."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from models.spec import meta_model
from trainer.checkpoint.adapter import load_adapter
from trainer.checkpoint.resume import ResumePoint, require_compatible
from trainer.checkpoint.weights import WeightSource, init_weights_from, names_loaded
from trainer.config import Config
from trainer.data.sampling.loader import BatchPartition
from trainer.data.sampling.samples import Samples
from trainer.engine import Engine
from trainer.objective.reference import ReferenceStore
from trainer.run.resolve import ResolvedRun
from trainer.run.run_folder import model_files
from trainer.run.text_format import TextFormat
from trainer.system.files import digest

_BASE, _REFERENCE = "base model", "reference model"
"""Keys of InitialModel.hashes."""


@dataclass(frozen=True, kw_only=True)
class InitialModel:
    files: dict[str, bytes]
    """Files that make a checkpoint self-contained: model, tokenizer and chat template."""
    hashes: dict[str, str]
    """Hashes of the base model of adapters and of the reference model, if the run has them. They are part of the fingerprint."""
    samples: list[Samples]
    """The samples of each dataset, with the reference's log-probabilities if the loss has a reference."""


def load(
    config: Config,
    resolved: ResolvedRun,
    text: TextFormat,
    engine: Engine,
    sets: Sequence[tuple[Samples, int]],
    partition: BatchPartition,
    point: ResumePoint | None,
) -> InitialModel:
    """Give the engine's parameters their initial values, collectively, and compute the reference's missing log-probabilities.

    A run that resumes needs only the frozen base model of its adapters. It needs the other initial weights only while
    log-probabilities are missing; its checkpoint replaces them afterwards.

    Args:
        config: Settings of the run.
        resolved: The same, resolved.
        text: Tokenizer and chat template.
        engine: Its parameters receive their values.
        sets: Samples of each dataset, and the number of those that are read.
        partition: Which rank reads which samples.
        point: Checkpoint to resume from.

    Raises:
        ConfigError: The weights cannot be used, or the base model is not that of the checkpoint.
    """
    stores: list[ReferenceStore] = []
    if point is not None:
        saved = {name: point.state.fingerprint[name] for name in (_BASE, _REFERENCE) if name in point.state.fingerprint}
        stores = _open_references(config, sets, saved)
        if all(store.is_complete for store in stores):
            hashes, base = _load_base(config, resolved, engine)
        else:
            hashes, base = _load_weights(config, resolved, engine)
        require_compatible(point, hashes)
        hashes = saved
    else:
        hashes, base = _load_weights(config, resolved, engine)
        stores = _open_references(config, sets, hashes)
    samples = [of_set for of_set, _ in sets]
    if stores:
        chunks = config.training.loss_chunk_tokens, resolved.compiled
        read = engine.forward_backward.read
        samples = [store.complete(read, partition, engine.device, *chunks) for store in stores]
    files = model_files(config, resolved, text, base, point)
    return InitialModel(files=files, hashes=hashes, samples=samples)


def _load_weights(config: Config, resolved: ResolvedRun, engine: Engine) -> tuple[dict[str, str], dict[str, str]]:
    """Give all parameters their initial values: drawn at random, or loaded from checkpoint.init_from and lora.init_from. Return
    the hashes, and the base model's path and hash, or {}."""
    lora, names = config.lora, resolved.parameter_names
    loaded = names_loaded(config.checkpoint, names)
    engine.initialize(loaded=names | resolved.trained.names if lora.init_from else loaded)
    if not config.checkpoint.init_from:
        return {}, {}
    weights = init_weights_from(config.checkpoint, resolved.spec, resolved.sizes, engine.parameters, names)
    is_base, is_reference = lora.rank is not None, config.preference.needs_reference
    weights_digest = weights.digest() if is_base or is_reference else ""
    adapter = ""
    if lora.init_from:
        trained = resolved.trained.tensors(meta_model(resolved.spec.model, resolved.sizes))
        adapter = load_adapter(lora, resolved.spec, resolved.sizes, engine.parameters, trained, weights_digest)
    engine.optimizer.sync_master_weights(state_loaded=False)
    hashes = {_BASE: weights_digest} if is_base else {}
    if is_reference:
        hashes[_REFERENCE] = _reference_hash(config, resolved, weights_digest, adapter)
    return hashes, _base_of(weights, weights_digest) if is_base else {}


def _load_base(config: Config, resolved: ResolvedRun, engine: Engine) -> tuple[dict[str, str], dict[str, str]]:
    """Load the base model, if the run trains adapters. Return its hash, and its path and hash, like `_load_weights`."""
    if config.lora.rank is None:
        return {}, {}
    names = resolved.parameter_names
    weights = init_weights_from(config.checkpoint, resolved.spec, resolved.sizes, engine.parameters, names)
    weights_digest = weights.digest()
    return {_BASE: weights_digest}, _base_of(weights, weights_digest)


def _base_of(weights: WeightSource, weights_digest: str) -> dict[str, str]:
    return {"base": str(weights.folder.resolve()), "base_digest": weights_digest}


def _reference_hash(config: Config, resolved: ResolvedRun, weights_digest: str, adapter: str) -> str:
    """Return a hash of everything on which the log-probabilities of the initial model depend, except the layout. adapter: hash of
    the initial adapter, or ""."""
    lora, checkpoint, training = config.lora, config.checkpoint, config.training
    changes = [checkpoint.init_exclude, checkpoint.resize_embeddings, checkpoint.init_exclude and config.run.seed]
    adapted = adapter and [adapter, lora.scale, lora.dtype]
    precision = [training.compute_dtype, training.parameter_dtype]
    if lora.train_fully:
        precision += [lora.dtype, *lora.train_fully]
    content = [weights_digest, adapted, asdict(resolved.sizes), changes, precision]
    return digest(json.dumps(content, sort_keys=True).encode())


def _open_references(
    config: Config, sets: Sequence[tuple[Samples, int]], hashes: Mapping[str, str]
) -> list[ReferenceStore]:
    """Return the store of each dataset's log-probabilities, or [] if the loss has no reference."""
    if not config.preference.needs_reference:
        return []
    folder = Path(config.data.store_folder) / "references"
    return [ReferenceStore.open(folder, hashes[_REFERENCE], *of_set) for of_set in sets]

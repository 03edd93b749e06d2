"""What a new run loads: the weights of checkpoint.init_from, and the adapter of lora.init_from."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.spec import ModelSpec, meta_model, saved_weights
from trainer.adapters.nf4 import QuantizedWeight
from trainer.adapters.select import SCALE_SETTINGS
from trainer.base.config import CheckpointConfig, ConfigError, LoraConfig, errors_about
from trainer.base.config.checkpoints import resolve_checkpoint, why_chosen
from trainer.base.config.patterns import matching
from trainer.base.config.recognition import PEFT, require
from trainer.base.config.toml_text import toml_value
from trainer.base.system import console
from trainer.base.system.files import digest_of
from trainer.base.system.run_files import MANIFEST
from trainer.checkpoint import manifest
from trainer.checkpoint.commit import Tensors, require_match
from trainer.checkpoint.formats.adapter import Adapter
from trainer.checkpoint.formats.folders import open_complete
from trainer.checkpoint.formats.peft import PEFT_TENSORS, PeftNames, load_peft, peft_settings
from trainer.checkpoint.formats.weights import Weights
from trainer.checkpoint.manifest import CorruptError
from trainer.runtime.distributed import all_gather_objects, run_on_rank_0
from trainer.runtime.dtensor import local_region

_ROWS = 4096  # maximum number of rows read at once


# ---------------------------------------------------------------- weights


def names_loaded(config: CheckpointConfig, names: Collection[str]) -> set[str]:
    """Return the names of the parameters that a new run loads instead of initializing randomly. Raises ConfigError."""
    if not config.init_from:
        return set()
    key = "checkpoint.init_exclude"
    loaded = set(names).difference(matching(key, config.init_exclude, names, "parameter"))
    if not loaded:
        raise ConfigError(key, "excludes all parameters, so that nothing of [checkpoint] init_from is loaded")
    return loaded


def open_initial_weights(
    config: CheckpointConfig, spec: ModelSpec, sizes: Any, extension: Collection[str] = ()
) -> Weights:
    """Open checkpoint.init_from, collectively, and check that it has the weights, without loading them.

    Args:
        config: What is loaded.
        spec: Family of the run's model.
        sizes: Sizes of the run's model.
        extension: Names of the sizes that extend the context window of the initial model, and may differ from it.

    Raises:
        ConfigError: The folder is damaged, or contains a different model.
    """
    parameters = saved_weights(meta_model(spec.model, sizes))
    included = names_loaded(config, parameters)
    with errors_about("checkpoint.init_from"):
        # Only rank 0 resolves the folder, because the source run may still write newer checkpoints.
        folder = run_on_rank_0(lambda: resolve_checkpoint(Path(config.init_from)))
        weights = open_complete(folder, spec, averaged=config.init_averaged)
        _require_same_sizes(config, weights, sizes, extension)
        wanted = {name: p for name, p in parameters.items() if name in included}
        if config.resize_embeddings:
            wanted = {name: p for name, p in wanted.items() if not _is_smaller(weights, name, p)}
        require_match(folder, weights.index, wanted, cast=True)
    return weights


def _require_same_sizes(config: CheckpointConfig, weights: Weights, sizes: Any, extension: Collection[str]) -> None:
    stored = asdict(weights.sizes)
    if config.resize_embeddings and stored.get("vocab_size", 0) < sizes.vocab_size:
        stored["vocab_size"] = sizes.vocab_size
    differences = [
        f"{name} is {stored.get(name)}, expected {expected}"
        for name, expected in asdict(sizes).items()
        if stored.get(name) != expected
        # The run's sequence length decides, and [training] prediction_weight.
        and name not in ("rope_is_long", "prediction_layers", *extension)
    ]
    if differences:
        raise ConfigError("", f"{weights.folder} contains a different model: {', '.join(differences)}")


def load_initial_weights(
    config: CheckpointConfig,
    weights: Weights,
    parameters: Tensors,
    quantized: Mapping[str, QuantizedWeight],
    names: Collection[str],
) -> None:
    """Load this rank's parameters from checkpoint.init_from, collectively.

    Args:
        config: What is loaded.
        weights: Result of open_initial_weights.
        parameters: Those of this rank.
        quantized: Weights of this rank that are kept in 4 bits.
        names: Those of the complete model's parameters. Others, such as those of adapters, are not loaded.

    Raises:
        ConfigError: The weights are damaged.
    """
    included = names_loaded(config, names)
    with errors_about("checkpoint.init_from"):
        wanted = {name: p for name, p in parameters.items() if name in included}
        grown = _load_resized(weights, wanted) if config.resize_embeddings else set()
        weights.load_into({name: p for name, p in wanted.items() if name not in grown})
        weights.quantize_into(quantized)
    dist.barrier()


# ---------------------------------------------------------------- a larger vocabulary


def _is_smaller(weights: Weights, name: str, parameter: Tensor) -> bool:
    """Return whether a stored parameter lacks only rows of the vocabulary."""
    stored = weights.index.get(name)
    old, new = stored.shape if stored else (), tuple(parameter.shape)
    return old[:1] == (weights.sizes.vocab_size,) and old[1:] == new[1:] and old[0] < new[0]


def _load_resized(weights: Weights, parameters: Tensors) -> set[str]:
    """Load those parameters of this rank, collectively, that have more rows than the stored tensor, and return their names. The
    additional rows are set to the mean of the stored rows (Hewitt 2021, "Initializing New Word Embeddings")."""
    grown = {name for name, parameter in parameters.items() if _is_smaller(weights, name, parameter)}
    # Only rank 0 reads all rows, and all ranks ask for the mean: a rank may have no row, or no part of the parameter.
    for name in sorted(set().union(*all_gather_objects(grown))):
        mean = run_on_rank_0(partial(_mean_row, weights, name))
        if name in grown:
            with manifest.damage_as_config_error(weights.folder):
                _fill_rows(weights, name, parameters[name], mean)
    return grown


def _mean_row(weights: Weights, name: str) -> Tensor:
    """Return the mean of the rows of a stored parameter, fp64. Raises ConfigError."""
    stored = weights.index[name]
    num_rows, sums = stored.shape[0], torch.zeros(stored.shape[1:], dtype=torch.float64)
    with manifest.damage_as_config_error(weights.folder):
        for start in range(0, num_rows, _ROWS):
            sums += weights.rows(name, start, min(start + _ROWS, num_rows)).double().sum(0)
    return sums / num_rows


@torch.no_grad()
def _fill_rows(weights: Weights, name: str, parameter: Tensor, mean: Tensor) -> None:
    """Load this rank's rows of a parameter. mean: value of those that are not stored."""
    local, (rows, *columns) = local_region(parameter)
    num_stored = weights.index[name].shape[0]
    stop = min(rows.stop, num_stored)
    if rows.start < stop:
        weights.read(name, (slice(rows.start, stop), *columns), local[: stop - rows.start])
    local[max(0, num_stored - rows.start) :].copy_(mean[tuple(columns)].to(local.dtype))


# ---------------------------------------------------------------- an adapter


def load_adapter(
    config: LoraConfig, spec: ModelSpec, sizes: Any, parameters: Tensors, trained: Tensors, base_digest: str
) -> str:
    """Load this rank's trained parameters from lora.init_from, collectively, and return a hash of the source.

    Args:
        config: What is loaded.
        spec: Family of the run's model.
        sizes: Sizes of the run's model.
        parameters: Those of this rank.
        trained: The complete model's trained parameters.
        base_digest: Hash of the base model's weights.

    Raises:
        ConfigError: The source is damaged, or contains another adapter.
    """
    own = {name: p for name, p in parameters.items() if name in trained}
    folder = named = Path(config.init_from)
    try:
        folder = run_on_rank_0(partial(resolve_checkpoint, folder))
        if require(folder, "adapter") == PEFT:
            _require_settings(config, peft_settings(folder), folder)
            load_peft(folder, PeftNames(spec, sizes), own, trained)
            source, other_base = folder / PEFT_TENSORS, ""
        else:
            source, other_base = folder / MANIFEST, _load_own_adapter(config, folder, own, trained, base_digest)
    except CorruptError as damage:
        raise ConfigError("lora.init_from", f"{folder}: {damage}") from None
    except ConfigError as error:
        raise error if error.key else ConfigError("lora.init_from", error.message) from None
    why = run_on_rank_0(lambda: why_chosen(named, folder))
    console.info(f"loaded the adapter {folder}{f' ({why})' if why else ''}{other_base}")
    return run_on_rank_0(partial(digest_of, source))


def _load_own_adapter(config: LoraConfig, folder: Path, own: Tensors, trained: Tensors, base_digest: str) -> str:
    """Load an adapter from a checkpoint of a run, and return a remark if its base model had another dtype. Arguments: as in
    load_adapter, and this rank's trained parameters. Raises CorruptError or ConfigError."""
    adapter = Adapter.open(folder)
    if adapter.base_digest != base_digest:
        raise ConfigError("", f"{folder} was trained with another base model, {adapter.base}")
    _require_settings(config, {name: getattr(adapter.config, name) for name in SCALE_SETTINGS}, folder)
    unknown = [f"{name} is not trained by this run" for name in adapter.weights.index if name not in trained]
    adapter.weights.load_into(own, problems=unknown)
    if adapter.base_format == config.base_format:
        return ""
    return f", which was trained with [lora] base_dtype = {adapter.base_format}, not {config.base_format}"


def _require_settings(config: LoraConfig, saved: Mapping[str, Any], folder: Path) -> None:
    for name, value in saved.items():
        if getattr(config, name) != value:
            raise ConfigError(f"lora.{name}", f"must be {toml_value(value)}, as in the adapter {folder}")

"""Models in folders of any format: which maker opens the weights, and what the folder says about the model."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from models.spec import ModelSpec
from trainer.base.config import ConfigError
from trainer.base.config.checkpoints import resolve_checkpoint
from trainer.base.config.recognition import MODEL, is_adapter, pointer_problem, require
from trainer.base.config.remote_paths import local_path_of
from trainer.base.system.paths import split_best
from trainer.base.system.spelling import similar_path
from trainer.checkpoint import manifest
from trainer.checkpoint.formats.adapter import Adapter, MergedWeights
from trainer.checkpoint.formats.huggingface import HuggingFaceWeights
from trainer.checkpoint.formats.huggingface_files import family_of, read_config, read_object
from trainer.checkpoint.formats.model_metadata import GENERATION_CONFIG, ModelMetadata
from trainer.checkpoint.formats.native import CheckpointWeights
from trainer.checkpoint.formats.weights import Weights
from trainer.runtime.distributed import run_on_rank_0


def open_complete(folder: Path, spec: ModelSpec | None = None, alone: bool = False, averaged: bool = False) -> Weights:
    """Open a complete model, collectively unless only this rank opens it.

    Args:
        folder: Checkpoint, or model in Hugging Face's format.
        spec: Expected family of a model in Hugging Face's format, or None for any family.
        alone: Whether only this rank opens the folder.
        averaged: Whether to read the averages of the run ([optimizer] ema_decay) instead of its last weights.

    Raises:
        ConfigError: The folder is damaged, or contains no such weights.
    """
    if require(folder, "model") != MODEL:
        return CheckpointWeights.open(folder, alone, averaged)
    if averaged:
        raise ConfigError("", f"{folder} contains no averaged weights: it is no checkpoint of a run")
    return HuggingFaceWeights.open(folder, spec, alone)


def open_weights(
    folder: Path,
    base: Path | None = None,
    alone: bool = False,
    averaged: bool = False,
    into_quantized: bool = False,
) -> Weights:
    """Open a model, collectively unless only this rank opens it. An adapter is merged into its base model.

    Args:
        folder: Checkpoint, or model in Hugging Face's format.
        base: Folder of the base model, if the checkpoint contains an adapter and the base has moved.
        alone: Whether only this rank opens the model.
        averaged: Whether to read the averages of the run instead of its last weights.
        into_quantized: Whether the adapter is merged into the quantized base model with which it was trained, instead of the
            original one. See MergedWeights.of.

    Raises:
        ConfigError: The folder contains no model that can be read, or the base is not that of the adapter.
    """
    if not is_adapter(folder):
        if base is not None:
            raise ConfigError("", f"--base {base} has no effect, because {folder} contains no adapter")
        return open_complete(folder, alone=alone, averaged=averaged)
    with manifest.damage_as_config_error(folder):
        adapter = Adapter.open(folder, alone, averaged)
    return MergedWeights.of(adapter, _open_base(adapter, str(base or adapter.base)), into_quantized)


def _open_base(adapter: Adapter, path: str) -> Weights:
    """Open the base model of an adapter. path: of the model, or of the run that trained it, or its URL. Raises ConfigError."""
    folder = Path(local_path_of(path))
    if not split_best(folder)[0].is_dir():
        raise ConfigError("", f"{adapter.folder} needs its base model, but {folder} does not exist; use --base PATH")
    alone = adapter.weights.alone
    folder = resolve_checkpoint(folder) if alone else run_on_rank_0(partial(resolve_checkpoint, folder))
    try:
        base = open_complete(folder, adapter.weights.spec, alone)
    except ConfigError as error:
        raise ConfigError("", f"{adapter.folder} needs its base model: {error.message}; use --base PATH") from None
    if base.digest() != adapter.base_digest:
        message = f"{folder} is not the base model with which {adapter.folder} was trained; use --base PATH"
        raise ConfigError("", message)
    return base


def metadata_and_generation(folder: Path) -> tuple[ModelMetadata, dict[str, Any]]:
    """Return what a checkpoint, or a Hugging Face folder, says about its model, and its generation_config.json. If that file is
    missing or names no eos_token_id or pad_token_id, the model's configuration does. Raises ConfigError."""
    with manifest.damage_as_config_error(folder):
        file = folder / GENERATION_CONFIG
        generation = read_object(file) if file.exists() else {}
        model = _read_metadata(folder)
        missing = [key for key in ("eos_token_id", "pad_token_id") if generation.get(key) is None]
        ids = {key: id_ for key in missing if (id_ := model.special_token_ids.get(key)) is not None}
        return model, generation | ids


def _read_metadata(folder: Path) -> ModelMetadata:
    """Return what a folder says about its model. Raises CorruptError or ConfigError."""
    if require(folder, "dimensions") != MODEL:
        return ModelMetadata.read(folder)
    return read_config(folder / "config.json").metadata(folder)


def read_architecture(path: Path) -> tuple[str, Any]:
    """Return the name of the family and the sizes of a model. path: of a checkpoint, of a folder in Hugging Face's format, or of
    its config.json. Raises ConfigError."""
    if not path.exists():
        raise ConfigError("", f"no such file or folder{similar_path(path)}")
    if path.is_dir() and require(path, "dimensions") != MODEL:
        with manifest.damage_as_config_error(path):
            metadata = ModelMetadata.read(path)
            return metadata.family, metadata.spec_and_sizes()[1]
    # The user may name a link to a file, but the files of a folder may not be links out of it.
    file = path / "config.json" if path.is_dir() else Path(os.path.realpath(path))
    if problem := pointer_problem(file):
        raise ConfigError("", problem)
    model = read_config(file)
    return family_of(model.spec, model.sizes), model.sizes

"""Writing of models as checkpoints of this project, which contain nothing else."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from models.huggingface_tensors import is_permuted
from trainer.base.config import ConfigError
from trainer.base.system.files import atomic_folder
from trainer.base.system.run_files import MANIFEST, MODEL_FILE
from trainer.checkpoint import manifest
from trainer.checkpoint.formats.model_metadata import GENERATION_CONFIG
from trainer.checkpoint.formats.streaming import (
    SHARD_BYTES,
    Progress,
    group_by_file,
    ignore_progress,
    layer_order,
    read_in_chunks,
)
from trainer.checkpoint.formats.weights import Weights
from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.tensor_files import INDEX, Chunk, TensorMetadata, TensorWrite, index_text, write_safetensors


def require_outside_checkpoint(path: Path) -> None:
    """Raise ConfigError if the path is inside a checkpoint."""
    for outer in Path(os.path.realpath(path)).parents:
        if (outer / MANIFEST).exists() and (outer / INDEX).exists():
            message = f"{path} is inside the checkpoint {outer}, which new files would damage; choose another path"
            raise ConfigError("", message)


def require_new_folder(folder: Path) -> None:
    """Raise ConfigError if the folder exists and is not empty, or if it is inside a checkpoint."""
    require_outside_checkpoint(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("", f"{folder} exists and is not an empty folder; choose another path")


def write_checkpoint(
    weights: Weights, out: Path, shard_bytes: int = SHARD_BYTES, progress: Progress = ignore_progress
) -> None:
    """Write a model and its tokenizer as a checkpoint. Weights keep their stored precision.

    Args:
        weights: The model.
        out: Folder that is written or replaced.
        shard_bytes: Maximum size of a file with weights.
        progress: Receives the bytes of each chunk.

    Raises:
        ConfigError: A file of the tokenizer cannot be read.
    """
    hf, entries = weights.spec.huggingface, []
    for name in sorted(weights.index, key=layer_order):
        dtype, shape = weights.index[name].dtype, weights.index[name].shape
        group = weights.sizes.head_dim if is_permuted(hf, name) else 1
        pieces = partial(read_in_chunks, partial(weights.rows, name), shape, dtype, group, progress)
        entries.append(TensorWrite(f"model/{name}", dtype, shape, pieces))
    carried = [GENERATION_CONFIG] if (weights.folder / GENERATION_CONFIG).exists() else []
    with manifest.damage_as_config_error(weights.folder):
        contents = {name: weights.content(name) for name in (*weights.model.tokenizer_files, *carried)}
    contents = {MODEL_FILE: weights.model.text().encode(), **contents}
    write_tensors(out, entries, contents, shard_bytes, str(weights.folder))


def write_tensors(
    out: Path, entries: list[TensorWrite], contents: Mapping[str, bytes], shard_bytes: int, origin: str
) -> None:
    """Write a checkpoint that contains only a model. Replaces `out`.

    Args:
        out: Folder of the checkpoint.
        entries: The model's parameters.
        contents: Name -> content of the other files, among them model.json.
        shard_bytes: Maximum size of a file with parameters.
        origin: From where the model was read.
    """
    with atomic_folder(out) as unfinished:
        files, stored = {}, {}
        for i, group in enumerate(group_by_file(entries, shard_bytes)):
            file = f"model-{i:05d}.safetensors"
            files[file] = write_safetensors(unfinished / file, group, {})
            stored |= {
                e.name: TensorMetadata(e.dtype, e.shape, (Chunk(file, (0,) * len(e.shape), e.shape),)) for e in group
            }
        for name, content in {INDEX: index_text(stored).encode(), **contents}.items():
            files[name] = manifest.write_file(unfinished / name, content)
        manifest.write(unfinished, Manifest(files, {"from": origin}))

"""Writing of complete models, which are streamed in chunks of rows: memory use does not grow with the size of the model."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from trainer.base.config import ConfigError
from trainer.base.system.checkpoint_folder import MODEL_FILE
from trainer.base.system.files import atomic_folder, digest_of
from trainer.checkpoint import manifest
from trainer.checkpoint.formats.huggingface import HfModelFolder
from trainer.checkpoint.formats.model_metadata import GENERATION_CONFIG, ModelMetadata
from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.storage import INDEX, Chunk, TensorMetadata, TensorWrite, index_text, write_safetensors
from trainer.data.tokenizer.huggingface import COMPANION_FILES

_TOKENIZER_FILES = ("tokenizer.json", "tekken.json", *COMPANION_FILES)
_CHUNK_BYTES = 2**25
Progress = Callable[[int], None]
"""Callback that receives the number of bytes written since the previous call."""


def read_in_chunks(
    read: Callable[[int, int], Tensor], shape: tuple[int, ...], dtype: torch.dtype, group: int, progress: Progress
) -> Iterator[Tensor]:
    """Yield a tensor in chunks of rows, of about _CHUNK_BYTES.

    Args:
        read: Function that returns rows [start, stop).
        shape: Of the tensor.
        dtype: Of the chunks.
        group: Number of rows that one chunk must contain together: head_dim, if rows of a head are permuted.
        progress: Receives the bytes of each chunk.
    """
    row_bytes = max(1, torch.Size(shape[1:]).numel() * dtype.itemsize)
    num_rows = max(1, _CHUNK_BYTES // row_bytes // group) * group
    for start in range(0, shape[0], num_rows):
        chunk = read(start, min(start + num_rows, shape[0])).to(dtype)
        yield chunk
        progress(chunk.numel() * dtype.itemsize)


def group_by_file(entries: list[TensorWrite], max_bytes: int) -> list[list[TensorWrite]]:
    """Group tensors, in order, into files of at most max_bytes each. A tensor larger than max_bytes gets its own file."""
    groups: list[list[TensorWrite]] = [[]]
    for entry in entries:
        if groups[-1] and sum(e.num_bytes for e in groups[-1]) + entry.num_bytes > max_bytes:
            groups.append([])
        groups[-1].append(entry)
    return groups


def export_metadata(checkpoint: Path, averaged: bool) -> dict[str, str]:
    """Return the metadata of the safetensors files in an export of a checkpoint. They identify the checkpoint, and say whether
    its averaged weights were exported. Raises OSError."""
    metadata = {"format": "pt", "meshwright_checkpoint": digest_of(checkpoint / manifest.NAME)}
    return metadata | {"meshwright_weights": "averaged"} if averaged else metadata


def layer_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that places layer 10 after layer 9."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]


def require_new_folder(folder: Path) -> None:
    """Raise ConfigError if the folder exists and is not empty, or if it is inside a checkpoint."""
    for outer in Path(os.path.realpath(folder)).parents:
        if (outer / manifest.NAME).exists() and (outer / INDEX).exists():
            message = f"{folder} is inside the checkpoint {outer}, which new files would damage; choose another path"
            raise ConfigError("", message)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("", f"{folder} exists and is not an empty folder; choose another path")


def import_folder(folder: HfModelFolder, family: str, out: Path, shard_bytes: int, progress: Progress) -> None:
    """Write the model and tokenizer of a Hugging Face folder as a checkpoint. Weights keep their stored precision. Replaces
    `out`."""
    entries = []
    for name in sorted(folder.index, key=layer_order):
        dtype, shape, read = folder.index[name].dtype, folder.index[name].shape, partial(folder.rows, name)
        group = folder.sizes.head_dim if folder.spec.huggingface.is_permuted(name) else 1
        pieces = partial(read_in_chunks, read, shape, dtype, group, progress)
        entries.append(TensorWrite(f"model/{name}", dtype, shape, pieces))
    tokenizer_files = [name for name in _TOKENIZER_FILES if (folder.folder / name).exists()]
    ids = {key: folder.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in folder.config}
    sizes, seq_len = asdict(folder.sizes), folder.seq_len
    model = ModelMetadata(family, sizes, seq_len, seq_len, "", tuple(tokenizer_files), ids, {}, ())
    carried = [GENERATION_CONFIG] * (folder.folder / GENERATION_CONFIG).exists()
    contents = {name: folder.content(name) for name in (*tokenizer_files, *carried)}
    write_model(out, entries, {MODEL_FILE: model.text().encode(), **contents}, shard_bytes, str(folder.folder))


def write_model(
    out: Path, entries: list[TensorWrite], contents: Mapping[str, bytes], shard_bytes: int, origin: str
) -> None:
    """Write a checkpoint that contains only a model. Replaces `out`.

    Args:
        entries: the model's parameters.
        contents: name -> content of the other files, among them model.json.
        shard_bytes: maximum size of a file with parameters.
        origin: from where the model was read.
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

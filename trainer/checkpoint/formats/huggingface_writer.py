"""Writing of models in Hugging Face's format."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.huggingface_config import write_config
from models.huggingface_tensors import (
    by_expert,
    by_matrix,
    is_permuted,
    name_in_files,
    prediction_copies,
    reorder_rows,
    stack_of,
    stacked_matrix,
    stored_shape,
    stored_tensors,
)
from models.spec import meta_model, saved_buffers, saved_weights
from trainer.base.system.files import atomic_folder
from trainer.checkpoint.formats.model_metadata import GENERATION_CONFIG
from trainer.checkpoint.formats.streaming import (
    SHARD_BYTES,
    Progress,
    group_by_file,
    ignore_progress,
    layer_order,
    read_in_chunks,
)
from trainer.checkpoint.formats.tokenizer_files import exported_files
from trainer.checkpoint.formats.weights import Weights
from trainer.checkpoint.tensor_files import TensorWrite, write_safetensors


def write_huggingface(
    weights: Weights,
    out: Path,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = ignore_progress,
) -> None:
    """Write the model and the tokenizer of a checkpoint.

    Args:
        weights: The model. An adapter is merged into it.
        out: Folder that is written or replaced.
        dtype: Of the written weights. Buffers keep their own.
        shard_bytes: Maximum size of a safetensors file.
        progress: Receives the bytes of each chunk; in total `exported_bytes`.

    Raises:
        ConfigError: A file of the tokenizer is damaged.
        CorruptError: A file with weights is damaged.
    """
    files, model = exported_files(weights), weights.model
    with atomic_folder(out) as folder:
        _write_weights(folder, _Tensors(weights, dtype, progress).entries(), shard_bytes, weights.origin())
        config = {**model.other_config, **write_config(weights.spec.huggingface, weights.sizes, model.context_window)}
        # transformers' default pad_token_id may exceed the vocabulary.
        config |= {"torch_dtype": str(dtype).removeprefix("torch."), "pad_token_id": None}
        config |= model.special_token_ids
        _write_json(folder / "config.json", config)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        if GENERATION_CONFIG not in files:
            _write_json(folder / GENERATION_CONFIG, model.special_token_ids)


def exported_bytes(weights: Weights, dtype: torch.dtype) -> int:
    """Return how many bytes of weights `write_huggingface` writes."""
    return sum(entry.num_bytes for entry in _Tensors(weights, dtype, ignore_progress).entries())


def _write_weights(folder: Path, entries: list[TensorWrite], shard_bytes: int, metadata: Mapping[str, str]) -> None:
    groups, weight_map = group_by_file(entries, shard_bytes), {}
    for i, group in enumerate(groups, start=1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        write_safetensors(folder / file, group, metadata)
        weight_map |= {entry.name: file for entry in group}
    if len(groups) > 1:
        text = {"metadata": {"total_size": sum(e.num_bytes for e in entries)}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", text)


@dataclass(frozen=True)
class _Tensors:
    """The tensors of an export."""

    weights: Weights
    dtype: torch.dtype
    progress: Progress

    def entries(self) -> list[TensorWrite]:
        """Return the tensors in the order of the layers. They are read when they are written."""
        hf, parameters = self.weights.spec.huggingface, sorted(self.weights.index, key=layer_order)
        values = saved_weights(meta_model(self.weights.spec.model, self.weights.sizes))
        stored = stored_tensors(hf, by_matrix(hf, {name: values[name] for name in parameters}))
        entries = []
        for stored_name, matrices in stored.items():
            name = name_in_files(hf, self.weights.sizes, stored_name)
            is_stack = stack_of(hf, matrices[0]) is not None
            entries.append(self._stack(name, by_expert(matrices)) if is_stack else self._entry(name, matrices))
        tied = {"output.weight": "tok_embeddings.weight"} if self.weights.sizes.tied_embeddings else {}
        for copy, module in prediction_copies(hf, self.weights.sizes).items():
            original = f"{module}.weight"
            entries.append(self._entry(f"{copy}.weight", [tied.get(original, original)]))
        return entries

    def _entry(self, name: str, matrices: Sequence[str]) -> TensorWrite:
        """Return the tensor that contains the rows of these matrices, see HuggingFace.name. name: of the tensor."""
        hf, head_dim = self.weights.spec.huggingface, self.weights.sizes.head_dim
        buffer = self._buffers.get(matrices[0])
        dtype = self.dtype if buffer is None else buffer.dtype
        shapes = [self._shape(matrix) for matrix in matrices]

        def read(matrix: str, start: int, stop: int) -> Tensor:
            return reorder_rows(hf, matrix, self.weights.rows(matrix, start, stop), head_dim)

        def pieces() -> Iterator[Tensor]:
            for matrix, shape in zip(matrices, shapes, strict=True):
                group = head_dim if is_permuted(hf, matrix) else 1
                yield from read_in_chunks(partial(read, matrix), shape, dtype, group, self.progress)

        shape = stored_shape(hf, matrices[0], (sum(shape[0] for shape in shapes), *shapes[0][1:]))
        return TensorWrite(name, dtype, shape, pieces)

    def _stack(self, name: str, experts: Sequence[Sequence[str]]) -> TensorWrite:
        """Return a stored stack, which is written by expert. experts: names of the matrices of each expert."""
        hf = self.weights.spec.huggingface

        def pieces() -> Iterator[Tensor]:
            for matrices in experts:
                rows = {matrix: self.weights.rows(matrix) for matrix in matrices}
                piece = stacked_matrix(hf, rows).to(self.dtype)
                yield piece
                self.progress(piece.numel() * self.dtype.itemsize)

        empty = {matrix: torch.empty(self._shape(matrix), device="meta") for matrix in experts[0]}
        return TensorWrite(name, self.dtype, (len(experts), *stacked_matrix(hf, empty).shape), pieces)

    @cached_property
    def _buffers(self) -> Mapping[str, Tensor]:
        return saved_buffers(meta_model(self.weights.spec.model, self.weights.sizes))

    def _shape(self, matrix: str) -> tuple[int, ...]:
        parameter, _, expert = matrix.partition("@")
        shape = self.weights.index[parameter].shape
        return shape[1:] if expert else shape


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")

"""Writing of models in GGUF, the format of llama.cpp."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from models.gguf import (
    Gguf,
    HeadRows,
    architecture_keys,
    frequency_tensors,
    is_permuted,
    module_in_block,
    problems,
    remarks,
    rows_of,
)
from models.spec import ModelSpec
from trainer.base.config import ConfigError
from trainer.base.config.packages import require_package
from trainer.base.config.recognition import is_checkpoint
from trainer.base.system.files import atomic_path
from trainer.checkpoint.formats.gguf_tokenizer import Vocabulary, vocabulary
from trainer.checkpoint.formats.streaming import Progress, ignore_progress, layer_order, read_in_chunks
from trainer.checkpoint.formats.tokenizer_files import files_of_tokenizer, load_model_tokenizer
from trainer.checkpoint.formats.weights import Weights, checkpoint_origin
from trainer.data.tokenizer.protocol import Tokenizer

_CHUNK = 2**21
"""Number of values that are quantized at once. The package needs up to 100 bytes for each."""
_ORIGIN = ("meshwright_checkpoint", "meshwright_weights")
"""Keys of Weights.origin that a file contains."""
_ALWAYS_F32 = ("_norm.weight", "ffn_gate_inp.weight", ".bias", "rope_freqs.weight")
"""Ends of the names of tensors that llama.cpp expects in F32, as it expects all vectors."""


def llama_cpp_vocabulary(
    spec: ModelSpec, sizes: Any, tokenizer: Tokenizer, files: Mapping[str, bytes], ids: Mapping[str, Any]
) -> Vocabulary:
    """Return the tokenizer for llama.cpp, with all remarks about the model.

    Args:
        spec: Family of the model.
        sizes: Sizes of the model.
        tokenizer: Of the model.
        files: Those of an export in Hugging Face's format.
        ids: Ids of special tokens, as in config.json.

    Raises:
        ConfigError: llama.cpp would compute another model, or encode text differently.
    """
    require_package("gguf", "")
    if found := next(problems(spec.gguf, sizes), None):
        raise ConfigError("", f"the model cannot be written for llama.cpp: {found}")
    tokens = vocabulary(files, tokenizer, sizes.vocab_size, ids)
    return replace(tokens, remarks=(*remarks(spec.gguf, sizes), *tokens.remarks))


@dataclass(frozen=True, kw_only=True)
class GgufExport:
    """A model that llama.cpp can compute."""

    weights: Weights
    type: str
    """A GgufType."""
    vocabulary: Vocabulary

    @classmethod
    def of(cls, weights: Weights, type: str) -> "GgufExport":
        """Check a model. type: a GgufType. Raises ConfigError if llama.cpp would compute or encode something else."""
        tokenizer = load_model_tokenizer(weights)
        files, ids = files_of_tokenizer(weights, tokenizer), weights.model.special_token_ids
        tokens = llama_cpp_vocabulary(weights.spec, weights.sizes, tokenizer, files, ids)
        return cls(weights=weights.without_prediction(), type=type, vocabulary=tokens)

    def write(self, out: Path, name: str = "", progress: Progress = ignore_progress) -> None:
        """Write the model to a file, which is written or replaced.

        Args:
            out: Path of the file.
            name: Of the model (default: that of the file).
            progress: Receives the bytes of each chunk in fp32; in total `num_bytes`.

        Raises:
            CorruptError: A file with weights is damaged.
        """
        package, architecture = require_package("gguf", ""), self.weights.spec.gguf.architecture
        writer, tensors = package.GGUFWriter(None, architecture), self._tensors(package, progress)
        for tensor in tensors:
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.type
            )
        own = architecture_keys(self.weights.spec.gguf, self.weights.sizes, self.weights.model.context_window)
        size_label = package.size_label(*writer.get_total_parameter_count())
        keys = self._general_keys(package, tensors) | {
            "general.name": name or out.stem,
            "general.size_label": size_label,
        }
        keys |= {f"{architecture}.{key}": value for key, value in own.items()}
        keys |= {f"tokenizer.{key}": value for key, value in self.vocabulary.keys.items()}
        for key, value in keys.items():
            _add(writer, key, value)
        with atomic_path(out) as path, closing(writer):
            writer.write_header_to_file(path)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors:
                writer.write_tensor_data(tensor)

    def num_bytes(self) -> int:
        """Return the total that `progress` receives."""
        index, writes_twice = (
            self.weights.index,
            self.weights.spec.gguf.writes_tied and self.weights.sizes.tied_embeddings,
        )
        read = [*index.values(), *([index["tok_embeddings.weight"]] if writes_twice else [])]
        return sum(4 * math.prod(tensor.shape) for tensor in read)

    def _general_keys(self, package: ModuleType, tensors: "list[_Tensor]") -> dict[str, Any]:
        types = package.LlamaFileType
        file_type = types.ALL_F32 if self.type == "f32" else types[f"MOSTLY_{self.type.upper()}"]
        if any(tensor.type == package.GGMLQuantizationType.MXFP4 for tensor in tensors):
            file_type = types.MOSTLY_MXFP4_MOE
        keys = {"general.type": "model", "general.file_type": int(file_type)}
        if is_checkpoint(self.weights.folder):
            keys |= {f"general.{key}": value for key, value in self.weights.origin().items() if key in _ORIGIN}
        return keys | {"general.quantization_version": package.GGML_QUANT_VERSION}

    def _tensors(self, package: ModuleType, progress: Progress) -> "list[_Tensor]":
        """Return the tensors in the order of the layers."""
        types, entries = package.GGMLQuantizationType, _Reader(self.weights, progress).entries()
        has_output = any(entry.name == "output.weight" for entry in entries)
        tensors = []
        for entry in entries:
            type_ = types[self.type.upper()]
            if self.type == "q4_0" and entry.name == ("output.weight" if has_output else "token_embd.weight"):
                type_ = types.Q8_0  # its errors would change all logits
            if entry.parameters and all(map(self.weights.is_mxfp4, entry.parameters)):
                type_ = types.MXFP4
            elif len(entry.shape) == 1 or entry.name.endswith(_ALWAYS_F32):
                type_ = types.F32
            elif entry.shape[-1] % package.GGML_QUANT_SIZES[type_][0]:
                type_ = types.F16  # as in llama.cpp's converter
            tensors.append(_Tensor(entry.name, entry.shape, entry.pieces, type_, package))
        return tensors


@dataclass(frozen=True)
class _Tensor:
    """A tensor to write, in place of an array. It is read when it is written, in pieces."""

    name: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]
    type: Any
    """A gguf.GGMLQuantizationType."""
    package: ModuleType

    @property
    def nbytes(self) -> int:
        block, num_bytes = self.package.GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * num_bytes

    def tofile(self, file: BinaryIO) -> None:
        for piece in self.pieces():
            rows = piece.reshape(-1, self.shape[-1])
            for part in rows.split(max(1, _CHUNK // self.shape[-1])):
                values = np.ascontiguousarray(self.package.quantize(part.numpy(), self.type))
                file.write(memoryview(values).cast("B"))


def is_gguf_of(file: Path, checkpoint: Path, averaged: bool) -> bool:
    """Return whether a file was written from this checkpoint. averaged: from its averaged weights."""
    try:
        fields = require_package("gguf", "").GGUFReader(file).fields
    except (OSError, ValueError, IndexError):
        return False
    origin = {key: field.contents() for key in _ORIGIN if (field := fields.get(f"general.{key}")) is not None}
    return origin == {key: v for key, v in checkpoint_origin(checkpoint, averaged).items() if key in _ORIGIN}


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a key with the type that llama.cpp expects for such a value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@dataclass(frozen=True)
class _Entry:
    """A tensor in the order of llama.cpp."""

    name: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]
    """Function that yields the content in row-major order, fp32."""
    parameters: Sequence[str] = ()
    """Those whose rows it contains."""


@dataclass(frozen=True)
class _Reader:
    """Reads the weights in the order of llama.cpp."""

    weights: Weights
    progress: Progress

    def entries(self) -> list[_Entry]:
        gguf: Gguf = self.weights.spec.gguf
        joined: dict[str, list[str]] = {}
        entries = []
        for parameter in sorted(self.weights.index, key=layer_order):
            if parts := gguf.head_rows.get(module_in_block(parameter)):
                entries += [self._heads(parameter, part) for part in parts]
            else:
                joined.setdefault(gguf.tensor_name(parameter), []).append(parameter)
        order = {module: i for i, module in enumerate(gguf.names)}
        for name, parameters in joined.items():
            in_order = sorted(parameters, key=lambda parameter: order.get(module_in_block(parameter), 0))
            entries.append(self._joined(name, in_order))
        if gguf.writes_tied and self.weights.sizes.tied_embeddings:
            entries.append(self._joined("output.weight", ["tok_embeddings.weight"]))
        for name, values in frequency_tensors(self.weights.sizes).items():
            entries.append(_Entry(name, tuple(values.shape), partial(iter, (values,))))
        return entries

    def _joined(self, name: str, parameters: Sequence[str]) -> _Entry:
        """Return a tensor that contains the rows of these parameters."""
        gguf, head_dim = self.weights.spec.gguf, self.weights.sizes.head_dim
        is_paired = self.weights.spec.huggingface.is_paired
        shapes = [self.weights.index[parameter].shape for parameter in parameters]

        def read(parameter: str, start: int, stop: int) -> Tensor:
            return rows_of(gguf, is_paired, parameter, self.weights.rows(parameter, start, stop).float(), head_dim)

        def pieces() -> Iterator[Tensor]:
            for parameter, shape in zip(parameters, shapes, strict=True):
                group = head_dim if is_permuted(gguf, is_paired, parameter) else 1
                yield from read_in_chunks(partial(read, parameter), shape, torch.float32, group, self.progress)

        return _Entry(name, (sum(shape[0] for shape in shapes), *shapes[0][1:]), pieces, parameters)

    def _heads(self, parameter: str, part: HeadRows) -> _Entry:
        """Return a tensor that contains the same rows of each head."""
        sizes, (num_rows, columns) = self.weights.sizes, self.weights.index[parameter].shape
        height = num_rows // sizes.n_heads
        own = range(height)[part.rows(sizes)]

        def read(start: int, stop: int) -> Tensor:
            rows = self.weights.rows(parameter, start * height, stop * height).float()
            heads = rows.unflatten(0, (-1, height))[:, own.start : own.stop]
            return (heads.mT if part.transposed else heads).contiguous()

        shape = (sizes.n_heads, *((columns, len(own)) if part.transposed else (len(own), columns)))
        pieces = partial(read_in_chunks, read, shape, torch.float32, 1, self.progress)
        return _Entry(f"blk.{parameter.split('.')[1]}.{part.name}.weight", shape, pieces)

"""Writing of models in GGUF, the format of llama.cpp."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from models.gguf import Gguf, HeadRows, architecture_keys, frequency_tensors, is_permuted, problems, remarks, rows_of
from trainer.base.config import ConfigError
from trainer.base.config.packages import require_package
from trainer.base.system.files import atomic_path
from trainer.checkpoint.formats.gguf_tokenizer import Vocabulary, vocabulary
from trainer.checkpoint.formats.streaming import Progress, ignore_progress, layer_order, read_in_chunks
from trainer.checkpoint.formats.tokenizer_files import files_of_tokenizer, load_model_tokenizer
from trainer.checkpoint.formats.weights import Weights

_ALWAYS_F32 = ("_norm.weight", "ffn_gate_inp.weight", ".bias", "rope_freqs.weight")
"""Ends of the names of tensors that llama.cpp expects in F32, as it expects all vectors."""


@dataclass(frozen=True, kw_only=True)
class GgufExport:
    """A model that llama.cpp can compute."""

    weights: Weights
    type: str
    """A GgufType."""
    vocabulary: Vocabulary
    remarks: tuple[str, ...]
    """What llama.cpp does a little differently."""

    @classmethod
    def of(cls, weights: Weights, type: str) -> "GgufExport":
        """Check a model. type: a GgufType. Raises ConfigError if llama.cpp would compute or encode something else."""
        require_package("gguf", "")
        gguf, sizes = weights.spec.gguf, weights.sizes
        if found := next(problems(gguf, sizes), None):
            raise ConfigError("", f"{weights.folder} cannot be written for llama.cpp: {found}")
        tokenizer = load_model_tokenizer(weights)
        files, ends = files_of_tokenizer(weights, tokenizer), weights.model.special_token_ids
        tokens = vocabulary(files, tokenizer, sizes.vocab_size, ends)
        return cls(weights=weights, type=type, vocabulary=tokens, remarks=(*remarks(gguf, sizes), *tokens.remarks))

    def tensors(self, progress: Progress = ignore_progress) -> "list[GgufTensor]":
        """Return the tensors in the order of the layers. They are read when they are written. progress: receives the bytes of
        each chunk, in fp32."""
        package, reader = require_package("gguf", ""), _Reader(self.weights, progress)
        types = package.GGMLQuantizationType
        wanted = {"f32": types.F32, "f16": types.F16, "bf16": types.BF16, "q8_0": types.Q8_0, "q4_0": types.Q4_0}
        entries = reader.entries()
        is_tied = "output.weight" not in (name for name, _, _ in entries)
        tensors = []
        for name, shape, pieces in entries:
            type_ = wanted[self.type]
            is_output = name == "output.weight" or (name == "token_embd.weight" and is_tied)
            if self.type == "q4_0" and is_output:
                type_ = types.Q8_0
            if shape[-1] % package.GGML_QUANT_SIZES[type_][0]:
                type_ = types.F16
            if len(shape) == 1 or name.endswith(_ALWAYS_F32):
                type_ = types.F32
            tensors.append(GgufTensor(name, shape, type_, pieces))
        return tensors

    def num_bytes(self) -> int:
        """Return the total that `progress` receives."""
        return sum(4 * int(np.prod(tensor.shape)) for tensor in self.tensors())


@dataclass(frozen=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]
    type: Any
    """A gguf.GGMLQuantizationType."""
    pieces: Callable[[], Iterator[Tensor]]
    """Function that yields the content in row-major order, fp32."""


def write_gguf(export: GgufExport, out: Path, progress: Progress = ignore_progress) -> None:
    """Write a model to a file, which is written or replaced.

    Args:
        export: The model.
        out: Path of the file.
        progress: See GgufExport.tensors.

    Raises:
        CorruptError: A file with weights is damaged.
    """
    package = require_package("gguf", "")
    weights, gguf = export.weights, export.weights.spec.gguf
    writer = package.GGUFWriter(None, gguf.architecture)
    tensors = export.tensors(progress)
    for tensor in tensors:
        block, block_bytes = package.GGML_QUANT_SIZES[tensor.type]
        num_bytes = int(np.prod(tensor.shape)) // block * block_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), num_bytes, raw_dtype=tensor.type)
    file_type = package.LlamaFileType.ALL_F32 if export.type == "f32" else f"MOSTLY_{export.type.upper()}"
    file_type = file_type if export.type == "f32" else package.LlamaFileType[file_type]
    general = {
        "general.type": "model",
        "general.name": out.stem,
        "general.size_label": package.size_label(*writer.get_total_parameter_count()),
        "general.file_type": int(file_type),
        "general.quantization_version": package.GGML_QUANT_VERSION,
    }
    own = architecture_keys(gguf, weights.sizes, weights.model.context_window)
    for key, value in {**general, **{f"{gguf.architecture}.{k}": v for k, v in own.items()}}.items():
        _add(writer, key, value)
    for key, value in export.vocabulary.keys.items():
        _add(writer, f"tokenizer.{key}", value)
    with atomic_path(out) as path:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(_Content(package, tensor))
        writer.close()


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


class _Content:
    """The content of a tensor in place of an array, so that GGUFWriter writes it in pieces."""

    def __init__(self, package: ModuleType, tensor: GgufTensor):
        self._package, self._tensor = package, tensor
        block, block_bytes = package.GGML_QUANT_SIZES[tensor.type]
        self.nbytes = int(np.prod(tensor.shape)) // block * block_bytes

    def tofile(self, file: BinaryIO) -> None:
        for piece in self._tensor.pieces():
            file.write(memoryview(self._package.quantize(piece.numpy(), self._tensor.type)).cast("B"))


@dataclass(frozen=True)
class _Reader:
    """Reads the weights in the order of llama.cpp."""

    weights: Weights
    progress: Progress

    def entries(self) -> list[tuple[str, tuple[int, ...], Callable[[], Iterator[Tensor]]]]:
        """Return name, shape and content of each tensor."""
        gguf: Gguf = self.weights.spec.gguf
        groups: dict[str, list[str]] = {}
        entries = []
        order = {module: i for i, module in enumerate(gguf.names)}
        for name in sorted(self.weights.index, key=layer_order):
            inner = name.rpartition(".")[0].split(".", 2)[-1] if name.startswith("layers.") else ""
            if inner in gguf.head_rows:
                entries += [self._heads(name, part) for part in gguf.head_rows[inner]]
            else:
                groups.setdefault(gguf.tensor_name(name), []).append(name)
        for name, parameters in groups.items():
            by_module = lambda p: order.get(p.rpartition(".")[0].split(".", 2)[-1], 0)  # noqa: E731
            entries.append(self._joined(name, sorted(parameters, key=by_module)))
        if gguf.writes_tied and self.weights.sizes.tied_embeddings:
            entries.append(self._joined("output.weight", ["tok_embeddings.weight"]))
        for name, values in frequency_tensors(self.weights.sizes).items():
            entries.append((name, tuple(values.shape), partial(iter, (values,))))
        return entries

    def _joined(self, name: str, parameters: Sequence[str]) -> tuple[str, tuple[int, ...], Any]:
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

        return name, (sum(shape[0] for shape in shapes), *shapes[0][1:]), pieces

    def _heads(self, parameter: str, part: HeadRows) -> tuple[str, tuple[int, ...], Any]:
        """Return a tensor that contains the same rows of each head."""
        sizes, (num_rows, columns) = self.weights.sizes, self.weights.index[parameter].shape
        height = num_rows // sizes.n_heads
        own = range(height)[part.rows(sizes)]

        def read(start: int, stop: int) -> Tensor:
            rows = self.weights.rows(parameter, start * height, stop * height).float()
            heads = rows.unflatten(0, (-1, height))[:, own.start : own.stop]
            return (heads.mT if part.transposed else heads).contiguous()

        shape = (sizes.n_heads, *((columns, len(own)) if part.transposed else (len(own), columns)))
        _, index, _ = parameter.split(".", 2)
        pieces = partial(read_in_chunks, read, shape, torch.float32, 1, self.progress)
        return f"blk.{index}.{part.name}.weight", shape, pieces

"""Weights of eight bits in Hugging Face's format FP8 with scales of blocks (DeepSeek-AI 2024, "DeepSeek-V3", arXiv:2412.19437):
beside a matrix of float8 values, `<name>_scale_inv` has one factor for each block. `weight_block_size` in the quantization_config
of config.json is the size of a block, which is smaller at the matrix's last rows and columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.manifest import CorruptError
from trainer.checkpoint.tensor_files import TensorMetadata

VALUES = torch.float8_e4m3fn
_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix in this format."""

    scales: str
    """Name of the tensor (row blocks, column blocks)."""
    scales_file: str
    block: tuple[int, int]
    """Rows and columns of a block."""
    decoded: TensorMetadata
    """Of the tensor that the matrix stands for: bf16, as in the publisher's own conversion."""


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns of a block of the matrices of a folder in this format, or None for another format. config:
    content of its config.json."""
    settings = config.get("quantization_config")
    if not isinstance(settings, dict) or settings.get("quant_method") != "fp8":
        return None
    size = settings.get("weight_block_size")
    is_size = isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    return tuple(size) if is_size else None


def scaled_matrices(stored: Mapping[str, TensorMetadata], block: tuple[int, int]) -> dict[str, ScaledMatrix]:
    """Return name -> matrix.

    Args:
        stored: Tensors by name.
        block: Result of block_size.

    Raises:
        CorruptError: A matrix has no scales, or they do not fit it.
    """
    matrices = {}
    for name, values in stored.items():
        if values.dtype != VALUES:
            continue
        scales = stored.get(f"{name}{_SUFFIX}")
        if scales is None:
            raise CorruptError(f"{name} has the format FP8, but {name}{_SUFFIX} is missing")
        grid = tuple(-(-size // n) for size, n in zip(values.shape, block, strict=False))
        if len(values.shape) != 2 or scales.shape != grid or not scales.dtype.is_floating_point:
            shapes = f"{list(values.shape)} and {list(scales.shape)}"
            raise CorruptError(
                f"{name} and {name}{_SUFFIX} have the shapes {shapes}, which do not fit blocks of {list(block)}"
            )
        decoded = TensorMetadata(torch.bfloat16, values.shape, values.chunks)
        matrices[name] = ScaledMatrix(f"{name}{_SUFFIX}", scales.chunks[0].file, block, decoded)
    return matrices


def decode(values: Tensor, scales: Tensor, block: tuple[int, int], rows: slice, columns: slice) -> Tensor:
    """Return a part of a matrix, bf16: products in fp32, rounded once.

    Args:
        values: The part, float8.
        scales: Those of the complete matrix, (row blocks, column blocks).
        block: Rows and columns of a block.
        rows: Rows of the part.
        columns: Columns of the part.
    """
    result = torch.empty(values.shape, dtype=torch.bfloat16)
    column_blocks = torch.arange(columns.start, columns.stop) // block[1]
    start = rows.start
    while start < rows.stop:  # rows of one block at a time, because fp32 values take four times the memory of `values`
        stop = min(rows.stop, start - start % block[0] + block[0])
        factors = scales[start // block[0]].float()[column_blocks]
        own = slice(start - rows.start, stop - rows.start)
        result[own] = values[own].float() * factors
        start = stop
    return result

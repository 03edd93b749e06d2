"""Weights in the format MXFP4 (Open Compute Project 2023, "OCP Microscaling Formats (MX) Specification", version 1.0): 32 values
of four bits share a scale. A stack of matrices is stored as two tensors of bytes, `<name>_blocks` and `<name>_scales`."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.checkpoint.manifest import CorruptError
from trainer.checkpoint.tensor_files import Chunk, TensorMetadata

GROUP = 32
"""Number of values that share a scale."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude by the low three bits of a value. The fourth bit is the sign."""
_BIAS = 127
"""A scale s is the factor 2 ** (s - _BIAS)."""


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values, (..., groups * 32), bf16, which represents them exactly.

    Args:
        blocks: Two values in each byte, the first one in its low bits, (..., groups, 16), uint8.
        scales: (..., groups), uint8.
    """
    values = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
    codes = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)  # (..., groups, 32)
    return torch.ldexp(values[codes.int()], scales.int()[..., None] - _BIAS).bfloat16().flatten(-2)


@dataclass(frozen=True)
class PackedStack:
    """A stack of matrices in this format."""

    blocks: str
    """Name of the tensor (matrices, rows, groups, 16)."""
    scales: str
    """Name of the tensor (matrices, rows, groups)."""
    scales_file: str
    decoded: TensorMetadata
    """Of the tensor in the place of which the stack is stored. Its matrices have one column for each row of the stack."""


def packed_stacks(stored: Mapping[str, TensorMetadata]) -> dict[str, PackedStack]:
    """Return name -> stack. stored: tensors by name. Raises CorruptError if the tensors of a stack do not fit each other."""
    stacks = {}
    for blocks in stored:
        name, scales = blocks.removesuffix("_blocks"), f"{blocks.removesuffix('_blocks')}_scales"
        if name == blocks or scales not in stored:
            continue
        a, b = stored[blocks], stored[scales]
        if (a.shape, a.dtype, b.dtype) != ((*b.shape, GROUP // 2), torch.uint8, torch.uint8) or len(b.shape) != 3:
            shapes = f"{list(a.shape)} and {list(b.shape)}"
            raise CorruptError(f"{blocks} and {scales} have the shapes {shapes}, which is not the format MXFP4")
        matrices, rows, groups = b.shape
        shape = (matrices, groups * GROUP, rows)
        decoded = TensorMetadata(torch.bfloat16, shape, (Chunk(a.chunks[0].file, (0, 0, 0), shape),))
        stacks[name] = PackedStack(blocks, scales, b.chunks[0].file, decoded)
    return stacks

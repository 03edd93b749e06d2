"""Frozen weights in 4 bits, "QLoRA" (Dettmers et al. 2023, arXiv:2305.14314).

64 consecutive values of a row are a block. A value is the product of its block's scale, the largest magnitude in the block, and
one of 16 levels: quantiles of the normal distribution. The codes of the levels are those of the package bitsandbytes, bit by bit.
Its blocks ignore rows, and so does its second quantization, of scales, which groups 256 blocks. Here no block and no scale
depends on another row, so a weight that is sharded has the same values in every layout.

    "nf4"           bf16 scales, which for bf16 weights are exact: 0.53125 bytes per value
    "nf4_double"    the fourth roots of the scales of a row in 8 bits: 0.517 bytes per value of 4096 columns

With fourth roots, scales far below the largest of their row keep their precision: the root mean square of the relative error is
0.5 % at half of the largest, and 2.5 % at a thousandth. All devices compute them equally, as two square roots.

All parts are uint8 tensors, also scales: FSDP casts floating-point parameters when it gathers them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.runtime.dtensor import local_region

BLOCK = 64
"""Number of values that share a scale."""
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_CHUNK = 2**24
"""Maximum number of values that are converted at once, each of which takes about 20 bytes meanwhile."""
PAIRS_BYTES = 256 * 2 * 4
"""Size of the result of pairs_of_levels."""
CODES, SCALES, MAXIMA = "codes", "scales", "maxima"

Quantized = dict[str, Tensor]
"""Name of a part -> uint8 tensor. CODES: (..., rows, columns / 2), the first of two values in the high bits. SCALES: (..., rows,
bytes). MAXIMA, only with nf4_double: the largest scale of each row, fp32, (..., rows, 4)."""


def part_shapes(shape: tuple[int, ...], is_double: bool) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of each part of a quantized weight. shape: of the weight, (..., rows, columns)."""
    *outer, columns = shape
    blocks = columns // BLOCK
    shapes = {CODES: (*outer, columns // 2), SCALES: (*outer, blocks if is_double else 2 * blocks)}
    return shapes | {MAXIMA: (*outer, 4)} if is_double else shapes


def stored_bytes(shape: tuple[int, ...], is_double: bool) -> int:
    """Return the bytes of a quantized weight. shape: of the weight."""
    return sum(math.prod(part) for part in part_shapes(shape, is_double).values())


def quantize(rows: Tensor, is_double: bool) -> Quantized:
    """Return the parts of quantized rows. The scale of a block does not affect its codes, which belong to the exact maximum.

    Args:
        rows: (..., columns), of any floating-point dtype. With is_double they must be complete.
        is_double: Whether the scales are quantized too.
    """
    blocks = rows.float().unflatten(-1, (-1, BLOCK))
    maxima = blocks.abs().amax(-1)  # (..., blocks)
    levels = torch.tensor(LEVELS, device=rows.device)
    # As bitsandbytes: times the reciprocal, and a value between two levels gets the lower one.
    relative = (blocks * maxima.clamp(min=1e-38).reciprocal()[..., None]).clamp_(-1, 1)
    codes = torch.bucketize(relative, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.uint8).flatten(-2)
    parts = {CODES: codes[..., ::2] << 4 | codes[..., 1::2]}
    if not is_double:
        return parts | {SCALES: maxima.bfloat16().view(torch.uint8)}
    largest = maxima.amax(-1, keepdim=True)
    roots = (maxima / largest.clamp(min=1e-38)).sqrt_().sqrt_()
    scales = (roots * 255).round_().clamp_(min=1)  # 0 would erase a block
    return parts | {SCALES: scales.to(torch.uint8), MAXIMA: largest.view(torch.uint8)}


def pairs_of_levels(device: torch.device | str) -> Tensor:
    """Return the two values of each byte of codes, (256, 2), fp32. It is made once: a copy to a GPU makes the host wait."""
    pairs = [(LEVELS[byte >> 4], LEVELS[byte & 15]) for byte in range(256)]
    return torch.tensor(pairs, device=device)


def dequantize(parts: Mapping[str, Tensor], pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values, (..., rows, columns), computed in fp32 and rounded once.

    Args:
        parts: See Quantized.
        pairs: Result of pairs_of_levels.
        dtype: Of the result.
    """
    outer = parts[CODES].shape[:-1]
    rows = {name: part.flatten(0, -2) for name, part in parts.items()}
    count, columns = rows[CODES].shape[0], 2 * rows[CODES].shape[1]
    step = max(1, _CHUNK // columns)
    if count <= step or torch.compiler.is_compiling():  # compiled, the fp32 values take no memory
        return _dequantize_rows(rows, pairs).to(dtype).view(*outer, columns)
    values = pairs.new_empty(count, columns, dtype=dtype)
    for start in range(0, count, step):
        chunk = {name: part[start : start + step] for name, part in rows.items()}
        values[start : start + step] = _dequantize_rows(chunk, pairs)
    return values.view(*outer, columns)


def round_trip(rows: Tensor, is_double: bool) -> Tensor:
    """Return the values of complete rows as products in 4 bits use them, fp32, (rows, columns). Arguments: as in quantize."""
    return dequantize(quantize(rows, is_double), pairs_of_levels(rows.device), torch.float32)


def _dequantize_rows(parts: Mapping[str, Tensor], pairs: Tensor) -> Tensor:
    """Return the values in fp32, (rows, columns)."""
    values = F.embedding(parts[CODES].int(), pairs).flatten(-2).unflatten(-1, (-1, BLOCK))
    return (values * _scales(parts)[..., None]).flatten(-2)


def _scales(parts: Mapping[str, Tensor]) -> Tensor:
    """Return the scale of each block, fp32, (rows, blocks)."""
    if MAXIMA in parts:
        square = (parts[SCALES].float() * (1 / 255)).square()
        return square.square() * parts[MAXIMA].view(torch.float32)
    return parts[SCALES].view(torch.bfloat16).float()


# ---------------------------------------------------------------- parameters of a model


def part_name(leaf: str, part: str) -> str:
    """Return the name of the parameter that holds a part of a quantized weight. leaf: name of the weight in its module."""
    return f"{leaf}_{part}"


def parts_in(module: nn.Module, leaf: str) -> Quantized:
    """Return the parts of a quantized weight of a module: those that the module holds now. Empty: it is not quantized."""
    names = {part: part_name(leaf, part) for part in (CODES, SCALES, MAXIMA)}
    return {part: getattr(module, name) for part, name in names.items() if hasattr(module, name)}


def placed_like(module: nn.Module, leaf: str) -> Tensor:
    """Return a parameter that is sharded like a weight of a module: the weight, or its codes."""
    weight = getattr(module, leaf)
    return getattr(module, part_name(leaf, CODES)) if weight is None else weight


def quantized_weights(model: nn.Module) -> dict[str, "QuantizedWeight"]:
    """Return name of a weight -> this rank's part, for each quantized weight of a model."""
    suffix = part_name("", CODES)
    weights = {}
    for name, module in model.named_modules():
        leaves = [p.removesuffix(suffix) for p, _ in module.named_parameters(recurse=False) if p.endswith(suffix)]
        weights |= {f"{name}.{leaf}": QuantizedWeight(parts_in(module, leaf)) for leaf in leaves}
    return weights


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight of which this rank holds a part."""

    parts: Quantized
    """They may be sharded."""

    @torch.no_grad()
    def fill(self, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
        """Quantize this rank's part of a stored weight, some rows at a time. read: returns a region of the weight."""
        is_double = MAXIMA in self.parts
        local = {name: local_region(part)[0] for name, part in self.parts.items()}
        codes, (*stack, rows, pairs) = local_region(self.parts[CODES])
        own = slice(2 * pairs.start, 2 * pairs.stop)
        # The largest scale belongs to the complete row.
        columns = slice(0, 2 * self.parts[CODES].shape[-1]) if is_double else own
        step = max(1, _CHUNK // max(1, columns.stop - columns.start))
        for *outer, start in product(*map(_indices, stack), range(rows.start, rows.stop, step)):
            stop = min(start + step, rows.stop)
            values = read((*(slice(i, i + 1) for i in outer), slice(start, stop), columns))
            quantized = quantize(values.flatten(0, -2).to(codes.device), is_double)
            index = [i - own_range.start for i, own_range in zip(outer, stack, strict=True)]
            for name, part in quantized.items():
                if is_double and name != MAXIMA:
                    width = part.shape[-1]
                    part = part[:, own.start * width // columns.stop : own.stop * width // columns.stop]
                local[name][(*index, slice(start - rows.start, stop - rows.start))].copy_(part)


def _indices(own: slice) -> range:
    return range(own.start, own.stop)

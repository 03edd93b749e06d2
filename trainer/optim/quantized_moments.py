"""Block-wise 8-bit quantization of optimizer moments (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization",
arXiv:2110.02861).

Each quantization block lies within one row. The quantized values therefore do not depend on how matrices are sharded, and a run
can be resumed with another layout.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.base.config import ConfigError

BLOCK_SIZE = 256
"""Number of values that share a scale."""


def is_quantizable(matrix: Tensor) -> bool:
    """Return whether each row of a matrix, or of stacked matrices, consists of complete blocks. If not, its moments stay fp32,
    like those of biases."""
    return matrix.dim() >= 2 and matrix.shape[-1] % BLOCK_SIZE == 0


def note_of_fp32_moments(unquantized: Mapping[str, Tensor], num_trained: int) -> str:
    """Return which part of a run's moments stays fp32, besides those of norms and biases, and why. "": none.

    Args:
        unquantized: Matrices without 8-bit moments, by name. They may be on the meta device.
        num_trained: Number of values that the run trains.
    """
    if not unquantized:
        return ""
    share = sum(p.numel() for p in unquantized.values()) / num_trained
    lengths = ", ".join(map(str, sorted({p.shape[-1] for p in unquantized.values()})))
    reason = f"the rows of matrices such as {next(iter(unquantized))} are not divisible by {BLOCK_SIZE} (row lengths: {lengths})"
    return f"8-bit moments do not apply to {100 * share:.3g} % of the trained values, which have fp32 moments: {reason}"


def require_complete_blocks(name: str, row_length: int) -> None:
    """Raise ConfigError if tp splits blocks, because quantization would depend on the layout.

    Args:
        name: Of a matrix with complete blocks.
        row_length: On a rank.
    """
    if row_length % BLOCK_SIZE:
        rule = f"'8bit' needs row lengths divisible by {BLOCK_SIZE}, but tp shortens the rows of {name} to {row_length}"
        raise ConfigError("optimizer.state_dtype", f"{rule}; use 'bf16'")


def _values(signed: bool) -> list[float]:
    """Return the sorted values of the 256 codes (section 2.1 of the paper, "dynamic tree quantization").

    The positive values below 1 lie in the seven decades from 1e-7 to 1. They are evenly spaced within a decade, and each decade
    has twice as many values as the decade below it. The unsigned values are 0, these positive values and 1. The signed values
    are 0, 1, -1, these positive values, and the negatives of all these positive values except the smallest.
    """
    positive = []
    for power in range(7):
        steps = 2**power * (1 if signed else 2)
        positive += [10 ** (power - 6) * (0.1 + 0.9 * (step + 0.5) / steps) for step in range(steps)]
    negative = [-1.0, *(-value for value in positive[:0:-1])] if signed else []
    return [*negative, 0.0, *positive, 1.0]


class BlockQuantizer:
    """Quantizer of matrices that satisfy is_quantizable. Shapes are (..., rows, columns)."""

    def __init__(self, signed: bool, device: torch.device):
        self.values = torch.tensor(_values(signed), device=device)
        self.boundaries = (self.values[1:] + self.values[:-1]) / 2
        self.zero = _values(signed).index(0.0)
        if not signed:
            # In the second moment only zero quantizes to zero, because the update divides by its square root.
            self.boundaries[0] = 0.0

    def zeros_like(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes (shape of `matrix`) and scales (shape (..., rows, blocks per row)) that represent a matrix of zeros."""
        codes = torch.full_like(matrix, self.zero, dtype=torch.uint8)
        return codes, matrix.new_zeros((*matrix.shape[:-1], matrix.shape[-1] // BLOCK_SIZE), dtype=torch.float32)

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the values as fp32."""
        relative = self.values.index_select(0, codes.flatten().int())  # self.values[...] would need int64 indices
        return (relative.view(*scales.shape, BLOCK_SIZE) * scales[..., None]).flatten(-2)

    def quantize_(self, matrix: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Write the quantized matrix to `codes` and `scales`. Quantizing a result of `dequantize` does not change the values."""
        blocks = matrix.unflatten(-1, (-1, BLOCK_SIZE))
        scales.copy_(blocks.abs().amax(-1))
        divisors = scales.where(scales != 0, 1.0)  # no lower bound: scales may be subnormal
        relative = (blocks / divisors[..., None]).flatten(-2)
        codes.copy_(torch.bucketize(relative, self.boundaries, out_int32=True))

"""Averages of an optimizer in 8 bits (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861).

A block is part of one row: what a value becomes does not depend on how matrices are cut between ranks, so that a run may go on
with another layout.
"""

import torch
from torch import Tensor

BLOCK = 256
"""Values that share a scale."""


def fits(matrix: Tensor) -> bool:
    """Whether its rows consist of blocks. What does not fit stays fp32: norms, biases, odd sizes."""
    return matrix.dim() == 2 and matrix.shape[1] % BLOCK == 0


def _values(signed: bool) -> list[float]:
    """What the 256 codes stand for, in order, at most 1: steps of equal size within each of seven powers of ten, twice as many in
    each as in the one below (section 2.1, "dynamic tree quantization"); 0 and 1, and if signed -1 in place of the value next
    to 0."""
    positive = []
    for power in range(7):
        steps = 2**power * (1 if signed else 2)
        positive += [10 ** (power - 6) * (0.1 + 0.9 * (step + 0.5) / steps) for step in range(steps)]
    negative = [-1.0, *(-value for value in positive[:0:-1])] if signed else []
    return [*negative, 0.0, *positive, 1.0]


class BlockQuantizer:
    """Quantizes matrices of any shape that fits."""

    def __init__(self, signed: bool, device: torch.device):
        self.values = torch.tensor(_values(signed), device=device)
        self.borders = (self.values[1:] + self.values[:-1]) / 2
        self.zero = _values(signed).index(0.0)
        if not signed:
            # Of squares, only zero becomes zero: an update divides by their root.
            self.borders[0] = 0.0

    def zeros_like(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, of the matrix' shape; and scales, (rows, blocks of a row)."""
        codes = torch.full_like(matrix, self.zero, dtype=torch.uint8)
        return codes, matrix.new_zeros((matrix.shape[0], matrix.shape[1] // BLOCK), dtype=torch.float32)

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """As fp32."""
        relative = self.values.index_select(0, codes.flatten().int())  # by brackets it would be int64
        return (relative.view(*scales.shape, BLOCK) * scales[:, :, None]).flatten(1)

    def write(self, matrix: Tensor, codes: Tensor, scales: Tensor) -> None:
        """What was read is written as it was."""
        blocks = matrix.unflatten(1, (-1, BLOCK))
        scales.copy_(blocks.abs().amax(2))
        smallest = torch.finfo(torch.float32).tiny
        relative = (blocks / scales.clamp(min=smallest)[:, :, None]).flatten(1)
        codes.copy_(torch.bucketize(relative, self.borders, out_int32=True))

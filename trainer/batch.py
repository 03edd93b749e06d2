"""The batch that the data loader passes to the step."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position without a target token."""


class Batch(NamedTuple):
    """Complete sequences, before context parallelism shards them. All tensors have the shape (batch, seq) and the dtype int64."""

    tokens: Tensor
    labels: Tensor
    """The token that follows each position, or IGNORE_INDEX."""
    positions: Tensor
    documents: Tensor
    """Index of each token's document. If attention ignores document boundaries, all tokens of a sample share one index."""

    @staticmethod
    def cat(batches: "Sequence[Batch]") -> "Batch":
        """Concatenate along the batch dim."""
        return Batch(*map(torch.cat, zip(*batches, strict=True)))

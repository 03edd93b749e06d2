"""The batch that the data loader passes to the step."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position without a target token."""


class Batch(NamedTuple):
    """Full sequences; all tensors are (batch, seq), int64."""

    tokens: Tensor
    labels: Tensor
    """The token that follows each position, or IGNORE_INDEX."""
    positions: Tensor
    documents: Tensor
    """Index of the document of each token; the same for all tokens of a sample if attention ignores document boundaries."""

    @staticmethod
    def cat(batches: "Sequence[Batch]") -> "Batch":
        """Concatenate along the batch dim."""
        return Batch(*map(torch.cat, zip(*batches, strict=True)))

"""The batch that the data loader passes to the step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position without a target token."""


@dataclass(frozen=True)
class Batch:
    """Full sequences; all tensors are (batch, seq), int64."""

    tokens: Tensor
    labels: Tensor
    """The token that follows each position, or IGNORE_INDEX."""
    positions: Tensor
    documents: Tensor
    """Index of the document of each token; the same for all tokens of a sample if attention ignores document boundaries."""

    def apply(self, f: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(*(f(getattr(self, field.name)) for field in fields(self)))

    @staticmethod
    def cat(batches: "Sequence[Batch]") -> "Batch":
        """Concatenate along the batch dim."""
        return Batch(*(torch.cat([getattr(b, field.name) for b in batches]) for field in fields(Batch)))

    def pin_memory(self) -> "Batch":
        """Called by the data loader on GPUs."""
        return self.apply(lambda t: t.pin_memory())

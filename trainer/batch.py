"""The only thing that travels from the data to the step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that is no target."""


@dataclass(frozen=True)
class Batch:
    """Whole sequences; all (batch, seq), int64."""

    tokens: Tensor
    labels: Tensor
    """The token that follows each position, or IGNORE_INDEX."""
    positions: Tensor
    documents: Tensor
    """Number of the document each token belongs to; one for all of a sample where attention does not tell them apart."""

    def apply(self, f: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(*(f(getattr(self, field.name)) for field in fields(self)))

    @staticmethod
    def cat(batches: "Sequence[Batch]") -> "Batch":
        """Their sequences, one after the other."""
        return Batch(*(torch.cat([getattr(b, field.name) for b in batches]) for field in fields(Batch)))

    def pin_memory(self) -> "Batch":
        """Called by the data loader on GPUs."""
        return self.apply(lambda t: t.pin_memory())

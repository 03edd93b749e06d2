"""The batch that the data loader passes to the step."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position without a target token."""


class Batch(NamedTuple):
    """Complete sequences, before context parallelism shards them. Tensors have the shape (batch, seq) and the dtype int64 unless
    stated otherwise."""

    tokens: Tensor
    labels: Tensor
    """The token that follows each position, or IGNORE_INDEX. With `future`, (batch, seq, 1 + prediction layers): also those after
    that."""
    positions: Tensor
    documents: Tensor
    """Index of each token's document, -1 at positions outside all documents. If attention ignores document boundaries, all tokens
    of a sample share one index. In a preference dataset, document 2i of a sample is a chosen answer, document 2i + 1 the rejected
    one."""
    samples: Tensor
    """Index of each row's sample, (batch,): in training its cursor position, which differs between epochs; in evaluation its
    index in the dataset."""
    reference: Tensor | None = None
    """Log-probability of each document's targets under the reference model, in fp32, at the document's first token. Other
    positions are zero. None if the loss needs no reference."""
    last_readers: Tensor | None = None
    """See Context."""
    future: Tensor | None = None
    """See Context."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply a function to each tensor."""
        return Batch(*(None if tensor is None else function(tensor) for tensor in self))

    def to(self, device: torch.device) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    @staticmethod
    def cat(batches: "Sequence[Batch]") -> "Batch":
        """Concatenate along the batch dim."""
        columns = zip(*batches, strict=True)
        return Batch(*(None if tensors[0] is None else torch.cat(tensors) for tensors in columns))

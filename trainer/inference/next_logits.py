"""Logits at chosen positions, in every layout."""

from dataclasses import dataclass

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.spec import Head
from trainer.objective.cross_entropy import local_rows

READ_HERE = 0
"""Label of the position whose logits are read. All other positions have no label."""


def logits_of(hidden: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    """Return logits of the complete vocabulary, (positions, vocabulary), fp32.

    Args:
        hidden: Last hidden states of the chosen positions, (positions, dim). Ranks of tensor parallelism have the same.
        weight: Of the output. Under tensor parallelism, a DTensor.
        softcap: Limit of the logits.
    """
    local, first, group = local_rows(weight)
    logits = F.linear(hidden, local.to(hidden.dtype)).float()
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    if group is None:
        return logits
    result = logits.new_zeros(len(hidden), weight.shape[0])
    result[:, first : first + logits.shape[1]] = logits
    dist.all_reduce(result, group=group)
    return result


@dataclass(frozen=True, kw_only=True)
class NextLogits:
    """Readout of the logits at the marked position of each row, of which a microbatch has at most one."""

    shape: tuple[int, int]
    """(rows of all ranks, vocabulary)."""
    first_row: int
    """Index of this rank's first row."""

    def head(self, labels: Tensor, documents: Tensor, reference: Tensor | None) -> Head:
        def head(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
            hidden = hidden.to_local() if isinstance(hidden, DTensor) else hidden
            rows, positions = (labels == READ_HERE).nonzero(as_tuple=True)
            logits = logits_of(hidden[rows, positions], weight, softcap)
            result = logits.new_zeros(self.shape)
            result[self.first_row + rows] = logits
            return result

        return head

"""The logits from which the next token of a text is chosen, in every layout."""

from dataclasses import dataclass

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.spec import Head

READ_HERE = 0
"""Label of the position whose logits are read. All other positions have no label."""


@dataclass(frozen=True, kw_only=True)
class NextLogits:
    """Readout of the logits at the marked position of each row, of which a microbatch has at most one."""

    shape: tuple[int, int]
    """(rows of all ranks, vocabulary)."""
    first_row: int
    """Index of this rank's first row."""

    def head(self, labels: Tensor, documents: Tensor, reference: Tensor | None) -> Head:
        def head(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
            first_token, group = 0, None
            if isinstance(weight, DTensor):
                mesh = weight.device_mesh
                group = mesh.get_group()
                first_token = -(-weight.shape[0] // mesh.size()) * mesh.get_local_rank()
                hidden, weight = hidden.to_local(), weight.to_local()
            rows, positions = (labels == READ_HERE).nonzero(as_tuple=True)
            logits = F.linear(
                hidden[rows, positions], weight.to(hidden.dtype)
            ).float()  # (marked rows, tokens on this rank)
            if softcap is not None:
                logits = softcap * (logits / softcap).tanh()
            result = logits.new_zeros(self.shape)
            result[self.first_row + rows, first_token : first_token + logits.shape[1]] = logits
            if group is not None:
                dist.all_reduce(result, group=group)
            return result

        return head

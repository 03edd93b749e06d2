"""Context parallelism: each sequence cut over the ranks of the cp axis, attention over the gathered keys and values.

Keys and values are gathered, not passed around a ring, as in Llama 3's training (Llama Team 2024, arXiv:2407.21783, 3.3.2):
with few kv heads they are small, and the whole sequence of them makes any mask easy. Of 2 x cp chunks a rank has the r-th
from the head and the r-th from the tail, so that under a causal mask all ranks have the same work.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from trainer.batch import Batch
from trainer.parallel.recompute import recompute_in_backward


def shard_sequence(batch: Batch, rank: int, ranks: int) -> Batch:
    """This rank's two chunks of every sequence: (batch, seq) -> (batch, seq / ranks)."""
    return batch if ranks == 1 else batch.apply(lambda tensor: shard_tensor(tensor, rank, ranks))


def shard_tensor(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """(batch, seq) -> (batch, seq / ranks)."""
    if ranks == 1:
        return tensor
    chunks = tensor.chunk(2 * ranks, dim=1)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim=1)


def all_gather_sequence(tensor: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """The other way round, over all ranks of the mesh; dim: of the sequence. In backward each rank's share of the gradients is
    added up where it belongs."""
    if mesh.size() == 1:
        return tensor
    parts = DTensor.from_local(tensor, mesh, [Shard(dim)], run_check=False)
    whole = parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    head, tail = whole.unflatten(dim, (mesh.size(), 2, -1)).unbind(
        dim + 1
    )  # each rank's chunk of the head, and of the tail
    return torch.cat((head, tail.flip(dim)), dim=dim).flatten(dim, dim + 1)


class AllGatherAttention(nn.Module):
    """Attention of this rank's queries to the keys and values of the whole sequence."""

    def __init__(self, kernel: nn.Module, mesh: DeviceMesh, recompute: bool):
        """mesh: the cp axis. recompute: keep only this rank's keys and values for backward, and gather them again there."""
        super().__init__()
        self.kernel = kernel
        self.mesh = mesh
        self.recompute = recompute

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """q: (batch, heads, seq / cp, head_dim); k, v: (batch, kv heads, seq / cp, head_dim)."""
        mine = torch.stack((k, v))
        whole = self._gather(mine)
        if not self.recompute:
            return self.kernel(q, *whole, mask)
        with recompute_in_backward((whole, lambda: self._gather(mine.detach()))):
            return self.kernel(q, *whole, mask)

    def _gather(self, mine: Tensor) -> Tensor:
        """(2, batch, kv heads, seq / cp, head_dim) -> (2, batch, kv heads, seq, head_dim), in order."""
        return all_gather_sequence(mine, self.mesh, dim=3)

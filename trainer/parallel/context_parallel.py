"""Context parallelism: each sequence is split over the cp axis, and attention reads the gathered keys and values.

As in Llama 3's training (Llama Team 2024, arXiv:2407.21783, 3.3.2), keys and values are gathered instead of passed around a ring:
with few kv heads the gathered tensors are small, and every mask is simple to apply to the full sequence. Each sequence is split
into 2 x cp chunks. Rank r has the r-th chunk from the start of the sequence and the r-th chunk from its end, so all ranks have
the same work under a causal mask.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from trainer.batch import Batch
from trainer.parallel.saved_tensors import call_with_gathered


def shard_sequence(batch: Batch, rank: int, ranks: int) -> Batch:
    """Return this rank's two chunks of every sequence, as a batch of shape (batch, seq / ranks)."""
    if ranks == 1:
        return batch
    of_rank = batch._replace(samples=None).map(partial(shard_tensor, rank=rank, ranks=ranks))
    return of_rank._replace(samples=batch.samples)


def shard_tensor(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """Return this rank's two chunks of a tensor of shape (batch, seq), as one tensor of shape (batch, seq / ranks)."""
    if ranks == 1:
        return tensor
    chunks = tensor.chunk(2 * ranks, dim=1)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim=1)


def all_gather_sequence(tensor: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Gather a tensor that is split into chunks as in shard_tensor. Return the full sequence in order. dim: sequence dim.
    Backward sums the gradients over all ranks and returns this rank's shard of the sum."""
    if mesh.size() == 1:
        return tensor
    shards = DTensor.from_local(tensor, mesh, [Shard(dim)], run_check=False)
    gathered = shards.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    # chunks from the start, and from the end of the sequence, in order of rank
    head, tail = gathered.unflatten(dim, (mesh.size(), 2, -1)).unbind(dim + 1)
    return torch.cat((head, tail.flip(dim)), dim=dim).flatten(dim, dim + 1)


class AllGatherAttention(nn.Module):
    """Attention from this rank's queries to the keys and values of the full sequence."""

    def __init__(self, kernel: nn.Module, mesh: DeviceMesh, recompute: bool):
        """Wrap a kernel.

        Args:
            mesh: The cp axis.
            recompute: Whether backward repeats the gather of keys and values, so its result is not saved.
        """
        super().__init__()
        self.kernel = kernel
        self.mesh = mesh
        self.recompute = recompute

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        """Return the result for this rank's queries, (batch, heads, seq / cp, head_dim).

        Args:
            q: (batch, heads, seq / cp, head_dim).
            k: (batch, kv heads, seq / cp, head_dim).
            v: (batch, kv heads, seq / cp, head_dim).
            mask: Of the kernel.
            sinks: (heads,), in kinds of layers with sinks.
        """
        gather, widths = partial(all_gather_sequence, mesh=self.mesh, dim=2), (k.shape[-1], v.shape[-1])
        local = torch.cat((k, v), -1)  # (batch, kv heads, seq / cp, widths of a key and of a value)
        attend = lambda kv: self.kernel(q, *kv.split(widths, -1), mask, sinks)  # noqa: E731
        return call_with_gathered(attend, gather, local, recompute=self.recompute)

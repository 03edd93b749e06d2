"""Context parallelism: each sequence cut over the ranks of the cp axis, attention over the gathered keys and values.

Keys and values are gathered, not passed around a ring, as in Llama 3's training (Llama Team 2024, arXiv:2407.21783, 3.3.2):
with few kv heads they are small, and the whole sequence of them makes any mask easy. Of 2 x cp chunks a rank has the r-th
from the head and the r-th from the tail, so that under a causal mask all ranks have the same work.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from models.spec import ParallelPlan
from trainer.batch import Batch
from trainer.parallel.recompute import recompute_in_backward


def cut_sequence(batch: Batch, rank: int, ranks: int) -> Batch:
    """This rank's two chunks of every sequence: (batch, seq) -> (batch, seq / ranks)."""
    if ranks == 1:
        return batch

    def cut(tensor: Tensor) -> Tensor:
        chunks = tensor.chunk(2 * ranks, dim=1)
        return torch.cat((chunks[rank], chunks[-1 - rank]), dim=1)

    return batch.apply(cut)


class ContextAttention(nn.Module):
    """Causal attention of this rank's queries to the keys and values of the whole sequence."""

    def __init__(self, mesh: DeviceMesh, recompute: bool):
        """mesh: the cp axis. recompute: keep only this rank's keys and values for backward, and gather them again there."""
        super().__init__()
        self.mesh = mesh
        self.recompute = recompute

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        """q: (batch, heads, seq / cp, head_dim); k, v: (batch, kv heads, seq / cp, head_dim)."""
        mine = torch.stack((k, v))
        rank, ranks = self.mesh.get_local_rank(), self.mesh.size()
        length = q.shape[2] // 2
        # Each of the two chunks sees the sequence up to its own end.
        seen = [(rank + 1) * length, (2 * ranks - rank) * length]

        def gather(mine: Tensor) -> Tensor:
            return self._gather(mine, repeat=q.shape[1] // k.shape[1])

        def masks() -> list[Tensor]:
            return [_mask(length, end, q) for end in seen]

        whole, biases = gather(mine), masks()
        if not self.recompute:
            return _attend(q, *whole, biases)
        recipes = [(bias, partial(_mask, length, end, q.detach())) for bias, end in zip(biases, seen, strict=True)]
        with recompute_in_backward((whole, lambda: gather(mine.detach())), *recipes):
            return _attend(q, *whole, biases)

    def _gather(self, mine: Tensor, repeat: int) -> Tensor:
        """(2, batch, kv heads, seq / cp, head_dim) -> (2, batch, kv heads, seq, head_dim), in order. In backward each rank's
        share of the gradients is added up where it belongs. repeat: heads that share a kv head."""
        parts = DTensor.from_local(mine, self.mesh, [Shard(3)], run_check=False)
        whole = parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        halves = whole.unflatten(3, (self.mesh.size(), 2, -1))  # each rank's chunk of the head, and of the tail
        whole = torch.cat((halves[:, :, :, :, 0], halves[:, :, :, :, 1].flip(3)), dim=3).flatten(3, 4)
        # With a mask, the kernels of GPUs take as many kv heads as heads.
        return whole if mine.device.type == "cpu" else whole.repeat_interleave(repeat, dim=2)


def _mask(length: int, seen: int, like: Tensor) -> Tensor:
    """Added to the scores of `length` queries at the end of `seen` keys: (length, seen). Causal attention without a mask would
    align the triangle with the first key, not with the last."""
    return like.new_full((length, seen), float("-inf")).triu(seen - length + 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor]) -> Tensor:
    gqa = q.shape[1] != k.shape[1]
    chunks = zip(q.chunk(2, dim=2), biases, strict=True)
    out = [
        F.scaled_dot_product_attention(queries, k[:, :, : b.shape[1]], v[:, :, : b.shape[1]], b, enable_gqa=gqa)
        for queries, b in chunks
    ]
    return torch.cat(out, dim=2)


def apply_context(block: nn.Module, plan: ParallelPlan, mesh: DeviceMesh, recompute: bool) -> None:
    """Put attention over the cp axis in the place of a block's kernel."""
    block.set_submodule(plan.attention, ContextAttention(mesh, recompute))

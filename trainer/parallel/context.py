"""Context parallelism: each sequence cut over the ranks of the cp axis, attention over the gathered keys and values.

Keys and values are gathered, not passed around a ring, as in Llama 3's training (Llama Team 2024, arXiv:2407.21783, 3.3.2):
with few kv heads they are small, and the whole sequence of them makes any mask easy. Of 2 x cp chunks a rank has the r-th
from the head and the r-th from the tail, so that under a causal mask all ranks have the same work.
"""

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
    mine = [rank, 2 * ranks - 1 - rank]
    return batch.apply(lambda t: t.unflatten(1, (2 * ranks, -1))[:, mine].flatten(1, 2))


def _in_order(ranks: int) -> list[int]:
    """Where the chunks of a sequence stand when the ranks' chunks are put one behind the other."""
    return [2 * r for r in range(ranks)] + [2 * r + 1 for r in reversed(range(ranks))]


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
        whole = self._gather(mine)
        if not self.recompute:
            return self._attend(q, *whole)
        with recompute_in_backward((whole, lambda: self._gather(mine.detach()))):
            return self._attend(q, *whole)

    def _gather(self, mine: Tensor) -> Tensor:
        """(2, batch, kv heads, seq / cp, head_dim) -> (2, batch, kv heads, seq, head_dim), in order. In backward each rank's
        share of the gradients is added up where it belongs."""
        parts = DTensor.from_local(mine, self.mesh, [Shard(3)], run_check=False)
        whole = parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        ranks = self.mesh.size()
        return whole.unflatten(3, (2 * ranks, -1))[:, :, :, _in_order(ranks)].flatten(3, 4)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Each of the two chunks sees the sequence up to its own end."""
        rank, ranks = self.mesh.get_local_rank(), self.mesh.size()
        length = q.shape[2] // 2
        out = []
        for chunk, queries in zip((rank, 2 * ranks - 1 - rank), q.split(length, dim=2), strict=True):
            seen = (chunk + 1) * length
            # As a mask, since is_causal would align the triangle with the first key, not with the last.
            mask = torch.ones(length, seen, dtype=torch.bool, device=q.device).tril(seen - length)
            gqa = q.shape[1] != k.shape[1]
            out.append(F.scaled_dot_product_attention(queries, k[:, :, :seen], v[:, :, :seen], mask, enable_gqa=gqa))
        return torch.cat(out, dim=2)


def apply_context(block: nn.Module, plan: ParallelPlan, mesh: DeviceMesh, recompute: bool) -> None:
    """Put attention over the cp axis in the place of a block's kernel."""
    block.set_submodule(plan.attention, ContextAttention(mesh, recompute))

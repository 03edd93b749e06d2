"""Expert parallelism (Lepikhin et al. 2020, "GShard", arXiv:2006.16668): ranks hold different experts, and send each other the
hidden states of the tokens that the router has assigned to them.

The tokens of a rank are its own: with tensor parallelism, the tp ranks of a sequence route different tokens. So no expert's
result is computed twice, and tensor parallelism does not split experts.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from models.moe import Experts, MixtureOfExperts, Router
from models.row_groups import permute
from trainer.parallel.activation_checkpoint import Forward
from trainer.parallel.tensor import Local


class AllToAllExchange(nn.Module):
    """Sends rows to the ranks that hold their experts, and the results back."""

    def __init__(self, ep: DeviceMesh):
        """ep: the ep axis."""
        super().__init__()
        self.group, self.ranks = ep.get_group(), ep.size()

    def forward(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the results of the experts, (rows, dim).

        Args:
            experts: This rank's experts. Its forward is (rows, counts) -> results.
            rows: Hidden states in the order of their experts, (rows, dim).
            counts: Number of rows of each expert of the layer, (experts,), int64.
        """
        sent = counts.view(self.ranks, -1)  # (rank that has the expert, its experts)
        received = _all_to_all(counts, self.group).view_as(sent)  # (rank that has sent the rows, this rank's experts)
        sizes_sent, sizes_received = split_sizes(len(rows), sent, received)
        arrived = wait_tensor(all_to_all_single_autograd(rows, sizes_received, sizes_sent, self.group))
        # From the order (sending rank, expert) to the order (expert, sending rank).
        num_experts = received.shape[1]
        expert_of = torch.arange(num_experts, device=counts.device).repeat(self.ranks)
        expert_of = expert_of.repeat_interleave(received.flatten(), output_size=sum(sizes_received))
        order = expert_of.argsort(stable=True)
        inverse = order.argsort()
        results = permute(experts(permute(arrived, order, inverse), received.sum(0)), inverse, order)
        return wait_tensor(all_to_all_single_autograd(results, sizes_sent, sizes_received, self.group))


def split_sizes(num_rows: int, sent: Tensor, received: Tensor) -> tuple[list[int], list[int]]:
    """Return the numbers of rows that this rank sends to each rank and receives from it. The host waits for the counts.
    The planner, which has no counts, replaces this function.

    Args:
        num_rows: Number of rows that this rank sends.
        sent: Rows for each expert, (ranks, experts per rank), int64.
        received: Rows from each rank, (ranks, experts per rank), int64.
    """
    to_ranks, from_ranks = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    return to_ranks, from_ranks


def _all_to_all(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    return received


def apply_experts(model: nn.Module, tp: DeviceMesh, ep: DeviceMesh, sequence_parallel: bool) -> None:
    """Distribute the mixtures of experts of a model, in place.

    Args:
        model: Its experts are not sharded yet.
        tp: The tp axis.
        ep: The ep axis.
        sequence_parallel: Whether tp ranks hold different tokens of the residual stream.
    """
    for module in model.modules():
        if isinstance(module, Router) and tp.size() > 1:
            # The tp ranks route different tokens, so their gradients are summed.
            Local(Replicate(), Partial())._apply(module, tp)
        elif isinstance(module, Experts) and ep.size() > 1:
            Local(Shard(0), Shard(0))._apply(module, ep)
        elif isinstance(module, MixtureOfExperts):
            if ep.size() > 1:
                module.exchange = AllToAllExchange(ep)
            if tp.size() > 1 and not sequence_parallel:
                module.routed = partial(_forward_on_own_tokens, module.routed, tp)


def _forward_on_own_tokens(forward: Forward, tp: DeviceMesh, x: Tensor, *args: Any) -> Tensor:
    """Apply the routed experts to this rank's part of the sequence, and gather the results. x: (batch, seq, dim)."""
    own = DTensor.from_local(x, tp, [Replicate()], run_check=False).redistribute(placements=[Shard(1)]).to_local()
    result = DTensor.from_local(forward(own, *args), tp, [Shard(1)], run_check=False)
    return result.redistribute(placements=[Replicate()]).to_local()

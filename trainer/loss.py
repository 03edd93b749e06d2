"""Chunked, vocabulary-parallel cross-entropy. The logits exist for only one chunk of tokens at a time. Under tensor
parallelism, each rank computes only the logits of its own vocabulary rows."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial

from trainer.batch import IGNORE_INDEX

_ROWS = 8192
"""Number of weight rows whose gradients are accumulated at a time, unless the device can add a product of another dtype."""


def _add_product(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """Add the product of two matrices to `total`, which is fp32. If is_first is true, the values of `total` are not used."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=0 if is_first else 1, out=total)
        return
    if is_first:
        total.zero_()
    if a.device.type != "cpu":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        return
    # The product has the dtype of the factors. Computed a few rows at a time, it needs little memory.
    for rows, factor in zip(total.split(_ROWS), a.split(_ROWS), strict=True):
        rows += factor @ b


def _loss_and_gradient(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    first_row: int,
    group: ProcessGroup | None,
    softcap: float | None,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the summed cross-entropy of some tokens over the full vocabulary, and its gradient for the logits of this rank's
    vocabulary rows, (tokens, rows) in the weight's dtype.

    hidden: (tokens, dim). weight: this rank's vocabulary rows, (rows, dim). labels: (tokens,). first_row: index of the first of
    these rows. group: ranks over which the vocabulary is sharded, or None if this rank has the full vocabulary. softcap: limit of
    the logits, see Output in models/components.py.
    """
    logits = F.linear(hidden, weight).float()
    if softcap is not None:
        tanh = (logits / softcap).tanh_()
        torch.mul(tanh, softcap, out=logits)
    is_target = (labels != IGNORE_INDEX)[:, None]
    target_rows, is_on_rank = labels[:, None].where(is_target, 0), is_target
    largest = logits.amax(-1, keepdim=True)
    if group is not None:
        target_rows = target_rows - first_row
        is_on_rank = is_target & (target_rows >= 0) & (target_rows < logits.shape[1])
        target_rows = target_rows.where(is_on_rank, 0)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    # In place, because the logits are the largest tensor of a step.
    logits -= largest
    target_logits = logits.gather(1, target_rows)
    sums = logits.exp_().sum(-1, keepdim=True)
    if group is not None:
        sums_and_targets = torch.stack((sums, target_logits * is_on_rank))
        dist.all_reduce(sums_and_targets, dist.ReduceOp.SUM, group)
        sums, target_logits = sums_and_targets
    total = ((sums.log() - target_logits) * is_target).sum()
    if not needs_gradient:
        return total, None
    if torch.compiler.is_compiling():
        is_target_row = torch.arange(logits.shape[1], device=logits.device) == target_rows.where(is_on_rank, -1)
        logits = (logits / sums - is_target_row.float()) * is_target
    else:
        logits.mul_(is_target / sums).scatter_add_(1, target_rows, -is_on_rank.float())
    if softcap is not None:
        logits *= tanh.square_().neg_().add_(1)
    return total, logits.to(weight.dtype)


@cache
def _compiled_loss_and_gradient() -> Callable[..., tuple[Tensor, Tensor | None]]:
    return torch.compile(_loss_and_gradient, fullgraph=True, dynamic=False)


def chunk_starts(num_tokens: int, chunk_tokens: int) -> Sequence[int]:
    """Return the index of each chunk's first token. Planning replaces this function by one that simulates a few chunks."""
    return range(0, num_tokens, chunk_tokens)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the target tokens' cross-entropy in fp32, computed from hidden states and the output projection's weight.

    Forward computes each chunk's gradients while the chunk's logits exist. Logits are therefore neither saved nor recomputed.
    Backward only scales the gradients."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        shard: tuple[int, ProcessGroup | None],
        softcap: float | None,
        chunk_tokens: int,
        compiled: bool,
        needs_gradient: bool,
    ) -> Tensor:
        """hidden: (tokens, dim); weight: this rank's vocabulary rows, (rows, dim); labels: (tokens,). shard: arguments first_row
        and group of _loss_and_gradient. needs_gradient: whether a backward follows. The gradient of hidden is partial: its sum
        over the ranks is the full gradient."""
        compute = _compiled_loss_and_gradient() if compiled and shard[1] is None else _loss_and_gradient
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if needs_gradient else None
        trains_weight = needs_gradient and ctx.needs_input_grad[1]
        grad_weight = torch.empty_like(weight, dtype=torch.float32) if trains_weight else None
        for start in chunk_starts(hidden.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            loss, grad_logits = compute(hidden[chunk], weight, labels[chunk], *shard, softcap, needs_gradient)
            total += loss
            if needs_gradient:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if trains_weight:
                _add_product(grad_weight, grad_logits.T, hidden[chunk], is_first=start == 0)
            del grad_logits  # before the next chunk's logits are allocated
        if needs_gradient:
            ctx.save_for_backward(grad_hidden, grad_weight)
            ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad_total: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled_weight = None
        if grad_weight is not None:
            # Scale in fp32 and round once; on GPUs this allocates no second fp32 tensor.
            scaled_weight = torch.empty_like(grad_weight, dtype=ctx.weight_dtype)
            torch.mul(grad_weight, grad_total, out=scaled_weight)
        return grad_hidden * grad_total, scaled_weight, None, None, None, None, None, None


class CrossEntropyHead:
    """The head that the model's output module applies. It maps hidden states to the summed loss of the target tokens."""

    def __init__(self, labels: Tensor, chunk_tokens: int, compiled: bool = False):
        """labels: (batch, seq). chunk_tokens: number of tokens whose logits exist at the same time. compiled: whether to compile
        the operations between the matrix products. With tensor parallelism they contain collectives and are not compiled."""
        self.labels = labels
        self.chunk_tokens = chunk_tokens
        self.compiled = compiled

    def __call__(self, hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
        """hidden: (batch, seq, dim); weight: (vocab, dim). Under tensor parallelism both are DTensors: hidden is replicated,
        weight is sharded along the vocabulary. softcap: limit of the logits. Returns the summed loss, a scalar in fp32."""
        shard = 0, None
        if isinstance(weight, DTensor):
            mesh = weight.device_mesh
            rows_per_rank = -(-weight.shape[0] // mesh.size())  # as in DTensor: the last ranks may have fewer
            shard = rows_per_rank * mesh.get_local_rank(), mesh.get_group()
            hidden = hidden.to_local(grad_placements=[Partial()])  # each rank's rows contribute to the gradient
            weight = weight.to_local()
        # Read here: inside the autograd function grad mode is off, and its inputs require gradients in evaluation too.
        needs_gradient = torch.is_grad_enabled()
        return _ChunkedCrossEntropy.apply(
            hidden.flatten(0, 1),
            weight,
            self.labels.flatten(),
            shard,
            softcap,
            self.chunk_tokens,
            self.compiled,
            needs_gradient,
        )

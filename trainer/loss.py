"""Token cross-entropy whose logits never exist as a whole: neither all tokens' nor, under tensor parallelism, all of the
vocabulary's."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial

from trainer.batch import IGNORE_INDEX

_ROWS = 8192
"""Rows of the weight whose gradient is added at a time: the product is in the weight's precision, the sum in fp32."""


@dataclass(frozen=True)
class _VocabShard:
    """The rows of the vocabulary that this rank has."""

    first: int
    count: int
    group: ProcessGroup | None
    """The ranks that have the other rows; None: there are none."""

    @classmethod
    def of(cls, weight: Tensor) -> "_VocabShard":
        if not isinstance(weight, DTensor):
            return cls(0, weight.shape[0], None)
        mesh = weight.device_mesh
        each = -(-weight.shape[0] // mesh.size())  # as DTensor cuts: the last ranks have what is left
        return cls(each * mesh.get_local_rank(), weight.to_local().shape[0], mesh.get_group())

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """logits: (tokens, rows of this rank), fp32; targets: (tokens, 1), numbers in the whole vocabulary.

        Returns the cross-entropies of all ranks' logits together, their normalizers, the targets as rows of this rank, and
        whether it has them; each (tokens, 1).
        """
        rows = targets - self.first
        here = (rows >= 0) & (rows < self.count)
        rows = rows.where(here, 0)
        largest = self._reduce(logits.amax(-1, keepdim=True), dist.ReduceOp.MAX)
        sums = (logits - largest).exp_().sum(-1, keepdim=True)
        target_logits = logits.gather(1, rows) * here
        sums, target_logits = self._reduce(torch.stack((sums, target_logits)), dist.ReduceOp.SUM)
        normalizers = largest + sums.log()
        return normalizers - target_logits, normalizers, rows, here

    def _reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.group is not None:
            dist.all_reduce(tensor, operation, self.group)
        return tensor


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies of the targets, fp32, from hidden states and the weight of the output projection.

    The gradients are made chunk by chunk during forward, while a chunk's logits exist: no logits are kept, and none are
    computed twice. Backward only scales them.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, rows: _VocabShard, chunk_tokens: int, needs_gradient: bool
    ) -> Tensor:
        """hidden: (tokens, dim); weight: (rows, dim); labels: (tokens,). needs_gradient: whether a backward follows. The
        gradient of hidden is this rank's part of a sum."""
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if needs_gradient else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_gradient else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = F.linear(hidden[chunk], weight).float()  # (chunk, rows)
            is_target = (labels[chunk] != IGNORE_INDEX)[:, None]
            targets = labels[chunk][:, None].where(is_target, 0)
            losses, normalizers, target_rows, here = rows.cross_entropy(logits, targets)
            total += (losses * is_target).sum()
            if needs_gradient:
                logits.sub_(normalizers).exp_().scatter_add_(1, target_rows, -here.float()).mul_(is_target)
                grad_logits = logits.to(weight.dtype)
                grad_hidden[chunk] = grad_logits @ weight
                for some in range(0, rows.count, _ROWS):
                    part = slice(some, some + _ROWS)
                    grad_weight[part] += grad_logits[:, part].T @ hidden[chunk]
                del grad_logits
            del logits  # before the next chunk's are made
        if needs_gradient:
            ctx.save_for_backward(grad_hidden, grad_weight)
            ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad_total: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        # Scaled in fp32 and rounded once; on GPUs without a second fp32 table.
        scaled_weight = torch.empty_like(grad_weight, dtype=ctx.weight_dtype)
        torch.mul(grad_weight, grad_total, out=scaled_weight)
        return grad_hidden * grad_total, scaled_weight, None, None, None, None


class CrossEntropyHead:
    """What the network's output module applies to its input: hidden states to the summed loss of their targets."""

    def __init__(self, labels: Tensor, chunk_tokens: int):
        """labels: (batch, seq). chunk_tokens: tokens whose logits exist at the same time."""
        self.labels = labels
        self.chunk_tokens = chunk_tokens

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden: (batch, seq, dim); weight: (vocab, dim); under tensor parallelism DTensors, the hidden states whole on every
        rank, the weight cut along the vocabulary. Returns the sum over all targets, fp32, a scalar."""
        rows = _VocabShard.of(weight)
        if isinstance(weight, DTensor):
            hidden = hidden.to_local(grad_placements=[Partial()])  # each rank's rows give a part of it
            weight = weight.to_local()
        # Asked here: inside the function grad mode is always off, and its inputs claim to need gradients in evaluation too.
        needs_gradient = torch.is_grad_enabled()
        return _ChunkedCrossEntropy.apply(
            hidden.flatten(0, 1), weight, self.labels.flatten(), rows, self.chunk_tokens, needs_gradient
        )

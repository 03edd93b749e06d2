"""Token cross-entropy whose logits never exist as a whole."""

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.batch import IGNORED


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies of the targets, fp32, from hidden states and the weight of the output projection.

    The gradients are made chunk by chunk during forward, while a chunk's logits exist: no logits are kept, and none are
    computed twice. Backward only scales them.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, needs_gradient: bool) -> Tensor:
        """hidden: (tokens, dim); weight: (vocab, dim); labels: (tokens,). needs_gradient: whether a backward follows."""
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if needs_gradient else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_gradient else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = F.linear(hidden[rows], weight).float()  # (chunk, vocab)
            is_target = labels[rows] != IGNORED
            targets = labels[rows].where(is_target, 0)[:, None]
            log_normalizer = logits.logsumexp(-1, keepdim=True)
            losses = (log_normalizer - logits.gather(1, targets)).squeeze(1)
            total += (losses * is_target).sum()
            if needs_gradient:
                grad_logits = (logits - log_normalizer).exp_()
                grad_logits.scatter_add_(1, targets, torch.full_like(log_normalizer, -1.0))
                grad_logits = (grad_logits * is_target[:, None]).to(weight.dtype)
                grad_hidden[rows] = grad_logits @ weight
                grad_weight += grad_logits.T @ hidden[rows]
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
        return grad_hidden * grad_total, scaled_weight, None, None, None


class CrossEntropyHead:
    """What the network's output module applies to its input: hidden states to the summed loss of their targets."""

    def __init__(self, labels: Tensor, chunk_tokens: int):
        """labels: (batch, seq). chunk_tokens: tokens whose logits exist at the same time."""
        self.labels = labels
        self.chunk_tokens = chunk_tokens

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden: (batch, seq, dim); weight: (vocab, dim). Returns the sum over all targets, fp32, a scalar."""
        # Asked here: inside the function grad mode is always off, and its inputs claim to need gradients in evaluation too.
        needs_gradient = torch.is_grad_enabled()
        return _ChunkedCrossEntropy.apply(
            hidden.flatten(0, 1), weight, self.labels.flatten(), self.chunk_tokens, needs_gradient
        )

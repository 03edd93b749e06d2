"""Chunked, vocabulary-parallel cross-entropy. The logits exist for only one chunk of tokens at a time. Under tensor
parallelism, each rank computes only the logits of its own vocabulary rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial

from models.spec import Head
from trainer.batch import IGNORE_INDEX, Batch
from trainer.runtime.matmul import addmm_fp32


def _losses_and_gradient(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    first_row: int,
    group: ProcessGroup | None,
    softcap: float | None,
    grad_losses: Tensor | None,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the cross-entropy of some tokens over the full vocabulary, their z-loss, and the gradient of both for the logits.

    Args:
        hidden: (tokens, dim).
        weight: This rank's vocabulary rows, (rows, dim).
        labels: (tokens,).
        first_row: Index of this rank's first vocabulary row.
        group: Ranks over which the vocabulary is sharded. None: this rank has the full vocabulary.
        softcap: Limit of the logits, see Output in models/components.py.
        grad_losses: Gradient of each token's loss, (tokens, 1). None: no gradient is computed.
        z_loss: Factor of the z-loss in what the gradient belongs to. 0: no z-loss is computed.

    Returns:
        The cross-entropies, the logit of each target minus the largest logit, and the squares of the log-sum-exp of the logits,
        each (tokens,) in fp32, and the gradient of this rank's logits, (tokens, rows) in the weight's dtype. All but the second
        are zero for tokens without a target.
    """
    logits = F.linear(hidden, weight).float()
    if softcap is not None:
        tanh = (logits / softcap).tanh_()
        torch.mul(tanh, softcap, out=logits)
    labels = labels[:, None]
    is_target = is_on_rank = labels != IGNORE_INDEX
    target_rows = labels.clamp(min=0)
    largest = logits.amax(-1, keepdim=True)
    if group is not None:
        target_rows = target_rows - first_row
        is_on_rank = is_target & (target_rows >= 0) & (target_rows < logits.shape[1])
        target_rows = target_rows.where(is_on_rank, 0)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    # In place, because the logits are the largest tensor of a step.
    logits -= largest
    target_logits = own_target_logits = logits.gather(1, target_rows)
    sums = logits.exp_().sum(-1, keepdim=True)
    if group is not None:
        sums_and_targets = torch.stack((sums, target_logits * is_on_rank))
        dist.all_reduce(sums_and_targets, dist.ReduceOp.SUM, group)
        sums, target_logits = sums_and_targets
    margins = target_logits.squeeze(1)
    losses = ((sums.log() - target_logits) * is_target).squeeze(1)
    squares = log_sums = None
    if z_loss:
        log_sums = sums.log() + largest
        squares = (log_sums.square() * is_target).squeeze(1)
    if grad_losses is None:
        return losses, margins, squares, None
    scale = is_target * grad_losses
    per_exponential = scale / sums
    if log_sums is not None:
        per_exponential = per_exponential * (1 + 2 * z_loss * log_sums)  # the gradient of the square is 2 log_sums p
    logits *= per_exponential
    # Gradient of the target's logit, p - 1, in fp32: bf16 rounds p near 1 to 1. If the target is on another rank, target_rows is
    # 0 and nothing is subtracted, so row 0 is rewritten with its own value.
    target_gradients = own_target_logits.exp() * per_exponential - scale * is_on_rank
    if softcap is not None:
        slope = tanh.square_().neg_().add_(1)
        logits *= slope
        target_gradients *= slope.gather(1, target_rows)
    # Written after the cast: compiled code then does not write the fp32 gradient of the logits. By index, because scatter_ in
    # bf16 allocates a copy on CPUs.
    grad_logits = logits.to(weight.dtype)
    tokens = torch.arange(len(grad_logits), device=grad_logits.device)
    grad_logits[tokens, target_rows[:, 0]] = target_gradients[:, 0].to(weight.dtype)
    return losses, margins, squares, grad_logits


@cache
def _compiled_losses_and_gradient() -> Callable[..., tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
    return torch.compile(_losses_and_gradient, fullgraph=True, dynamic=False)


def chunk_starts(num_tokens: int, chunk_tokens: int) -> Sequence[int]:
    """Return the index of each chunk's first token. Planning replaces this function by one that simulates a few chunks."""
    return range(0, num_tokens, chunk_tokens)


class _Results(NamedTuple):
    """Token losses and their gradients. What is not computed is None."""

    losses: Tensor
    """(tokens,), fp32."""
    margins: Tensor | None
    """Logit of each target minus the largest logit, (tokens,), fp32. Without gradients only."""
    squares: Tensor | None
    """Squares of the log-sum-exp of the logits, (tokens,), fp32."""
    grad_hidden: Tensor | None
    """(tokens, dim). Partial: its sum over the ranks is the full gradient."""
    grad_weight: Tensor | None
    """(rows, dim), fp32."""


@dataclass(frozen=True)
class _Projection:
    """The output projection of one microbatch, applied to a few tokens at a time."""

    labels: Tensor
    """Labels, (tokens,)."""
    first_row: int
    group: ProcessGroup | None
    softcap: float | None
    """See _losses_and_gradient."""
    chunk_tokens: int
    compiled: bool
    z_loss: float = 0.0
    """See _losses_and_gradient."""
    num_predictions: int = 0
    """Number of parts of equal size that follow the first part of the tokens, and whose hidden states are those of layers for
    multi-token prediction."""
    prediction_weight: float = 0.0
    """Weight of the mean of these parts' losses in what the gradient belongs to."""

    def weights(self, hidden: Tensor) -> Tensor:
        """Return the gradient of each token's loss, (tokens, 1), fp32."""
        weights = hidden.new_ones(
            1 + self.num_predictions, len(hidden) // (1 + self.num_predictions), dtype=torch.float32
        )
        if self.num_predictions:
            weights[1:] = self.prediction_weight / self.num_predictions
        return weights.view(-1, 1)

    def sums(self, results: _Results) -> list[Tensor]:
        """Return the summed loss of the tokens, the mean of the sums of the predictions, if there are any, and the sum of the
        squares, if there are any. The last is without those of the predictions."""
        first, *predicted = results.losses.chunk(1 + self.num_predictions)
        sums = [first.sum(), torch.stack(predicted).sum() / len(predicted)] if predicted else [first.sum()]
        return sums if results.squares is None else [*sums, results.squares[: len(first)].sum()]

    def run(self, hidden: Tensor, weight: Tensor, grad_losses: Tensor | None, trains_weight: bool) -> _Results:
        """Compute the token losses and their gradients, chunk by chunk.

        Args:
            hidden: (tokens, dim).
            weight: This rank's vocabulary rows, (rows, dim).
            grad_losses: Gradient of each token's loss, (tokens, 1). None: no gradients are computed.
            trains_weight: Whether to compute the gradient of the weight.
        """
        compute = _compiled_losses_and_gradient() if self.compiled and self.group is None else _losses_and_gradient
        losses = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        margins = torch.empty_like(losses) if grad_losses is None else None
        squares = torch.empty_like(losses) if self.z_loss else None
        grad_hidden = grad_weight = None
        if grad_losses is not None:
            grad_hidden = torch.empty_like(hidden)
            grad_weight = torch.empty_like(weight, dtype=torch.float32) if trains_weight else None
        shard = self.first_row, self.group
        for start in chunk_starts(hidden.shape[0], self.chunk_tokens):
            chunk = slice(start, start + self.chunk_tokens)
            grads = None if grad_losses is None else grad_losses[chunk]
            losses[chunk], own_margins, of_chunk, grad_logits = compute(
                hidden[chunk], weight, self.labels[chunk], *shard, self.softcap, grads, self.z_loss
            )
            if margins is not None:
                margins[chunk] = own_margins
            if squares is not None:
                squares[chunk] = of_chunk
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                addmm_fp32(grad_weight, grad_logits.T, hidden[chunk], is_first=start == 0)
            del grad_logits  # before the next chunk's logits are allocated
        return _Results(losses, margins, squares, grad_hidden, grad_weight)


class _SummedLoss(torch.autograd.Function):
    """Sum of the token losses, alone or with the other sums of _Projection.sums. Forward computes each chunk's gradients while
    the chunk's logits exist. Logits are therefore neither saved nor recomputed.

    The gradient of the first sum includes those of the others, with their weights, and the others have none. So the loss stays
    comparable between runs.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, projection: _Projection, needs_gradient: bool) -> Tensor:
        """needs_gradient: whether a backward follows."""
        cast = weight.to(hidden.dtype)
        weights = projection.weights(hidden) if needs_gradient else None
        results = projection.run(hidden, cast, weights, ctx.needs_input_grad[1])
        if needs_gradient:
            ctx.save_for_backward(results.grad_hidden, results.grad_weight)
            ctx.weight_dtype = weight.dtype
        total, *others = projection.sums(results)
        return torch.stack((total, *others)) if others else total

    @staticmethod
    def backward(ctx, grad_total: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_total.dim():
            grad_total = grad_total[0]
        # Not in place: zero-bubble schedules run this twice, for the gradients of the inputs and then for those of the weights.
        if grad_weight is not None:
            # In the weight's dtype at once: this is one of the largest tensors of a step.
            out = torch.empty_like(grad_weight, dtype=ctx.weight_dtype)
            grad_weight = torch.mul(grad_weight, grad_total, out=out)
        return grad_hidden * grad_total, grad_weight, None, None


class _TokenLosses(torch.autograd.Function):
    """The token losses. Their gradients are not known in forward, so backward computes the logits of each chunk again."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, projection: _Projection) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.projection = projection
        return projection.run(hidden, weight.to(hidden.dtype), None, trains_weight=False).losses

    @staticmethod
    def backward(ctx, grad_losses: Tensor):
        hidden, weight = ctx.saved_tensors
        cast = weight.to(hidden.dtype)
        results = ctx.projection.run(hidden, cast, grad_losses[:, None], ctx.needs_input_grad[1])
        grad_weight = None if results.grad_weight is None else results.grad_weight.to(weight.dtype)
        return results.grad_hidden, grad_weight, None


def _local_projection(
    labels: Tensor,
    hidden: Tensor,
    weight: Tensor,
    softcap: float | None,
    chunk_tokens: int,
    compiled: bool,
    **others: Any,
) -> tuple[Tensor, Tensor, _Projection]:
    """Return this rank's hidden states, (tokens, dim), its vocabulary rows of the weight, and the projection.

    Args:
        labels: In the order of the hidden states.
        hidden: (batch, seq, dim). Under tensor parallelism, a replicated DTensor.
        weight: (vocab, dim). Under tensor parallelism, a DTensor that is sharded along the vocabulary.
        others: Further fields of _Projection.
    """
    weight, first_row, group = local_rows(weight)
    if isinstance(hidden, DTensor):
        hidden = hidden.to_local(grad_placements=[Partial()])  # each rank's rows contribute to the gradient
    projection = _Projection(labels.flatten(), first_row, group, softcap, chunk_tokens, compiled, **others)
    return hidden.flatten(0, 1), weight, projection


def local_rows(weight: Tensor) -> tuple[Tensor, int, dist.ProcessGroup | None]:
    """Return this rank's rows of a weight, the index of the first one, and the ranks that share the rows.

    weight: (vocab, dim). Under tensor parallelism, a DTensor that is sharded along the vocabulary.
    """
    if not isinstance(weight, DTensor):
        return weight, 0, None
    mesh = weight.device_mesh
    rows_per_rank = -(-weight.shape[0] // mesh.size())  # as in DTensor: the last ranks may have fewer
    return weight.to_local(), rows_per_rank * mesh.get_local_rank(), mesh.get_group()


def token_losses(
    labels: Tensor, hidden: Tensor, weight: Tensor, softcap: float | None, chunk_tokens: int, compiled: bool
) -> Tensor:
    """Return the cross-entropy of each token, (batch, seq) in fp32, which is zero for tokens without a target. The arguments are
    those of CrossEntropyHead and of its call."""
    args = _local_projection(labels, hidden, weight, softcap, chunk_tokens, compiled)
    return _TokenLosses.apply(*args).view_as(labels)


@torch.no_grad()
def token_log_probs(
    labels: Tensor, hidden: Tensor, weight: Tensor, softcap: float | None, chunk_tokens: int, compiled: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target, (batch, seq) in fp32, which is zero for tokens without a target, and whether no
    token is more likely, (batch, seq), boolean. The arguments are those of CrossEntropyHead and of its call."""
    # Uncompiled with a softcap: compiled code may compute its tanh for the target and for the largest logit in different ways.
    compiled = compiled and softcap is None
    hidden, weight, projection = _local_projection(labels, hidden, weight, softcap, chunk_tokens, compiled)
    results = projection.run(hidden, weight.to(hidden.dtype), None, trains_weight=False)
    is_likeliest = (results.margins == 0).view_as(labels) | (labels == IGNORE_INDEX)
    return -results.losses.view_as(labels), is_likeliest


class CrossEntropyHead:
    """The head that the model's output module applies. It maps hidden states to the summed loss of the target tokens."""

    def __init__(
        self,
        labels: Tensor,
        chunk_tokens: int,
        compiled: bool = False,
        z_loss: float = 0.0,
        prediction_weight: float = 0.0,
    ):
        """Create the head of one microbatch.

        Args:
            labels: (batch, seq), or (batch, seq, 1 + prediction layers).
            chunk_tokens: Number of tokens whose logits exist at the same time.
            compiled: Whether to compile the operations between the matrix products. With tensor parallelism they contain
                collectives and are not compiled.
            z_loss: Factor of the mean square of the log-sum-exp of the logits, which is minimized too.
            prediction_weight: Factor of the mean loss of the prediction layers, which is minimized too.
        """
        self.labels = labels
        self.chunk_tokens = chunk_tokens
        self.compiled = compiled
        self.z_loss = z_loss
        self.prediction_weight = prediction_weight

    def __call__(self, hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
        """Return the summed loss, a scalar in fp32. With prediction layers or a z-loss, a vector: the summed loss, the mean over
        the prediction layers of their summed losses, and the summed squares of the log-sum-exp of the logits. The gradient of the
        first is that of the summed loss plus those of the others times their factors; the z-loss counts in the logits of
        prediction layers too.

        Args:
            hidden: (batch, seq, dim), or ((1 + prediction layers) batch, seq, dim). Under tensor parallelism, a replicated
                DTensor.
            weight: (vocab, dim). Under tensor parallelism, a DTensor that is sharded along the vocabulary.
            softcap: Limit of the logits.
        """
        # Read here: inside the autograd function grad mode is off, and its inputs require gradients in evaluation too.
        needs_gradient = torch.is_grad_enabled()
        labels, num_predictions = self.labels, 0
        if labels.dim() == 3:
            labels, num_predictions = labels.movedim(-1, 0), labels.shape[-1] - 1
        args = _local_projection(
            labels,
            hidden,
            weight,
            softcap,
            self.chunk_tokens,
            self.compiled,
            z_loss=self.z_loss,
            num_predictions=num_predictions,
            prediction_weight=self.prediction_weight,
        )
        return _SummedLoss.apply(*args, needs_gradient)


@dataclass(frozen=True)
class CrossEntropy:
    """Objective of language modeling: the mean cross-entropy of the target tokens. The fields are arguments of
    CrossEntropyHead.

    `z_loss` keeps the log-sum-exp of the logits near 0 (Chowdhery et al. 2022, "PaLM", arXiv:2204.02311, section 5);
    `prediction_weight` is the factor lambda of multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437, equation 25). `loss`
    is the cross-entropy alone, and the metrics are without their factors. The loss of prediction layers is a mean over all target
    tokens too, although the last ones of a document have no later token."""

    chunk_tokens: int
    compiled: bool
    z_loss: float = 0.0
    prediction_weight: float = 0.0
    unit: ClassVar[str] = "num_targets"

    @property
    def metrics(self) -> tuple[str, ...]:
        factors = {"prediction_loss": self.prediction_weight, "z_loss": self.z_loss}
        return tuple(name for name, factor in factors.items() if factor)

    @property
    def shape(self) -> tuple[int, ...]:
        return (1 + len(self.metrics),) if self.metrics else ()

    def head(self, labels: Tensor, documents: Tensor, reference: Tensor | None) -> Head:
        return CrossEntropyHead(labels, self.chunk_tokens, self.compiled, self.z_loss, self.prediction_weight)

    def count(self, batch: Batch) -> Tensor:
        return (batch.labels != IGNORE_INDEX).sum()

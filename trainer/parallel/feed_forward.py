"""Feed-forward layers that save two tensors for backward instead of four. The compiler does this by itself."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.components import FeedForward, gelu_tanh
from models.context import Context
from trainer.parallel.saved_tensors import call_with_recomputed

aten = torch.ops.aten

_DERIVATIVES: dict[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] = {
    F.silu: aten.silu_backward,
    gelu_tanh: partial(aten.gelu_backward, approximate="tanh"),
}
"""Activation function -> function (gradient, input) that returns the gradient of the input."""


class GatedProduct(torch.autograd.Function):
    """activation(gate) * up. Autograd saves the two factors, but not activation(gate)."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.factors = activation, None
        return activation(gate).mul_(up)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.factors or ctx.saved_tensors
        ctx.factors = None
        return _DERIVATIVES[ctx.activation](gradient * up, gate), ctx.activation(gate).mul_(gradient), None

    @staticmethod
    def recompute(ctx: Any) -> Tensor:
        """Compute the result of forward from the saved factors. Backward must not have run yet. ctx: the result's `grad_fn`."""
        gate, up = ctx.factors = ctx.saved_tensors  # an activation checkpoint provides them only once
        return ctx.activation(gate).mul_(up)


def apply_gated_products(model: nn.Module) -> None:
    """Replace the forward of each feed-forward layer whose activation has a known derivative, in place."""
    for module in model.modules():
        if isinstance(module, FeedForward) and module.activation in _DERIVATIVES:
            module.forward = partial(_forward, module)


def _forward(layer: FeedForward, x: Tensor, context: Context | None = None) -> Tensor:
    """x: (batch, seq, dim)."""
    hidden = GatedProduct.apply(layer.w1(x), layer.w3(x), layer.activation)  # (batch, seq, local hidden)
    if hidden.grad_fn is None:
        return layer.w2(hidden)
    return call_with_recomputed(layer.w2, hidden, partial(GatedProduct.recompute, hidden.grad_fn))

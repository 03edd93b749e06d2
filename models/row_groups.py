"""Rows in groups, such as the tokens of each expert: their order, and products with one matrix for each group.

torch's grouped kernel refuses fp32 under fake tensors, and so under the compiler and the planner. The operators here call it, and
state their shapes, gradients and floating-point operations themselves.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

ALIGNMENT = 16
"""The strides of the kernel's matrices must be multiples of this number of bytes. Other groups are multiplied one by one."""


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return rows[order]. Backward gathers too: torch's own would add each row to zeros, on a GPU in no fixed order.

    Args:
        rows: (rows, dim).
        order: A permutation, (rows,), int64.
        inverse: Its inverse, (rows,), int64.
    """
    return _Permute.apply(rows, order, inverse)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None


def grouped_product(x: Tensor, weights: Tensor, counts: Tensor, biases: Tensor | None = None) -> Tensor:
    """Return the product of each row and the transposed matrix of its group, plus its bias, (rows, outputs).

    Args:
        x: Rows in the order of the groups, (rows, inputs).
        weights: One matrix for each group, (groups, outputs, inputs).
        counts: Number of rows in each group, (groups,), int64. Their sum is the number of rows.
        biases: One for each group, (groups, outputs). None: zero.
    """
    return _product(x, weights, counts, True, biases)


@torch.library.custom_op("meshwright::grouped_product", mutates_args=())
def _product(x: Tensor, weights: Tensor, counts: Tensor, transposed: bool, biases: Tensor | None) -> Tensor:
    """Return the product of each row and the matrix of its group, or the transposed matrix, plus its bias."""
    matrices = weights.mT if transposed else weights  # (groups, inputs of this product, outputs)
    if _are_aligned(x, weights) and len(x):  # the kernel also refuses products without rows
        product = F.grouped_mm(x, matrices, offs=counts.cumsum(0, dtype=torch.int32))
    else:
        groups = x.split(counts.tolist())
        product = torch.cat([rows @ matrix for rows, matrix in zip(groups, matrices, strict=True)])
    return product if biases is None else product.add_(biases.repeat_interleave(counts, 0, output_size=x.shape[0]))


GROUPED_PRODUCT = torch.ops.meshwright.grouped_product.default
"""The operator, by which activation checkpointing recognizes it."""


@_product.register_fake
def _(x: Tensor, weights: Tensor, counts: Tensor, transposed: bool, biases: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[1 if transposed else 2])


@torch.library.custom_op("meshwright::grouped_outer_product", mutates_args=())
def _outer_product(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of a row's outer products in each group, (groups, columns of a, columns of b)."""
    if _are_aligned(a, b) and len(a):
        return F.grouped_mm(a.mT, b, offs=counts.cumsum(0, dtype=torch.int32))
    groups = counts.tolist()
    return torch.stack([x.mT @ y for x, y in zip(a.split(groups), b.split(groups), strict=True)])


@_outer_product.register_fake
def _(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    return a.new_empty(counts.shape[0], a.shape[1], b.shape[1])


def _are_aligned(*tensors: Tensor) -> bool:
    return all(t.shape[-1] * t.itemsize % ALIGNMENT == 0 for t in tensors)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool, Tensor | None], output: Tensor) -> None:
    x, weights, counts, ctx.transposed, _ = inputs
    needs_x, needs_weights, *_ = ctx.needs_input_grad
    ctx.save_for_backward(x if needs_weights else None, weights if needs_x else None, counts)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, Tensor | None]:
    x, weights, counts = ctx.saved_tensors
    gradient = gradient.contiguous()  # the kernel refuses expanded tensors
    for_x = None if weights is None else _product(gradient, weights, counts, not ctx.transposed, None)
    factors = (gradient, x) if ctx.transposed else (x, gradient)
    for_weights = None if x is None else _outer_product(*factors, counts)
    for_biases = None
    if ctx.needs_input_grad[4]:
        # As a product with ones: it sums in fp32 and in a fixed order, without atomic additions.
        ones = gradient.new_ones(gradient.shape[0], ALIGNMENT // gradient.itemsize)
        for_biases = _outer_product(gradient, ones, counts)[..., 0]
    return for_x, for_weights, None, None, for_biases


_product.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.meshwright.grouped_product)
def _product_flops(x: torch.Size, weights: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * x[0] * weights[1] * weights[2]


@register_flop_formula(torch.ops.meshwright.grouped_outer_product)
def _outer_product_flops(a: torch.Size, b: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * a[0] * a[1] * b[1]

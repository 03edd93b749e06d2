"""Products with weights that are kept in 4 bits (trainer/adapters/nf4.py). Each product dequantizes its weight, in backward once
more, so that only the matrix of one product at a time takes the memory of its values."""

import math
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from models.moe import Experts
from models.row_groups import grouped_product
from trainer.adapters.nf4 import (
    CODES,
    MAXIMA,
    SCALES,
    dequantize,
    pairs_of_levels,
    part_name,
    part_shapes,
    parts_in,
)
from trainer.parallel.shard_product import product_with_shard
from trainer.runtime.dtensor import to_local


def quantize_weights(model: nn.Module, names: Collection[str], is_double: bool, device_type: str) -> None:
    """Replace weights by their parts, which are frozen parameters, sharded like the weight and without values yet, in place.

    Args:
        model: A pipeline stage, on the meta device. Its matrices may be sharded by tensor and expert parallelism.
        names: Weights of linear modules and stacked matrices of experts. Those of other stages are ignored.
        is_double: Whether the scales are quantized too.
        device_type: Of the devices that compute.
    """
    pairs = pairs_of_levels(device_type)
    for name, module in model.named_modules():
        leaves = [leaf for leaf, _ in module.named_parameters(recurse=False) if f"{name}.{leaf}" in names]
        for leaf in leaves:
            _replace_weight(module, leaf, is_double)
        if isinstance(module, Experts) and leaves:
            _replace_expert_products(module, leaves, pairs)
        elif leaves:
            _replace_product(module, pairs)


def _replace_weight(module: nn.Module, leaf: str, is_double: bool) -> None:
    weight = getattr(module, leaf)
    module.register_parameter(leaf, None)
    for part, shape in part_shapes(tuple(weight.shape), is_double).items():
        values = torch.empty(shape, dtype=torch.uint8, device=weight.device)
        if isinstance(weight, DTensor):
            # Ranks that share the columns all need the largest scale of each row.
            splits_columns = weight.placements[0].is_shard(weight.dim() - 1)
            placements = [Replicate()] if part == MAXIMA and splits_columns else weight.placements
            values = distribute_tensor(values, weight.device_mesh, placements, src_data_rank=None)
        module.register_parameter(part_name(leaf, part), nn.Parameter(values, requires_grad=False))


def _replace_product(linear: nn.Linear, pairs: Tensor) -> None:
    """Replace the forward of a linear module, also one that a tensor-parallel style has replaced to compute with local values."""

    def forward(x: Tensor) -> Tensor:
        parts, bias = _local_parts(linear, "weight"), to_local(linear.bias)
        mesh = x.device_mesh if isinstance(x, DTensor) else None
        is_partial = mesh is not None and x.placements[0].is_shard(x.dim() - 1)
        if is_partial and bias is not None:
            bias = bias / mesh.size()
        return product_with_shard(_Product.apply, x, bias, pairs, *parts, mesh=mesh, is_partial=is_partial)

    linear.forward = forward


def _replace_expert_products(experts: Experts, leaves: Collection[str], pairs: Tensor) -> None:
    """Replace the products with the stacked matrices `leaves`, on the rank that holds the experts."""
    base = experts.product

    def product(name: str, rows: Tensor, counts: Tensor, biases: Tensor | None = None) -> Tensor:
        if name not in leaves:
            return base(name, rows, counts, biases)
        return _GroupedProduct.apply(rows, counts, biases, pairs, *_local_parts(experts, name))

    experts.product = product


def _local_parts(module: nn.Module, leaf: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes, scales and, if there are any, the largest scales of the rows, of this rank."""
    parts = {name: to_local(part) for name, part in parts_in(module, leaf).items()}
    return parts[CODES], parts[SCALES], parts.get(MAXIMA)


def _values(pairs: Tensor, codes: Tensor, scales: Tensor, maxima: Tensor | None, dtype: torch.dtype) -> Tensor:
    parts = {CODES: codes, SCALES: scales} | ({} if maxima is None else {MAXIMA: maxima})
    return dequantize(parts, pairs, dtype)


def _values_in_backward(gradient: Tensor, pairs: Tensor, *parts: Tensor | None) -> Tensor:
    """Return the values of a matrix for the gradient of its product. The compiler would compute them once, in forward, and save
    them. To avoid this, the parts depend on the gradient."""
    if torch.compiler.is_compiling():
        zero = (gradient.flatten()[:1].sum() == math.inf).byte() * 0
        parts = [None if part is None else part | zero for part in parts]
    return _values(pairs, *parts, gradient.dtype)


class _Product(torch.autograd.Function):
    """F.linear with a quantized weight. Autograd saves its parts, which FSDP frees and gathers again like any parameter.

    Without *parts: the compiler of torch 2.13 counts the parameters of forward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        pairs: Tensor,
        codes: Tensor,
        scales: Tensor,
        maxima: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(pairs, codes, scales, maxima)
        return F.linear(x, _values(pairs, codes, scales, maxima, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient @ _values_in_backward(gradient, *ctx.saved_tensors), None, None, None, None, None


class _GroupedProduct(torch.autograd.Function):
    """grouped_product with quantized matrices."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        counts: Tensor,
        biases: Tensor | None,
        pairs: Tensor,
        codes: Tensor,
        scales: Tensor,
        maxima: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(counts, pairs, codes, scales, maxima)
        return grouped_product(rows, _values(pairs, codes, scales, maxima, rows.dtype), counts, biases)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        counts, *parts = ctx.saved_tensors  # an activation checkpoint provides them only once
        weights = _values_in_backward(gradient, *parts)
        # The kernel refuses expanded tensors.
        for_rows = grouped_product(gradient.contiguous(), weights.mT, counts)
        return for_rows, None, None, None, None, None, None

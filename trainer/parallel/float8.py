"""Products of linear modules in float8, forward and backward. The parameters keep their dtype; each product rounds its factors.

A factor is multiplied by a scale, so that its largest value fits into the range of float8, and rounded. Scales are powers of two:
they change only the exponent, so a value is rounded to the same number in every layout, although each rank computes the scales of
its own shard and microbatch. The scale matters only for values that leave the normal range of float8: in e4m3 those below 7e-5 of
the largest one. Their rounding error is at most 4.4e-6 of the largest one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.spec import Structure, styles_in_blocks
from trainer.base.config import ConfigError, TrainingConfig
from trainer.base.config.patterns import matching
from trainer.parallel.mesh import ParallelDims
from trainer.parallel.shard_product import product_with_shard
from trainer.parallel.tensor import shard_shape
from trainer.runtime.dtensor import local_factor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16
"""A GPU multiplies float8 matrices whose inner dim and number of columns are multiples of this number."""

_SMALLEST = 1e-12
"""Lower bound of the largest value from which a scale is computed. Without it, a factor of zeros would have an infinite scale."""


def quantize(factor: Tensor, dtype: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
    """Return a factor times its scales in `dtype`, row-major, and the reciprocals of the scales, in fp32.

    Args:
        factor: (rows, columns).
        dtype: E4M3 or E5M2.
        by_row: Whether each row has a scale, (rows, 1). Otherwise there is one for all values, a scalar.
    """
    largest = torch.linalg.vector_norm(factor, torch.inf, -1 if by_row else None, keepdim=by_row).to(torch.float32)
    scale = power_of_two(torch.finfo(dtype).max / largest.clamp(min=_SMALLEST))
    return cast(factor * scale.to(factor.dtype), dtype).contiguous(), scale.reciprocal()


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype)


def power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two that is not above x: its exponent without its fraction. x: positive, fp32, or nan, which
    stays nan."""
    return torch.where(x.isnan(), x, (x.view(torch.int32) & 0x7F800000).view(torch.float32))


def product(a: Tensor, b: Tensor, a_dtype: torch.dtype, by_row: bool, fast_sums: bool = False) -> Tensor:
    """Return a @ b.T of factors that are rounded to float8, (rows of a, rows of b), in the dtype of `a`.

    Args:
        a: (rows, inner).
        b: (columns, inner). It is rounded to E4M3: no GPU multiplies two factors in E5M2.
        a_dtype: E4M3 or E5M2.
        by_row: Whether each row of a factor has a scale.
        fast_sums: Whether a GPU may add products with less precision.
    """
    (a_values, a_scales), (b_values, b_scales) = quantize(a, a_dtype, by_row), quantize(b, E4M3, by_row)
    return multiply(a_values, b_values, a_scales, b_scales, a.dtype, fast_sums)


def multiply(
    a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, dtype: torch.dtype, fast_sums: bool = False
) -> Tensor:
    """Return (a * a_scales) @ (b * b_scales).T of results of `quantize`. See `product`. dtype: of the result."""
    if a.device.type == "cpu":
        # On CPUs with AMX, torch multiplies factors with one scale each in a loop that takes 1,000 times as long.
        a_scales, b_scales = (s.expand(len(t), 1).contiguous() for s, t in ((a_scales, a), (b_scales, b)))
    return torch._scaled_mm(a, b.t(), a_scales, b_scales.t(), out_dtype=dtype, use_fast_accum=fast_sums)


class Float8Product(torch.autograd.Function):
    """rows @ weight.T, with both gradients, in float8. Autograd saves the factors as they were given: backward rounds them again,
    so what frees, gathers and recomputes them works as for other linear modules."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        """Return the product, (tokens, outputs).

        Args:
            ctx: Of autograd.
            rows: (tokens, columns).
            weight: (outputs, columns).
            by_row: As in `product`.
        """
        needs_rows_gradient, needs_weight_gradient, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if needs_weight_gradient else None, weight if needs_rows_gradient else None)
        ctx.by_row = by_row
        return product(rows, weight, E4M3, by_row, fast_sums=True)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        # With one scale for all tokens, gradients need the wider range of e5m2.
        dtype = E4M3 if ctx.by_row else E5M2
        rows_gradient = None if weight is None else product(gradient, weight.t(), dtype, ctx.by_row)
        weight_gradient = None if rows is None else product(gradient.t(), rows.t(), dtype, ctx.by_row)
        return rows_gradient, weight_gradient, None


@dataclass(frozen=True)
class Float8:
    """The linear modules whose products are computed in float8."""

    modules: frozenset[str]
    """Their names in the complete model. Empty: none."""
    by_row: bool
    """Whether each row of a factor has a scale, instead of one for all its values."""


NO_FLOAT8 = Float8(frozenset(), by_row=False)


def resolve_float8(model: nn.Module, structure: Structure, config: TrainingConfig) -> Float8:
    """Return the linear modules that the settings select: those of the blocks, without the excluded ones. Routers, experts, and
    the output are none of them.

    Args:
        model: The complete model.
        structure: Names the blocks.
        config: Names the recipe and the excluded modules.

    Raises:
        ConfigError: A pattern matches nothing, or all modules are excluded.
    """
    if config.float8 == "none":
        return NO_FLOAT8
    blocks = f"{structure.blocks_path}."
    linears = [n for n, m in model.named_modules() if type(m) is nn.Linear and n.startswith(blocks)]
    owners = [name for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    others = {name: "has no products in float8" for name in owners if name not in linears}
    key = "training.float8_exclude"
    excluded = matching(key, config.float8_exclude, linears, "linear module of the blocks", others)
    if len(excluded) == len(linears):
        raise ConfigError(key, "excludes all linear modules of the blocks; see [training] float8")
    return Float8(frozenset(linears) - set(excluded), by_row=config.float8 == "rowwise")


def check_shapes(
    float8: Float8,
    model: nn.Module,
    structure: Structure,
    dims: ParallelDims,
    config: TrainingConfig,
    sequence_parallel: bool,
) -> None:
    """Raise ConfigError for matrices that a GPU would not multiply in float8, on every device.

    Args:
        float8: The modules.
        model: The complete model.
        structure: Names the blocks.
        dims: Degrees.
        config: Size of a microbatch.
        sequence_parallel: Whether tp ranks hold different tokens of the residual stream.
    """
    if not float8.modules:
        return
    styles = styles_in_blocks(model, structure.blocks_path)
    batch, seq_len = config.local_batch_size, config.seq_len
    tp = f" with tp {dims.tp}" if dims.tp > 1 else ""
    for name, module in model.named_modules():
        if name not in float8.modules:
            continue
        style = styles.get(name, "")
        rows, columns = shard_shape(module.weight.shape, style, dims.tp)
        if rows % ALIGNMENT or columns % ALIGNMENT:
            message = (
                f"{name} has a matrix of {rows} x {columns} on each rank{tp}, but float8 needs multiples of {ALIGNMENT}"
            )
            raise ConfigError("training.float8", f"{message}; see [training] float8_exclude")
        ranks = dims.cp * (dims.tp if style == "token" and sequence_parallel else 1)
        if batch * seq_len // ranks % ALIGNMENT:
            degrees = f" / {ranks} ranks" if ranks > 1 else ""
            message = f"local_batch_size {batch} x seq_len {seq_len}{degrees} = {batch * seq_len // ranks} tokens"
            raise ConfigError(
                "training.float8", f"{name} multiplies {message}, but float8 needs a multiple of {ALIGNMENT}"
            )


def apply_float8(model: nn.Module, float8: Float8) -> None:
    """Replace the forward of the linear modules, in place. Tensor parallelism may shard them afterwards."""
    for name, module in model.named_modules():
        if name in float8.modules:
            _replace_forward(module, float8.by_row)


def _product(x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
    return Float8Product.apply(x.flatten(0, -2), weight, by_row).unflatten(0, x.shape[:-1])


def _replace_forward(linear: nn.Linear, by_row: bool) -> None:
    # A function, not a partial, which would give every compiled block its own graph.
    def forward(x: Tensor) -> Tensor:
        """x: (..., columns). With tensor parallelism, the product is that of local tensors."""
        weight, bias = linear.weight, linear.bias
        mesh = weight.device_mesh if isinstance(weight, DTensor) else None
        is_partial = mesh is not None and weight.placements[0].is_shard(1)
        out = product_with_shard(_product, x, local_factor(weight), by_row, mesh=mesh, is_partial=is_partial)
        return out if bias is None else out + bias

    linear.forward = forward

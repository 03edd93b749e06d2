"""Training in double precision, for comparisons of products in float8.

A sum in another order differs in its last bit. In fp32, such a bit changes how some of a million values are rounded to float8, by
6 % of the value, and each change causes others in later layers. So two correct layouts may differ as much as float8 differs from
exact products, and no comparison could tell them from wrong ones. Values that underflow to a subnormal number of float8 have the
same effect, because their error depends on the scale. In double precision, and with exponents without a lower bound, no value is
rounded otherwise.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from models import row_groups
from trainer.optim import optimizer
from trainer.parallel import float8
from trainer.runtime.device import DTYPES
from trainer.runtime.dtensor import to_local

SIGNIFICANT_BITS = {float8.E4M3: 4, float8.E5M2: 3}


def round_significand(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round double-precision values to the significant bits of a float8 dtype, with exponents of any size, and keep their dtype.

    By Veltkamp's splitting: the first sum has as few of the value's bits as remain. The compiler cannot compile frexp in double
    precision."""
    scaled = values * (2 ** (53 - SIGNIFICANT_BITS[dtype]) + 1)
    return scaled - (scaled - values)


def dequantize_and_multiply(
    a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, dtype: torch.dtype, fast_sums: bool = False
) -> Tensor:
    """Compute float8.multiply with the dequantized factors, in double precision."""
    return ((a.double() * a_scales) @ (b.double() * b_scales).t()).to(dtype)


def _grad_norms(parameters: Iterable[Tensor]) -> list[Tensor]:
    norms = torch._foreach_norm([to_local(p.grad) for p in parameters], 2)
    return [norm.to(torch.float32) for norm in norms]  # the dtype in which fused optimizers expect scalars


@contextmanager
def double_precision() -> Iterator[None]:
    """Context manager in which fp32 means double precision."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            patch.dict(DTYPES, fp32=torch.float64),
            patch.object(Tensor, "float", Tensor.double),
            patch.object(float8, "cast", round_significand),
            patch.object(float8, "multiply", dequantize_and_multiply),
            patch.object(row_groups, "_are_aligned", lambda *tensors: False),  # torch's kernel refuses double precision
            patch.object(optimizer, "_grad_norms", _grad_norms),
        ):
            yield
    finally:
        torch.set_default_dtype(default)

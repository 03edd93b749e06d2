"""Matrix products with a sum of higher precision than their factors."""

import torch
from torch import Tensor

_ROWS = 8192
"""Number of rows whose product exists in the factors' dtype at a time, on devices that cannot add a product of another dtype."""


def addmm_fp32(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """Add the product of two matrices to `total`, in place.

    Args:
        total: (rows, columns) in fp32.
        a: (rows, inner), fp32 or bf16.
        b: (inner, columns), in the dtype of `a`.
        is_first: Whether to overwrite `total`, whose values may then be uninitialized.
    """
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=0 if is_first else 1, out=total)
        return
    if a.device.type != "cpu":
        if is_first:
            total.zero_()
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        return
    # The product has the dtype of the factors. Computed a few rows at a time, it needs little memory.
    for rows, factor in zip(total.split(_ROWS), a.split(_ROWS), strict=True):
        (rows.copy_ if is_first else rows.add_)(factor @ b)

"""Rotary encoding as one complex product, for blocks that are not compiled. The compiler fuses the formula of models/rope.py, but
no complex product."""

import torch
from torch import Tensor, nn

from models.rope import rotate_pairs


def rotate_by_complex_product(x: Tensor, rope: Tensor) -> Tensor:
    """Return rotate_pairs(x, rope).

    Args:
        x: (batch, seq, heads, head_dim).
        rope: (batch, seq, 1, head_dim / 2, 2).
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.view_as_complex(rope)).flatten(-2).type_as(x)


def apply_complex_rotation(model: nn.Module) -> None:
    """Replace the rotation of each attention layer that rotates neighbouring values, in place."""
    for module in model.modules():
        if getattr(module, "rotate", None) is rotate_pairs:
            module.rotate = rotate_by_complex_product

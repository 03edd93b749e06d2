"""Cautious weight decay (Chen et al. 2025, "Cautious Weight Decay", arXiv:2510.12402)."""

import torch
from torch import Tensor


def cautious_factors(p: Tensor, update: Tensor, decay: float) -> Tensor:
    """Return the factors by which values are multiplied: 1 - decay where update x p >= 0, so that decay and update move p in the
    same direction, otherwise 1.

    Args:
        p: Values before the step.
        update: What the step subtracts from them, up to positive factors.
        decay: Learning rate times weight decay.
    """
    return torch.where(update * p >= 0, 1 - decay, 1.0)

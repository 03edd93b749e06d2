"""Gathers that backward repeats instead of saving their results."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from models.recompute import call_with_recomputed


def call_with_gathered(
    forward: Callable[..., Tensor], gather: Callable[[Tensor], Tensor], shard: Tensor, *args: Any, recompute: bool
) -> Tensor:
    """Return `forward(gather(shard), *args)`. recompute: whether backward repeats the gather."""
    gathered = gather(shard)
    if not recompute:
        return forward(gathered, *args)
    return call_with_recomputed(forward, gathered, partial(gather, shard.detach()), *args)

"""Replacement of tensors that autograd saves for backward. The tensors may be DTensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

Restore = Callable[[], Tensor]


def replace_saved(tensor: Tensor, replace: Callable[[Tensor], Restore]) -> saved_tensors_hooks:
    """Return a context manager. Inside it, autograd saves the function `replace(view)` instead of each view of `tensor`. Calling
    the function restores the view. Views are recognized by the storage that they share with `tensor`. So the context manager
    works for every operator that saves `tensor`, a view of `tensor` or a DTensor that contains `tensor`."""
    storage = _storage_id(tensor)  # the graph holds the hook, which therefore must not hold the tensor
    return saved_tensors_hooks(
        lambda saved: replace(saved) if _storage_id(saved) == storage else saved,
        lambda saved: saved if isinstance(saved, Tensor) else saved(),
    )


def call_with_recomputed(
    forward: Callable[..., Tensor], tensor: Tensor, recompute: Callable[[], Tensor], *args: Any
) -> Tensor:
    """Return `forward(tensor, *args)`. Backward calls `recompute` where autograd would have saved `tensor`."""
    with replace_saved(tensor, _Recomputed(recompute).save):
        return forward(tensor, *args)


def call_with_gathered(
    forward: Callable[..., Tensor], gather: Callable[[Tensor], Tensor], shard: Tensor, *args: Any, recompute: bool
) -> Tensor:
    """Return `forward(gather(shard), *args)`. recompute: whether backward repeats the gather instead of saving its result."""
    gathered = gather(shard)
    if not recompute:
        return forward(gathered, *args)
    return call_with_recomputed(forward, gathered, partial(gather, shard.detach()), *args)


class _Recomputed:
    """A tensor that backward recomputes once, for all operators that would have saved it."""

    def __init__(self, recompute: Callable[[], Tensor]):
        self.recompute = recompute
        self.local: Tensor | None = None
        self.num_saved = self.num_restored = 0

    def save(self, view: Tensor) -> Restore:
        """Return a function that restores this view of the tensor."""
        self.num_saved += 1
        local = _local(view)
        geometry = local.size(), local.stride(), local.storage_offset()
        spec = view._spec if isinstance(view, DTensor) else None
        return partial(self._restore, geometry, spec)

    def _restore(self, geometry: tuple, spec: DTensorSpec | None) -> Tensor:
        if self.local is None:
            with torch.no_grad():
                self.local = _local(self.recompute())
        view = self.local.as_strided(*geometry)
        self.num_restored += 1
        # A zero-bubble schedule traverses the same graph twice: for the inputs' gradients, then for the weights'.
        if self.num_restored % self.num_saved == 0:
            self.local = None
        return view if spec is None else DTensor(view, spec, requires_grad=False)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage_id(tensor: Tensor) -> int:
    """Return an identifier of the tensor's memory. It is not the address, because fake tensors have no address."""
    return _local(tensor).untyped_storage()._cdata

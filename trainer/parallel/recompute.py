"""Replacement of tensors that autograd saves for backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor


def replace_saved(tensor: Tensor, replace: Callable[[Tensor], Any]) -> saved_tensors_hooks:
    """Return a context in which autograd saves the object `replace(view)` instead of each view of `tensor`. The object has a
    method `restore() -> Tensor`. Views share the storage of the tensor, so this works for every operator that saves the tensor
    itself, a view of it or a DTensor that contains it."""
    storage = _storage_id(tensor)  # the graph holds the hook, which therefore must not hold the tensor
    return saved_tensors_hooks(
        lambda saved: replace(saved) if _storage_id(saved) == storage else saved,
        lambda saved: saved if isinstance(saved, Tensor) else saved.restore(),
    )


def call_with_gathered(
    forward: Callable[..., Tensor], gather: Callable[[Tensor], Tensor], shard: Tensor, *args: Any, recompute: bool
) -> Tensor:
    """Return `forward(gather(shard), *args)`. recompute: whether backward repeats the gather."""
    gathered = gather(shard)
    if not recompute:
        return forward(gathered, *args)
    shard = shard.detach()
    recomputed = _Recomputed(lambda: _local(gather(shard)))
    with replace_saved(gathered, lambda view: _SavedView(recomputed, view)):
        return forward(gathered, *args)


class _Recomputed:
    """A tensor that backward recomputes once, for all operators that would have saved it."""

    def __init__(self, recompute: Callable[[], Tensor]):
        self.recompute = recompute
        self.tensor: Tensor | None = None
        self.num_saved = self.num_restored = 0

    def restore(self) -> Tensor:
        if self.tensor is None:
            with torch.no_grad():
                self.tensor = self.recompute()
        tensor = self.tensor
        self.num_restored += 1
        # A zero-bubble schedule traverses the same graph twice: for the inputs' gradients, then for the weights'.
        if self.num_restored % self.num_saved == 0:
            self.tensor = None
        return tensor


class _SavedView:
    """A view of a recomputed tensor."""

    def __init__(self, base: _Recomputed, view: Tensor):
        base.num_saved += 1
        self.base = base
        local = _local(view)
        self.geometry = local.size(), local.stride(), local.storage_offset()
        self.layout = None
        if isinstance(view, DTensor):
            self.layout = view.device_mesh, view.placements, view.size(), view.stride()

    def restore(self) -> Tensor:
        local = self.base.restore().as_strided(*self.geometry)
        if self.layout is None:
            return local
        mesh, placements, size, stride = self.layout
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage_id(tensor: Tensor) -> int:
    """Return an identifier of the tensor's memory. Fake tensors do not have an address, so the address cannot identify it."""
    return _local(tensor).untyped_storage()._cdata

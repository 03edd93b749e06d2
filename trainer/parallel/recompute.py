"""Keep a recipe for backward instead of a tensor."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class _Recomputed:
    """One tensor of one forward, which backward makes again: once, for all operators that need it."""

    def __init__(self, recipe: Callable[[], Tensor]):
        self.recipe = recipe
        self.tensor: Tensor | None = None
        self.saved = 0
        self.wanted = 0

    def save(self) -> None:
        self.saved += 1
        self.wanted += 1

    def take(self) -> Tensor:
        if self.tensor is None:
            with torch.no_grad():
                self.tensor = self.recipe()
        tensor = self.tensor
        self.wanted -= 1
        if self.wanted == 0:
            # A zero-bubble schedule goes through the same graph twice: for the inputs, then for the weights.
            self.tensor, self.wanted = None, self.saved
        return tensor


class _SavedView:
    """What stands in the graph in place of a saved view of the tensor."""

    def __init__(self, of: _Recomputed, tensor: Tensor):
        of.save()
        self.of = of
        local = _local(tensor)
        self.geometry = local.size(), local.stride(), local.storage_offset()
        self.layout = None
        if isinstance(tensor, DTensor):
            self.layout = tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride()

    def restore(self) -> Tensor:
        local = self.of.take().as_strided(*self.geometry)
        if self.layout is None:
            return local
        mesh, placements, size, stride = self.layout
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)


class recompute_in_backward(torch.autograd.graph.saved_tensors_hooks):
    """Context in which autograd keeps no view of the given tensors: backward makes each again by its recipe.

    Not by comparing values but by storage, so that it holds for whatever operator saves the tensor, through views and DTensors.
    """

    def __init__(self, *recipes: tuple[Tensor, Callable[[], Tensor]]):
        """recipes: (tensor, what makes the same local values in the same memory layout)."""
        by_storage = {storage_id(tensor): _Recomputed(recipe) for tensor, recipe in recipes}

        def pack(tensor: Tensor) -> Tensor | _SavedView:
            recomputed = by_storage.get(storage_id(tensor))
            return tensor if recomputed is None else _SavedView(recomputed, tensor)

        super().__init__(pack, lambda kept: kept.restore() if isinstance(kept, _SavedView) else kept)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_id(tensor: Tensor) -> int:
    """Identity of the memory; not its address, which fake tensors do not have."""
    return _local(tensor).untyped_storage()._cdata

"""DTensors and the local tensors inside them."""

from collections.abc import Sequence
from functools import cache
from itertools import product

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import Placement


def to_local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor. Return any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_factor(tensor: Tensor) -> Tensor:
    """Return the local tensor of a factor. Each rank computes only its part of the product, so the gradient of a replicated
    factor is a sum over the ranks."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = [Partial() if placement.is_replicate() else placement for placement in tensor.placements]
    return tensor.to_local(grad_placements=placements)


def sharded_like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a DTensor with the parameter's placements. It shares the memory of `local` and stays on the device of `local`.

    local: this rank's shard of the result. Each dim equals that of the parameter's shard, or is smaller by an integer factor.
    `local` is returned unchanged if it is a scalar or if the parameter is not a DTensor.
    """
    if local.dim() == 0 or not isinstance(parameter, DTensor):
        return local
    shape = torch.Size(
        full if size == shard else full * size // shard
        for full, shard, size in zip(parameter.shape, parameter.to_local().shape, local.shape, strict=True)
    )
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    # Not from_local, which would copy the shard to the mesh's device.
    return DTensor(local, DTensorSpec(parameter.device_mesh, parameter.placements, meta), requires_grad=False)


def local_region(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this rank's shard and its region in the global tensor, one slice per dim."""
    offset = (0,) * parameter.dim()
    if isinstance(parameter, DTensor):
        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    local = to_local(parameter)
    return local, tuple(slice(first, first + size) for first, size in zip(offset, local.shape, strict=True))


@unset_fake_temporarily()  # torch computes offsets with tensors, whose values the planner's fake tensors would lack
def regions_of_ranks(parameter: Tensor, ranks: Sequence[int]) -> list[tuple[slice, ...]]:
    """Return the region of each rank's shard in the global tensor, one slice per dim. ranks: those that together hold the
    parameter, all of its mesh."""
    if not isinstance(parameter, DTensor):
        return [tuple(slice(0, size) for size in parameter.shape)] * len(ranks)
    mesh = parameter.device_mesh
    by_coordinate = _regions(tuple(parameter.shape), tuple(mesh.shape), tuple(parameter.placements))
    of_rank = dict(zip(mesh.mesh.flatten().tolist(), by_coordinate, strict=True))
    return [of_rank[rank] for rank in ranks]


@cache
def _regions(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> list[tuple[slice, ...]]:
    """Return the region of each rank of a mesh, in the order of its ranks. Models have many parameters of few shapes."""
    regions = []
    for coordinate in product(*map(range, mesh_shape)):
        local = _compute_local_shape_and_global_offset(shape, mesh_shape, list(coordinate), placements)
        regions.append(tuple(slice(first, first + size) for size, first in zip(*local, strict=True)))
    return regions

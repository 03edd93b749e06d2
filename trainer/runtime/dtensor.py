"""DTensors and the local tensors inside them."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def to_local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(parameter: Tensor, part: Tensor) -> Tensor:
    """What rank by rank belongs to a parameter's shards, as a whole; it stays where it is, and what is written to the whole is
    written to the part. part: this rank's, of its shard's shape, or with dims that are smaller by a factor; scalars are whole."""
    if part.dim() == 0 or not isinstance(parameter, DTensor):
        return part
    shape = torch.Size(
        whole if mine == shard else whole * mine // shard
        for whole, shard, mine in zip(parameter.shape, parameter.to_local().shape, part.shape, strict=True)
    )
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), part.dtype)
    # Not from_local, which would bring it to the device of the mesh.
    return DTensor(part, DTensorSpec(parameter.device_mesh, parameter.placements, meta), requires_grad=False)


def local_region(parameter: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """This rank's values, the shape of the whole parameter, and where in it they stand."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(parameter.shape), (0,) * parameter.dim()
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(parameter.shape), tuple(offset)

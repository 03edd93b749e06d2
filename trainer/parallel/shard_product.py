"""Products with this rank's shard of a matrix, of which torch knows only the local tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from trainer.parallel.activation_checkpoint import call_outside_checkpoint
from trainer.runtime.dtensor import local_factor


def product_with_shard(
    product: Callable[..., Tensor], x: Tensor, *args: Any, mesh: DeviceMesh | None, is_partial: bool
) -> Tensor:
    """Return the product of x and a matrix, placed on the mesh: columns of the result, or a term of its sum over the ranks.

    Args:
        product: Function of this rank's part of x and of `args` that returns the product of local tensors.
        x: (..., columns of the matrix).
        args: Further arguments of `product`.
        mesh: Axis over which the matrix is split. None: the matrix is whole, and the result is a local tensor.
        is_partial: Whether the columns of the matrix are split. Selective recomputation does not save such a term, as
            `_is_partial_product` says, which cannot know it from local tensors.
    """
    local = local_factor(x)
    is_hidden = is_partial and not torch.compiler.is_compiling()
    out = call_outside_checkpoint(product, local, *args) if is_hidden else product(local, *args)
    if mesh is None:
        return out
    placement = Partial() if is_partial else Shard(out.dim() - 1)
    return DTensor.from_local(out, mesh, [placement], run_check=False)

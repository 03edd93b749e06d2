"""Application of adapters (trainer/lora.py) to a model, whose matrices may be sharded."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from trainer.config import LoraConfig
from trainer.lora import LORA_A, LORA_B, TrainedParameters
from trainer.runtime.device import DTYPES


def apply_lora(model: nn.Module, trained: TrainedParameters, config: LoraConfig) -> None:
    """Add the adapters and freeze all parameters that are not trained, in place. Without [lora] rank, do nothing. model: a
    pipeline stage, on the meta device; its matrices may be sharded by tensor parallelism."""
    if config.rank is None:
        return
    dtype = DTYPES[config.dtype]
    for name, parameter in model.named_parameters():
        is_trained = name in trained.fully
        parameter.requires_grad_(is_trained)
        if is_trained:
            model.get_submodule(name.rpartition(".")[0]).to(dtype)
    present = dict(model.named_modules())
    for name in trained.targets:
        if name in present:
            _add_adapter(present[name], config.rank, config.scale, dtype)


def _add_adapter(linear: nn.Linear, rank: int, factor: float, dtype: torch.dtype) -> None:
    weight, base = linear.weight, linear.forward
    rows, columns = weight.shape
    for name, shape, dim in ((LORA_A, (rank, columns), 1), (LORA_B, (rows, rank), 0)):
        matrix = torch.empty(shape, dtype=dtype, device=weight.device)
        if isinstance(weight, DTensor):
            # The matrix with the sharded dim of the weight is sharded like it. The other one is replicated.
            placement = Shard(dim) if weight.placements[0].is_shard(dim) else Replicate()
            matrix = distribute_tensor(matrix, weight.device_mesh, [placement], src_data_rank=None)
        linear.register_parameter(name, nn.Parameter(matrix))

    def forward(x: Tensor) -> Tensor:
        out = base(x)
        hidden, a, b = (_local_factor(t) for t in (x, linear.lora_a, linear.lora_b))
        product = F.linear(F.linear(hidden, a), b) * factor
        if isinstance(out, DTensor):  # a shard of the result, or a term of its sum over the ranks
            product = DTensor.from_local(product, out.device_mesh, out.placements, run_check=False)
        return out + product

    linear.forward = forward


def _local_factor(tensor: Tensor) -> Tensor:
    """Return the local tensor of a factor. Each rank computes only its part of the product, so the gradient of a replicated
    factor is a sum over the ranks."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = [Partial() if placement.is_replicate() else placement for placement in tensor.placements]
    return tensor.to_local(grad_placements=placements)

"""Fully sharded data parallelism (FSDP2): which modules are gathered together, when, and in which precision."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from models.spec import ParallelPlan
from trainer.config import ParallelConfig

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def apply_fsdp(model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh, config: ParallelConfig, dtype: str) -> None:
    """Shard every block, the plan's further units, and whatever is left as the root unit.

    mesh: the model mesh. dtype: of gathered parameters and so of the computation ("bf16", "fp32"); the shards and the
    reduction of gradients stay fp32. Gradients are summed, never averaged: the step divides by the number of targets.
    """
    axes = ("dp_replicate", "fsdp") if mesh["dp_replicate"].size() > 1 else ("fsdp",)
    # Inputs keep their precision: what flows is already in dtype, and the rotary angles must stay fp32.
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32, cast_forward_inputs=False)

    def shard(modules: nn.Module | list[nn.Module], reshard: bool | int) -> None:
        fully_shard(modules, mesh=mesh[axes], reshard_after_forward=reshard, mp_policy=policy)

    reshard = {"default": True, "always": True, "never": False}.get(config.reshard_after_forward)
    if reshard is None:
        reshard = config.reshard_after_forward
    # The last unit of the forward is the first of the backward: freeing it in between would gather it twice in a row.
    reshard_last = False if config.reshard_after_forward == "default" else reshard

    for block in model.get_submodule(plan.blocks).children():
        shard(block, reshard)
    if config.fsdp_units == "separate":
        for names in plan.fsdp_units:
            modules = [model.get_submodule(name) for name in names]
            last = names == plan.fsdp_units[-1]
            shard(modules if len(modules) > 1 else modules[0], reshard_last if last else reshard)
    shard(model, reshard_last)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum

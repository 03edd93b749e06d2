"""Fully sharded data parallelism (FSDP2): units, resharding, prefetching and precision."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from models.spec import ParallelPlan
from trainer.config import ParallelConfig
from trainer.runtime.device import DTYPES


def apply_fsdp(model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh, config: ParallelConfig, dtype: str) -> None:
    """Shard every block, the plan's other units, and all remaining parameters as the root unit.

    mesh: the model mesh. dtype: dtype of gathered parameters and of the computation ("bf16", "fp32"). Shards keep their own
    dtype, and gradients are reduced in fp32. Gradients are summed, not averaged, because the loss is already divided by the
    number of target tokens.
    """
    axes = ("dp_replicate", "fsdp") if mesh["dp_replicate"].size() > 1 else ("fsdp",)
    # Do not cast inputs: hidden states already have this dtype, and rotary angles must stay fp32.
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = OffloadPolicy()
    if config.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")

    def shard(modules: list[nn.Module], reshard: bool | int) -> None:
        unit = modules if len(modules) > 1 else modules[0]
        fully_shard(unit, mesh=mesh[axes], reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)

    reshard, reshard_last = _reshard(config)
    units: list[tuple[list[nn.Module], bool | int]] = []
    if config.fsdp_units == "separate":
        for names in plan.fsdp_units:
            modules = [model.get_submodule(name) for name in names]
            modules = [module for module in modules if any(True for _ in module.parameters())]  # of this pipeline stage
            if modules:
                units.append((modules, reshard_last if names == plan.fsdp_units[-1] else reshard))
    blocks = [([block], reshard) for block in model.get_submodule(plan.blocks).children()]
    for modules, unit_reshard in [*blocks, *units]:
        shard(modules, unit_reshard)
    shard([model], reshard_last)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    outer = [modules[0] for modules, _ in units]
    first = outer[0] if outer else model  # with tied embeddings the first unit is also the last one
    last = outer[-1:] if len(outer) > 1 else []
    _prefetch([first, *(modules[0] for modules, _ in blocks), *last], config.fsdp_prefetch)


def _reshard(config: ParallelConfig) -> tuple[bool | int, bool | int]:
    """Return two values of FSDP's reshard_after_forward: for all units but the last, and for the last unit."""
    match config.reshard_after_forward:
        case "always":
            return True, True
        case "never":
            return False, False
        case "default":
            # Backward starts with the unit that forward ends with: freeing that unit would gather it twice in a row.
            # A pipeline uses each unit again with every microbatch.
            return config.pp == 1, False
        case num_ranks:
            return num_ranks, num_ranks


def _prefetch(units: Sequence[FSDPModule], depth: int) -> None:
    """Make each unit start the gather of the next `depth` units. units: one module of each unit, in forward order."""
    if depth == 0:
        return
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[i + 1 : i + 1 + depth]))
        unit.set_modules_to_backward_prefetch(list(units[max(0, i - depth) : i][::-1]))

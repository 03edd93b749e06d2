"""Fully sharded data parallelism (FSDP2): which modules are gathered together, when, and in which precision."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from models.spec import ParallelPlan
from trainer.config import ParallelConfig
from trainer.runtime.device import DTYPES


def apply_fsdp(model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh, config: ParallelConfig, dtype: str) -> None:
    """Shard every block, the plan's further units, and whatever is left as the root unit.

    mesh: the model mesh. dtype: of gathered parameters and so of the computation ("bf16", "fp32"); the shards keep theirs,
    and gradients are reduced in fp32. Gradients are summed, never averaged: the step divides by the number of targets.
    """
    axes = ("dp_replicate", "fsdp") if mesh["dp_replicate"].size() > 1 else ("fsdp",)
    # Inputs keep their precision: what flows is already in dtype, and the rotary angles must stay fp32.
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = OffloadPolicy()
    if config.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")

    def shard(modules: list[nn.Module], reshard: bool | int) -> None:
        one_or_more = modules if len(modules) > 1 else modules[0]
        fully_shard(
            one_or_more, mesh=mesh[axes], reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload
        )

    reshard, reshard_last = _reshard(config)
    units: list[tuple[list[nn.Module], bool | int]] = []
    if config.fsdp_units == "separate":
        for names in plan.fsdp_units:
            modules = [model.get_submodule(name) for name in names]
            held = [module for module in modules if any(True for _ in module.parameters())]  # by this pipeline stage
            units.append((held, reshard_last if names == plan.fsdp_units[-1] else reshard))
    blocks = [([block], reshard) for block in model.get_submodule(plan.blocks).children()]
    for modules, unit_reshard in [*blocks, *(unit for unit in units if unit[0])]:
        shard(modules, unit_reshard)
    shard([model], reshard_last)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    held_units = [unit[0][0] for unit in units if unit[0]]
    first = held_units[0] if held_units else model  # tied, it is the last one too
    last = held_units[-1:] if len(held_units) > 1 else []
    _prefetch([first, *(modules[0] for modules, _ in blocks), *last], config.fsdp_prefetch)


def _reshard(config: ParallelConfig) -> tuple[bool | int, bool | int]:
    """Whether units are freed after forward, and whether the last one is; a number: resharded to so many ranks."""
    match config.reshard_after_forward:
        case "always":
            return True, True
        case "never":
            return False, False
        case "default":
            # The last unit of the forward is the first of the backward: freeing it in between would gather it twice in a row.
            # A pipeline comes back to a unit with every microbatch.
            return config.pp == 1, False
        case ranks:
            return ranks, ranks


def _prefetch(units: Sequence[FSDPModule], depth: int) -> None:
    """Gather that many units ahead. units: one module of each, in the order of the forward."""
    if depth == 0:
        return
    for number, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[number + 1 : number + 1 + depth]))
        unit.set_modules_to_backward_prefetch(list(units[max(0, number - depth) : number][::-1]))

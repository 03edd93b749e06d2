"""Fully sharded data parallelism (FSDP2): units, resharding, prefetching and precision."""

from functools import partial
from itertools import chain

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from models.moe import Experts
from models.spec import Structure
from trainer.base.config import ParallelConfig
from trainer.parallel.activation_checkpoint import run_hooks_outside_checkpoint
from trainer.parallel.mesh import Meshes, ParallelDims
from trainer.runtime.device import DTYPES


def apply_fsdp(model: nn.Module, structure: Structure, meshes: Meshes, config: ParallelConfig, dtype: str) -> None:
    """Make each block an FSDP unit, and put all remaining parameters into a root unit. The experts of a block are a unit inside
    it, on the mesh of the experts. If config.fsdp_units is "separate", each group of modules in structure.fsdp_units is a unit.
    Gradients are summed, not averaged, because the loss is already divided by the number of its terms.

    Args:
        model: Not sharded by FSDP yet.
        structure: Names the blocks and the other units.
        meshes: The device meshes.
        config: Degrees, resharding, prefetching and precision.
        dtype: Dtype of gathered parameters and of the computation ("bf16", "fp32"). Shards keep the dtype of the parameters.
    """
    # Do not cast inputs: hidden states already have this dtype, and rotary angles must stay fp32.
    policy = MixedPrecisionPolicy(DTYPES[dtype], DTYPES[config.reduce_dtype], cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=meshes.model.device_type != "cpu") if config.cpu_offload else OffloadPolicy()
    replicas = ("dp_replicate",) if meshes.dims.dp_replicate > 1 else ()
    shard = partial(fully_shard, mesh=meshes.model[(*replicas, "fsdp")], mp_policy=policy, offload_policy=offload)
    reshard, reshard_last = _reshard(config)
    reshard_experts = reshard if isinstance(reshard, bool) else True  # groups of ranks belong to the model mesh
    blocks = []  # units of each block, in the order in which forward and backward use them
    for name, block in model.get_submodule(structure.blocks_path).named_children():
        experts = [module for module in block.modules() if isinstance(module, Experts)]
        for module in experts:
            placement = partial(_expert_placement, dims=meshes.dims)
            mesh = meshes.experts[(*replicas, "efsdp")]
            shard(module, mesh=mesh, reshard_after_forward=reshard_experts, shard_placement_fn=placement)
            run_hooks_outside_checkpoint(module)
        shard(block, reshard_after_forward=reshard)
        if not structure.is_prediction(int(name)):  # forward does not always run these, so nothing prefetches them
            blocks.append([block, *experts])
    others = []  # one module of each unit outside the blocks
    for names in structure.fsdp_units if config.fsdp_units == "separate" else ():
        modules = [module for module in map(model.get_submodule, names) if list(module.parameters())]
        if modules:  # otherwise another pipeline stage has this unit
            shard(modules, reshard_after_forward=reshard_last if names == structure.fsdp_units[-1] else reshard)
            others.append(modules[0])
    shard(model, reshard_after_forward=reshard_last)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    # With tied embeddings the first unit is also the last one.
    first, last = others[:1] or [model], others[1:]
    forward = [*first, *chain(*blocks), *last]
    # A block's gradient arrives before that of its experts.
    backward = [*reversed(last), *chain(*reversed(blocks)), *first]
    _prefetch(forward, backward, config.fsdp_prefetch)


def _expert_placement(stack: nn.Parameter, dims: ParallelDims) -> Shard | None:
    """Return along which dim FSDP shards stacked matrices. With more ranks than experts, dim 0 would leave ranks without any.
    That is correct, but uneven. It remains where the ranks cannot share the rows: never columns, because the blocks of 8-bit
    moments lie in them."""
    if dims.efsdp * dims.ep > stack.shape[0] and stack.shape[1] % dims.efsdp == 0:
        return Shard(1)
    return None  # dim 0


def reshard_all(model: nn.Module) -> None:
    """Free the gathered parameters of all FSDP units of a model."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def start_microbatch(model: FSDPModule, reduce_every_microbatch: bool, is_last: bool) -> None:
    """Prepare the backward of a microbatch. Unless reduce_every_microbatch is true, FSDP accumulates unreduced gradients, and
    reduces their sum after the last microbatch."""
    model.set_requires_gradient_sync(is_last or reduce_every_microbatch)
    model.set_is_last_backward(is_last)


def _reshard(config: ParallelConfig) -> tuple[bool | int, bool | int]:
    """Return two values of FSDP's reshard_after_forward: for all units except the last one, and for the last one."""
    if config.reshard_after_forward == "default":
        # Backward starts with the unit that forward ends with: freeing that unit would gather it twice in a row.
        # A pipeline uses each unit again with every microbatch.
        return config.pp == 1, False
    reshard = {"always": True, "never": False}.get(config.reshard_after_forward, config.reshard_after_forward)
    return reshard, reshard


def _prefetch(forward: list[nn.Module], backward: list[nn.Module], depth: int) -> None:
    """Make each unit start the gather of the next `depth` units.

    Args:
        forward: One module of each unit, in the order of forward.
        backward: The same, in the order of backward.
        depth: Number of units to gather ahead. 0: FSDP's default.
    """
    if depth == 0:
        return
    for i, unit in enumerate(forward):
        unit.set_modules_to_forward_prefetch(forward[i + 1 : i + 1 + depth])
    for i, unit in enumerate(backward):
        unit.set_modules_to_backward_prefetch(backward[i + 1 : i + 1 + depth])

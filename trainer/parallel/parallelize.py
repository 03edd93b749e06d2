"""Parallelization of a model. All forms of parallelism are applied in the only order in which they compose.

models/ holds only formulas. What else a run does in their place is a forward that is replaced on an instance, and that may call
the forward which it finds. These are all of them, in their order, and why each stands there. (In a pipeline, modules that pass
the hidden state on stand for those of other stages before (stages.py), and labels become a head after (pipeline.py).)

1. Linear modules, by products in float8 (float8.py). Tensor parallelism shards their weights and wraps them, and adapters add
   to what they return.
2. Feed-forward layers, and rotations, of uncompiled blocks, by faster ones (feed_forward.py, rotation.py). They call linear
   modules, however these multiply. Tensor parallelism wraps them.
3. Norms over all heads, modules that compute with local values, and the output (tensor.py). Matrices become DTensors, so all
   later steps see shards.
4. The method `routed` of mixtures of experts, and their exchange, which is replaced as a module (experts.py). Likewise, on the
   axis of the experts.
5. Linear modules, and the method `product` of experts, by products with weights in 4 bits (quantized.py). The parts of a weight
   are sharded like the weight.
6. Linear modules and the method `product`, by those with adapters; blocks, which give adapters the keys of their dropout
   (adapters/apply.py). The adapters are sharded like the weights, and are added to the products that they find.
7. Kernels and masks of mixers, which are replaced as modules (mixers.py): those of the device.
8. Blocks, by recomputing and compiled ones (activation_checkpoint.py). Both see sharded matrices and all products above.
9. Blocks that recompute everything, whose input is offloaded (activation_offload.py). The checkpoint saves it where it begins.
10. Without FSDP, blocks and the units outside them, which cast their parameters (unsharded.py). It is last, like FSDP, which
    shards what remains: a unit has its parameters before anything computes.
11. The module `balance` of mixtures of experts, by one with losses and statistics (balance.py; engine.py asks for it). It reads
    routing results only.
12. The first block, which is timed (resilience/straggler.py; build.py asks for it). The time includes all of the above.

Recomputation is compiled with the block, except full activation checkpointing with tensor parallelism: torch 2.13 fails on
DTensors in a checkpoint inside a compiled block. It also wraps blocks with experts whose graph breaks and, with torch < 2.13,
all blocks with experts: there, a checkpoint inside the graph saves the experts' results.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

from models.moe import MixtureOfExperts
from models.spec import Structure
from trainer.adapters.nf4 import PAIRS_BYTES
from trainer.base.config import ActivationCheckpointConfig, ParallelConfig
from trainer.parallel.activation_checkpoint import RecomputePolicy, block_forward, recompute_policy
from trainer.parallel.activation_offload import InputOffloader
from trainer.parallel.attention import AttentionBackend
from trainer.parallel.experts import apply_experts
from trainer.parallel.feed_forward import apply_gated_products
from trainer.parallel.float8 import NO_FLOAT8, Float8, apply_float8
from trainer.parallel.mesh import Meshes, ParallelDims
from trainer.parallel.mixers import apply_mixers
from trainer.parallel.parameter_storage import ParameterStorage, shards_parameters
from trainer.parallel.rotation import apply_complex_rotation
from trainer.parallel.sample_layout import SampleLayout
from trainer.parallel.stages import Stage, prune_to_stage
from trainer.parallel.tensor import apply_tensor


def parallelize(
    make_model: Callable[[], nn.Module],
    structure: Structure,
    stages: list[Stage],
    meshes: Meshes,
    parallel: ParallelConfig,
    checkpointing: ActivationCheckpointConfig,
    compiled: bool,
    storage: ParameterStorage,
    layout: SampleLayout,
    attention_backend: AttentionBackend,
    adapt: Callable[[nn.Module], None] = lambda model: None,
    float8: Float8 = NO_FLOAT8,
) -> dict[Stage, nn.Module]:
    """Return this rank's stages of the model, on the meta device and sharded. Without a pipeline, the full model is one stage.

    Args:
        make_model: Returns the full model. It is called once for each stage, on the meta device.
        structure: How the model may be sharded.
        stages: This rank's stages.
        meshes: The device meshes.
        parallel: Degrees and schedules.
        checkpointing: What blocks recompute.
        compiled: Whether to compile each block.
        storage: How parameters are kept.
        layout: Of the samples.
        attention_backend: Attention kernels and masks of the device.
        adapt: Freezes parameters of a stage and adds adapters to it.
        float8: Linear modules with products in float8.
    """
    tp = meshes.model["tp"]
    overlapped = parallel.async_tensor_parallel and tp.size() > 1
    configure_compiler(checkpointing, tp.get_group() if overlapped else None, bool(storage.quantized))
    offloader = InputOffloader(torch.device(meshes.model.device_type))
    model_parts = {}
    for stage in stages:
        with torch.device("meta"):
            model = make_model()
        prune_to_stage(model, structure, stage)  # first: only the modules of the stage remain
        apply_float8(model, float8)
        blocks = dict(model.get_submodule(structure.blocks_path).named_children())
        executions = block_executions(blocks, meshes.dims, structure, parallel, checkpointing, compiled)
        recompute_gathers = {name for name, execution in executions.items() if execution.recomputes == "gathers"}
        _speed_up([block for name, block in blocks.items() if not executions[name].compiled])
        if tp.size() > 1:
            apply_tensor(model, structure, tp, parallel.sequence_parallel, recompute_gathers)
        if meshes.experts is not None:
            apply_experts(model, tp, meshes.experts["ep"], parallel.sequence_parallel)
        storage.replace_weights(model, meshes)
        adapt(model)
        apply_mixers(model, structure, layout, attention_backend, recompute_gathers)
        for name, block in blocks.items():
            _recompute_and_compile(block, executions[name], checkpointing)
        if checkpointing.offload_inputs:
            offloader.apply([block for name, block in blocks.items() if executions[name].recomputes == "all"])
        storage.provide(model, structure, meshes, parallel)
        model_parts[stage] = model
    return model_parts


def _speed_up(uncompiled: Iterable[nn.Module]) -> None:
    for block in uncompiled:
        apply_gated_products(block)
        apply_complex_rotation(block)


def _recompute_and_compile(
    block: nn.Module, execution: "BlockExecution", checkpointing: ActivationCheckpointConfig
) -> None:
    block.forward = block_forward(
        block.forward,
        execution.recomputes,
        checkpointing,
        execution.compiled,
        execution.checkpoint_outside,
        execution.is_one_graph,
        is_trained=any(p.requires_grad for p in block.parameters()),
    )


class BlockExecution(NamedTuple):
    """How a block is recomputed and compiled."""

    recomputes: RecomputePolicy
    """What backward computes again."""
    compiled: bool
    """Whether the block is compiled: as a whole, or in parts around the breaks of its graph."""
    is_one_graph: bool
    """Whether nothing in the block would break its graph."""
    checkpoint_outside: bool
    """Whether the checkpoint wraps the compiled block, instead of being a part of its graph."""


def block_executions(
    blocks: Mapping[str, nn.Module],
    dims: ParallelDims,
    structure: Structure,
    parallel: ParallelConfig,
    checkpointing: ActivationCheckpointConfig,
    compiled: bool,
) -> dict[str, BlockExecution]:
    """Return name of a block -> its execution.

    Args:
        blocks: By name, not parallelized.
        dims: See parallelize, also for the other arguments.
        structure: Of the model.
        parallel: Degrees and schedules.
        checkpointing: What blocks recompute.
        compiled: Whether to compile blocks.
    """
    experts_fit = experts_are_one_graph(dims, structure, parallel)
    gathers = dims.cp > 1 or (dims.tp > 1 and parallel.sequence_parallel)
    executions = {}
    for name, block in blocks.items():
        has_experts = any(isinstance(module, MixtureOfExperts) for module in block.modules())
        is_one_graph = experts_fit or not has_experts
        recomputes = recompute_policy(int(name), checkpointing, gathers, compiled and is_one_graph)
        # torch would run a checkpoint around a break eagerly, with a policy that is meant for the compiler.
        compiles = compiled and (is_one_graph or recomputes in ("nothing", "all"))
        # Before torch 2.13, a checkpoint in the graph saved the result of the experts too.
        outside = dims.tp > 1 or not is_one_graph or (has_experts and torch.__version__ < (2, 13))
        executions[name] = BlockExecution(recomputes, compiles, is_one_graph, outside)
    return executions


def experts_are_one_graph(dims: ParallelDims, structure: Structure, parallel: ParallelConfig) -> bool:
    """Return whether a block with experts can be compiled as one graph. Its graph breaks where FSDP gathers the experts, which
    are a unit of their own, and where the host reads the numbers of rows that ranks exchange."""
    return dims.ep == 1 and not shards_parameters(dims, structure, parallel)


def configure_compiler(
    checkpointing: ActivationCheckpointConfig, overlapped: ProcessGroup | None, quantizes: bool = False
) -> None:
    """Set the compiler options of this run, which are global to the process.

    Args:
        checkpointing: What blocks recompute.
        overlapped: Group of ranks whose gathers and reductions overlap with adjacent matrix products.
        quantizes: Whether weights are kept in 4 bits.
    """
    # With dropout, a block's forward stores AdapterDropout.keys. Recomputation in backward need not repeat this side effect: the
    # graph has the keys.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    functorch = torch._functorch.config
    by_budget = checkpointing.mode == "budget"
    functorch.activation_memory_budget = checkpointing.memory_budget if by_budget else 1.0
    if hasattr(functorch, "unsafe_treat_script_objects_as_zero_size"):
        # Since torch 2.12 the mesh of a DTensor is an input of the graph, without a size that the budget could count.
        functorch.unsafe_treat_script_objects_as_zero_size = by_budget
    functorch.unsafe_allow_optimization_of_collectives = by_budget and checkpointing.recompute_all_gather
    # Operators that read fewer bytes in common are not fused. Two that dequantize share a table only: fused, the values of both
    # matrices would be in memory.
    torch._inductor.config.score_fusion_memory_threshold = 2 * PAIRS_BYTES if quantizes else 10  # torch's default
    torch._inductor.config._micro_pipeline_tp = overlapped is not None
    if overlapped is not None:
        enable_symm_mem_for_group(overlapped.group_name)

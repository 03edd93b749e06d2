"""Parallelization of a model: every form of parallelism, in the one order in which they compose."""

from collections.abc import Callable

import torch
from torch import nn

from models.spec import ParallelPlan
from trainer.config import ActivationCheckpointConfig, CompileConfig, ParallelConfig
from trainer.parallel import compile
from trainer.parallel.activation_checkpoint import (
    Forward,
    RecomputePolicy,
    recompute_all,
    recompute_except,
    recompute_gathers,
    recompute_policy,
)
from trainer.parallel.activation_offload import InputOffloader
from trainer.parallel.attention import AttentionBackend, apply_attention
from trainer.parallel.fsdp import apply_fsdp
from trainer.parallel.mesh import Meshes
from trainer.parallel.pipeline import Stage, prune_to_stage
from trainer.parallel.tensor import apply_tensor
from trainer.runtime.device import DTYPES


def parallelize(
    make_model: Callable[[], nn.Module],
    plan: ParallelPlan,
    stages: list[Stage],
    meshes: Meshes,
    parallel: ParallelConfig,
    checkpointing: ActivationCheckpointConfig,
    compilation: CompileConfig,
    dtype: str,
    document_mask: bool,
    attention_backend: AttentionBackend,
) -> dict[Stage, nn.Module]:
    """Return this rank's stages of the model, on the meta device and sharded by the plan. Without a pipeline, the full model is
    one stage.

    dtype: dtype of the computation ("bf16", "fp32"). document_mask: whether attention ends at document boundaries.

    FSDP comes last: it shards the parameters that the other steps have sharded or pruned. Compilation comes after tensor
    parallelism, so that it sees sharded matrices. A compiled block includes recomputation only if the compiler can use it.
    """
    tp, cp = meshes.model["tp"], meshes.data["cp"]
    overlapped = parallel.async_tensor_parallel and tp.size() > 1
    compile.configure(checkpointing, tp.get_group() if overlapped else None)
    gathers = cp.size() > 1 or (tp.size() > 1 and parallel.sequence_parallel)

    def policy(block: str) -> RecomputePolicy:
        return recompute_policy(int(block), checkpointing, gathers, compiled=compilation.enabled)

    def recomputes_gathers(block: str) -> bool:
        return policy(block) == "gathers"

    offloader = InputOffloader(torch.device(meshes.model.device_type)) if checkpointing.offload_inputs else None
    model_parts = {}
    for stage in stages:
        with torch.device("meta"):
            model = make_model()
        prune_to_stage(model, plan, stage)
        if tp.size() > 1:
            apply_tensor(model, plan, tp, parallel.sequence_parallel, recomputes_gathers)
        apply_attention(model, plan, cp, document_mask, DTYPES[dtype], attention_backend, recomputes_gathers)
        is_first = True
        for name, block in model.get_submodule(plan.blocks).named_children():
            block.forward = block_forward(block.forward, policy(name), checkpointing, compilation)
            if offloader is not None and policy(name) == "all":
                block.forward = offloader.wrap(block.forward, is_first)
                is_first = False
        apply_fsdp(model, plan, meshes.model, parallel, dtype)
        model_parts[stage] = model
    return model_parts


def block_forward(
    forward: Forward, policy: RecomputePolicy, checkpointing: ActivationCheckpointConfig, compilation: CompileConfig
) -> Forward:
    """Return the forward of a block with recomputation and compilation applied. The block must already be sharded."""
    if policy == "selected":
        forward = recompute_except(checkpointing.save, checkpointing.save_every_nth_matmul, forward)
    if policy == "gathers_compiled":
        forward = recompute_gathers(forward)
    if compilation.enabled:
        forward = compile.compile_block(forward)
    if policy == "all":
        # Outside the compiled block: torch 2.13 fails on DTensors in a checkpoint inside it.
        forward = recompute_all(forward)
    return forward

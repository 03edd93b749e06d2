"""The order in which parallelism is applied, stated once."""

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
    compiling: CompileConfig,
    dtype: str,
    document_mask: bool,
    attention_backend: AttentionBackend,
) -> dict[Stage, nn.Module]:
    """The stages of the network that this rank holds, on the meta device, cut as the plan says; the whole network where there
    is one stage. dtype: of the computation ("bf16", "fp32"); document_mask: attention ends at the borders of documents.

    FSDP comes last: it shards parameters as everything before it has left them. Compilation sees the cut matrices, and what is
    computed again only where it can make use of it.
    """
    tp, cp = meshes.model["tp"], meshes.data["cp"]
    overlapped = parallel.async_tensor_parallel and tp.size() > 1
    compile.configure(checkpointing, tp.get_group() if overlapped else None)
    gathers = cp.size() > 1 or (tp.size() > 1 and parallel.sequence_parallel)

    def again(block: str) -> RecomputePolicy:
        return recompute_policy(int(block), checkpointing, gathers, compiled=compiling.enabled)

    def gather_again(block: str) -> bool:
        return again(block) == "gathers"

    inputs = InputOffloader(torch.device(meshes.model.device_type)) if checkpointing.offload_inputs else None
    parts = {}
    for stage in stages:
        with torch.device("meta"):
            model = make_model()
        prune_to_stage(model, plan, stage)
        if tp.size() > 1:
            apply_tensor(model, plan, tp, parallel.sequence_parallel, gather_again)
        apply_attention(model, plan, cp, document_mask, DTYPES[dtype], attention_backend, gather_again)
        first = True
        for name, block in model.get_submodule(plan.blocks).named_children():
            block.forward = block_forward(block.forward, again(name), checkpointing, compiling)
            if inputs is not None and again(name) == "all":
                block.forward = inputs.wrap(block.forward, first)
                first = False
        apply_fsdp(model, plan, meshes.model, parallel, dtype)
        parts[stage] = model
    return parts


def block_forward(
    forward: Forward, again: RecomputePolicy, checkpointing: ActivationCheckpointConfig, compiling: CompileConfig
) -> Forward:
    """How a block computes, once its modules are cut."""
    if again == "selected":
        forward = recompute_except(checkpointing.save, checkpointing.save_every_nth_matmul, forward)
    if again == "gathers_compiled":
        forward = recompute_gathers(forward)
    if compiling.enabled:
        forward = compile.compile_block(forward)
    if again == "all":
        # Around the compiled block: inside, torch 2.13 stumbles over DTensors.
        forward = recompute_all(forward)
    return forward

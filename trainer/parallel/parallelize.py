"""The order in which parallelism is applied, stated once."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from models.spec import ParallelPlan
from trainer.config import ActivationCheckpointConfig, CompileConfig, ParallelConfig
from trainer.parallel import activation_checkpoint, compile
from trainer.parallel.context import apply_context
from trainer.parallel.dims import Meshes
from trainer.parallel.fsdp import apply_fsdp
from trainer.parallel.pipeline import Stage, cut_to_stage
from trainer.parallel.tensor import apply_tensor


def parallelize(
    make_network: Callable[[], nn.Module],
    plan: ParallelPlan,
    stages: list[Stage],
    meshes: Meshes,
    parallel: ParallelConfig,
    checkpointing: ActivationCheckpointConfig,
    compilation: CompileConfig,
    dtype: str,
) -> dict[Stage, nn.Module]:
    """The stages of the network that this rank holds, on the meta device, cut as the plan says; the whole network where there
    is one stage. dtype: of the computation ("bf16", "fp32").

    FSDP comes last: it shards parameters as everything before it has left them. Compilation sees the cut matrices, and what is
    computed again only where it can make use of it.
    """
    compile.configure(checkpointing, parallel.async_tensor_parallel and parallel.tp > 1)
    regather = partial(gathers_again, checkpointing=checkpointing, compilation=compilation)
    parts = {}
    for stage in stages:
        with torch.device("meta"):
            model = make_network()
        cut_to_stage(model, plan, stage)
        if meshes.model["tp"].size() > 1:
            apply_tensor(model, plan, meshes.model["tp"], parallel.sequence_parallel, regather)
        for name, block in model.get_submodule(plan.blocks).named_children():
            if meshes.data["cp"].size() > 1:
                apply_context(block, plan, meshes.data["cp"], regather(int(name)))
            block.forward = _computed(block.forward, int(name), checkpointing, compilation)
        apply_fsdp(model, plan, meshes.model, parallel, dtype)
        parts[stage] = model
    return parts


def gathers_again(number: int, checkpointing: ActivationCheckpointConfig, compilation: CompileConfig) -> bool:
    """Whether a block of that number gathers again in backward by itself: where it is checkpointed or compiled, that does it."""
    due = activation_checkpoint.due(number, checkpointing)
    return checkpointing.recompute_all_gather and not due and not compilation.enabled


def _computed(
    forward: activation_checkpoint.Compute,
    number: int,
    checkpointing: ActivationCheckpointConfig,
    compilation: CompileConfig,
) -> activation_checkpoint.Compute:
    """How a block computes."""
    due = activation_checkpoint.due(number, checkpointing)
    if due and checkpointing.mode == "selective":
        forward = activation_checkpoint.recompute_all_but(checkpointing.save, checkpointing.save_every_matmul, forward)
    elif compilation.enabled and checkpointing.recompute_all_gather and checkpointing.mode != "budget" and not due:
        forward = activation_checkpoint.recompute_gathers(forward)
    if compilation.enabled:
        forward = compile.compiled(forward)
    if due and checkpointing.mode == "full":
        # Around the compiled block: inside, torch 2.13 stumbles over DTensors.
        forward = activation_checkpoint.recompute_all(forward)
    return forward

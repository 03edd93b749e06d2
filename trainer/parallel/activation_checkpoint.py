"""Activation checkpointing: which activations a block saves for backward and which it recomputes (Chen et al. 2016,
arXiv:1604.06174)."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from models.row_groups import GROUPED_PRODUCT
from trainer.base.config import ActivationCheckpointConfig

aten, collectives = torch.ops.aten, torch.ops._c10d_functional

SAVEABLE_OPS = {
    "matmuls": (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._scaled_mm.default,
        GROUPED_PRODUCT,
    ),
    "attention": (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_attention_math_for_mps.default,
        torch.ops.higher_order.flex_attention,
    ),
    # without sequence parallelism, an all-reduce takes the place of the reduce-scatter
    "reduce_scatters": (collectives.reduce_scatter_tensor.default, collectives.all_reduce.default),
    "exchanges": (collectives.all_to_all_single.default,),
}
"""Name in the setting activation_checkpoint.save -> operators whose results are saved."""

_GATHER_OPS = {
    collectives.all_gather_into_tensor.default,
    collectives.wait_tensor.default,
    # These assemble a gather along the sequence. Their results are as large as the gathered tensor.
    aten.split.Tensor,
    aten.cat.default,
    aten.view.default,
    aten.slice.Tensor,
    aten.t.default,
}

Forward = Callable[..., Tensor]
RecomputePolicy = Literal["nothing", "gathers", "gathers_compiled", "selected", "all"]


def recompute_policy(index: int, config: ActivationCheckpointConfig, gathers: bool, compiled: bool) -> RecomputePolicy:
    """Return the recomputation policy of block `index` of the model. gathers: whether the block's forward gathers activations.

    Eager and compiled blocks recompute gathers by different mechanisms (tested with torch 2.13). Eager blocks use saved-tensor
    hooks (saved_tensors.py), which torch.compile refuses to trace. Compiled blocks use a checkpoint policy, which marks the
    gathers for the compiler's partitioner. An eager block with this checkpoint policy would cache every operator's result: on 2
    ranks, the block of tests/parallel/test_activation_checkpoint.py would save 273,920 bytes instead of 79,104. Its backward
    would also raise an exception, because a cached tensor is mutated.
    """
    if config.mode in ("full", "selective") and index % config.every_n_blocks == 0:
        return "all" if config.mode == "full" else "selected"
    if not gathers or not config.recompute_all_gather or config.mode == "budget":
        return "nothing"
    return "gathers_compiled" if compiled else "gathers"


def block_forward(
    forward: Forward,
    policy: RecomputePolicy,
    config: ActivationCheckpointConfig,
    compiled: bool,
    checkpoint_outside: bool = False,
    fullgraph: bool = True,
    is_trained: bool = True,
) -> Forward:
    """Apply recomputation and compilation to a block's forward, and return the new forward. The block must already be sharded.

    Args:
        forward: Forward of the block.
        policy: Result of recompute_policy.
        config: What a selective policy saves.
        compiled: Whether to compile the block.
        checkpoint_outside: Whether full recomputation wraps the compiled block. Inside the block, backward does not repeat the
            last matrix product, whose result it does not need.
        fullgraph: Whether the block is one graph. False: the graph of its experts may break.
        is_trained: Whether the block has trained parameters.
    """
    plain = forward
    if policy == "selected":
        forward = recompute_except(config.save, config.save_every_nth_matmul, forward)
    if policy == "gathers_compiled":
        forward = recompute_gathers_compiled(forward)
    outside = checkpoint_outside and compiled
    if policy == "all" and not outside:
        forward = checkpointed(forward)
    if not is_trained:
        forward = _recompute_for_backward(forward, plain)
    if compiled:
        forward = torch.compile(forward, fullgraph=fullgraph)  # all blocks share one graph
    return checkpointed(forward) if policy == "all" and outside else forward


def _recompute_for_backward(forward: Forward, plain: Forward) -> Forward:
    """Return a frozen block's forward that calls `plain`, without recomputation, if it has no backward because nothing before it
    is trained: torch 2.13 cannot compile a checkpoint without a backward."""
    return lambda h, *args: forward(h, *args) if h.requires_grad else plain(h, *args)


def checkpointed(forward: Forward, contexts: Callable[[], tuple] | None = None) -> Forward:
    """Return a forward that saves only its inputs and the results that are selected by the context managers of `contexts`."""
    if contexts is None:  # torch 2.13 cannot compile a checkpoint with noop_context_fn
        return lambda *args: checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)
    return lambda *args: checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def recompute_except(save: tuple[str, ...], every_nth_matmul: int, forward: Forward) -> Forward:
    """Return a forward that saves only the results of the operators in `save` (keys of SAVEABLE_OPS). If `save` contains
    "matmuls", only the result of every n-th matmul is saved."""
    saved_ops = {operator for name in save for operator in SAVEABLE_OPS[name]}

    def contexts() -> tuple:
        matmul_count: Counter[bool] = Counter()  # forward and recomputation count separately

        def policy(ctx, operator, *args, **kwargs) -> CheckpointPolicy:
            save_result = operator in saved_ops and not _is_partial_product(args[0])
            if operator in SAVEABLE_OPS["matmuls"]:
                matmul_count[ctx.is_recompute] += 1
                save_result = save_result and matmul_count[ctx.is_recompute] % every_nth_matmul == 0
            return CheckpointPolicy.MUST_SAVE if save_result else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return checkpointed(forward, contexts)


def _is_partial_product(factor: Any) -> bool:
    """Return whether tensor parallelism shards the factor's last dim. If so, the factor's product with a weight is a partial sum.
    Partial sums are not saved, because each has the full width of the hidden state. Their sum over the ranks can be saved.
    Compiled blocks have no DTensors here, but the compiler saves no partial sums, because backward does not need them."""
    return isinstance(factor, DTensor) and factor.placements[0].is_shard(factor.dim() - 1)


def recompute_gathers_compiled(forward: Forward) -> Forward:
    """Return a forward whose gathers are recomputed in backward. Use this only for compiled blocks. An eager block would save the
    results of all other operators, but the compiler saves only the results that backward needs."""

    def policy(ctx, operator, *args, **kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_RECOMPUTE if operator in _GATHER_OPS else CheckpointPolicy.MUST_SAVE

    return checkpointed(forward, lambda: create_selective_checkpoint_contexts(policy))


def run_hooks_outside_checkpoint(module: nn.Module) -> None:
    """Hide the forward hooks of a module inside a block, such as those of a nested FSDP unit, from selective recomputation.
    The recomputation must repeat the operators of forward, but a gather is not repeated if its result still exists."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = partial(call_outside_checkpoint, hook)


def call_outside_checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return the function's result, hidden from selective recomputation: its operators are neither saved nor counted."""
    is_inside = isinstance(_get_current_dispatch_mode(), _CachingTorchDispatchMode | _CachedTorchDispatchMode)
    with _pop_mode_temporarily() if is_inside else nullcontext():
        return function(*args, **kwargs)


def in_backward() -> bool:
    """Return whether autograd runs a backward in this thread. A forward is then a recomputation."""
    return torch._C._current_graph_task_id() != -1

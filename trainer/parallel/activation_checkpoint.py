"""Activation checkpointing: which activations a block saves for backward and which it recomputes (Chen et al. 2016,
arXiv:1604.06174)."""

from collections import Counter
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.config import ActivationCheckpointConfig

aten, collectives = torch.ops.aten, torch.ops._c10d_functional

SAVEABLE_OPS = {
    "matmuls": (aten.mm.default, aten.addmm.default, aten.bmm.default),
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
}
"""Values of [activation_checkpoint] save -> operators."""

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
Policy = Callable[..., CheckpointPolicy]
RecomputePolicy = Literal["nothing", "gathers", "gathers_compiled", "selected", "all"]


def recompute_policy(index: int, config: ActivationCheckpointConfig, gathers: bool, compiled: bool) -> RecomputePolicy:
    """Return what block `index` of the model recomputes in backward. gathers: whether its forward gathers activations.

    Recomputed gathers need two mechanisms, as tried with torch 2.13. Eager blocks use saved-tensor hooks (recompute.py), which
    torch.compile refuses to trace. Compiled blocks use a checkpoint policy, which marks the gathers for the compiler's
    partitioner. In an eager block the same policy caches the result of every operator: 273,920 bytes instead of 79,104 for the
    block of tests/parallel/test_activation_checkpoint.py on 2 ranks. Its backward raises, since a cached tensor is mutated.
    """
    if config.mode in ("full", "selective") and index % config.every_n_blocks == 0:
        return "all" if config.mode == "full" else "selected"
    if not gathers or not config.recompute_all_gather or config.mode == "budget":
        return "nothing"
    return "gathers_compiled" if compiled else "gathers"


def recompute_all(forward: Forward) -> Forward:
    """Save only the inputs of a block."""
    return lambda *args: checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)


def recompute_except(save: tuple[str, ...], every_nth_matmul: int, forward: Forward) -> Forward:
    """Save only the results of the operators in `save` (keys of SAVEABLE_OPS) and those of every n-th matmul."""
    saved_ops = {operator for name in save for operator in SAVEABLE_OPS[name]}
    matmuls = set(SAVEABLE_OPS["matmuls"])

    def make_policy() -> Policy:
        matmul_count: Counter[bool] = Counter()  # forward and recomputation count separately

        def policy(ctx, operator, *args, **kwargs) -> CheckpointPolicy:
            save_result = operator in saved_ops and not _is_partial_product(args)
            if operator in matmuls:
                matmul_count[ctx.is_recompute] += 1
                save_result = save_result and matmul_count[ctx.is_recompute] % every_nth_matmul == 0
            return CheckpointPolicy.MUST_SAVE if save_result else CheckpointPolicy.PREFER_RECOMPUTE

        return policy

    return _selective_checkpoint(make_policy, forward)


def _is_partial_product(args: tuple) -> bool:
    """Whether an operator is the product with a row-wise matrix under tensor parallelism, which is a partial sum. The sum has
    the full width of the hidden state. Its reduction over the ranks is saved instead, so the partial sum is recomputed. (A
    compiler does not see DTensors. But it saves only tensors that backward needs, and these are not needed.)"""
    first = args[0] if args else None
    return isinstance(first, DTensor) and first.placements[0].is_shard(first.dim() - 1)


def recompute_gathers(forward: Forward) -> Forward:
    """Recompute gathered inputs. Use this only for compiled blocks: the compiler saves all other tensors that backward needs."""

    def policy(ctx, operator, *args, **kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_RECOMPUTE if operator in _GATHER_OPS else CheckpointPolicy.MUST_SAVE

    return _selective_checkpoint(lambda: policy, forward)


def _selective_checkpoint(make_policy: Callable[[], Policy], forward: Forward) -> Forward:
    def contexts():
        return create_selective_checkpoint_contexts(make_policy())

    return lambda *args: checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

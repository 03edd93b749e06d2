"""What a block keeps for backward, and what it computes again (Chen et al. 2016, arXiv:1604.06174)."""

from collections import Counter
from collections.abc import Callable
from functools import partial
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
    # without sequence parallelism an all-reduce stands in its place
    "reduce_scatters": (collectives.reduce_scatter_tensor.default, collectives.all_reduce.default),
}
"""Words of [activation_checkpoint] save -> operators."""

_GATHERED = {
    collectives.all_gather_into_tensor.default,
    collectives.wait_tensor.default,
    # how a gather along the sequence is put together; what they make is as large as the gather itself
    aten.split.Tensor,
    aten.cat.default,
    aten.view.default,
    aten.slice.Tensor,
    aten.t.default,
}

Forward = Callable[..., Tensor]


RecomputePolicy = Literal["nothing", "gathers", "gathers_compiled", "selected", "all"]


def recompute_policy(number: int, config: ActivationCheckpointConfig, gathers: bool, compiled: bool) -> RecomputePolicy:
    """What the block of that number computes again in backward. gathers: whether it gathers anything in forward."""
    if config.mode in ("full", "selective") and number % config.every_n_blocks == 0:
        return "all" if config.mode == "full" else "selected"
    if not gathers or not config.recompute_all_gather or config.mode == "budget":
        return "nothing"
    return "gathers_compiled" if compiled else "gathers"


def recompute_all(compute: Forward) -> Forward:
    """Keep the inputs of a block, nothing else."""
    return lambda *args: checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False)


def recompute_except(saved: tuple[str, ...], every_matmul: int, compute: Forward) -> Forward:
    """Keep the results of the chosen operators. every_matmul: keep every n-th matmul only."""
    kept = {operator for word in saved for operator in SAVEABLE_OPS[word]}
    matmuls = set(SAVEABLE_OPS["matmuls"])

    def policy_of_one_forward() -> Callable[..., CheckpointPolicy]:
        seen: Counter[bool] = Counter()  # forward and recomputation count for themselves

        def policy(ctx, operator, *args, **kwargs) -> CheckpointPolicy:
            keep = operator in kept and not _is_part_of_a_sum(args)
            if operator in matmuls:
                seen[ctx.is_recompute] += 1
                keep = keep and seen[ctx.is_recompute] % every_matmul == 0
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return policy

    return _selective(policy_of_one_forward, compute)


def _is_part_of_a_sum(args: tuple) -> bool:
    """Whether an operator is the product of a row-wise matrix under tensor parallelism. It is as wide as the whole hidden
    state, and what is kept of it is its reduction: to compute it again, if it comes to that, is the cheaper choice. (A
    compiler sees no DTensors; it keeps only what backward needs, which these products are not.)"""
    first = args[0] if args else None
    return isinstance(first, DTensor) and first.placements[0].is_shard(first.dim() - 1)


def recompute_gathers(compute: Forward) -> Forward:
    """Keep all but gathered inputs. Only inside torch.compile, which keeps of the rest what backward needs; without it,
    recompute.py does this."""

    def policy(ctx, operator, *args, **kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_RECOMPUTE if operator in _GATHERED else CheckpointPolicy.MUST_SAVE

    return _selective(lambda: policy, compute)


def _selective(make_policy: Callable[[], Callable[..., CheckpointPolicy]], compute: Forward) -> Forward:
    def contexts():
        return create_selective_checkpoint_contexts(make_policy())

    return partial(_checkpointed, compute, contexts)


def _checkpointed(compute: Forward, contexts, *args: Tensor) -> Tensor:
    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

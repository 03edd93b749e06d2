"""Patches of torch for simulations with fake tensors, and hooks into FSDP."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import _utils as pipelining
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from models.attention import CausalAttention
from models.context import Context
from trainer.adapters.nf4 import CODES
from trainer.objective import cross_entropy
from trainer.objective.cross_entropy import chunk_starts
from trainer.parallel import experts, float8, mesh, quantized
from trainer.parallel.attention import AttentionBackend, with_sinks
from trainer.runtime.host_memory import HostTransfer
from trainer.tools.planner.recorder import Recorder


class _FlexAttention(CausalAttention):
    """Plain attention without a mask. It simulates flex_attention, because both save the same tensors and block masks are small.
    In a window, every query attends to the average number of keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None, sinks: Tensor | None = None) -> Tensor:
        out = self._without_sinks(q, k, v, mask)
        return out if sinks is None else with_sinks(out, q.new_empty(q.shape[:-1], dtype=torch.float32), sinks)

    def _without_sinks(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        seq = k.shape[2]
        if not self.kind.has_window(seq):
            return super().forward(q, k, v, mask)
        keys = slice(max(1, self.kind.pairs(seq) // seq))
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k[:, :, keys], v[:, :, keys], scale=self.kind.scale, enable_gqa=gqa)


FAKE_GPU_KERNELS = AttentionBackend(lambda kind, cp, by_document, dtype: _NoMask(), _FlexAttention)
"""Simulated kernels and masks of a GPU."""


class _NoMask(nn.Module):
    def forward(self, context: Context) -> None:
        pass


@contextmanager
def record_host_buffers() -> Iterator[list[Tensor]]:
    """Context manager that yields a list. Each host buffer that HostTransfer allocates is appended to the list."""
    buffers: list[Tensor] = []
    host_like = HostTransfer.host_like

    def wrapper(transfer: HostTransfer, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        buffers.append(host_like(transfer, tensor, dtype))
        return buffers[-1]

    with patch.object(HostTransfer, "host_like", wrapper):
        yield buffers


def skip_shape_negotiation(schedule: Any) -> None:
    """Give the pipeline stages static shapes. Otherwise torch would request shapes from other ranks, which do not exist."""

    def set_static(stages: Sequence, *args) -> None:
        for stage in stages:
            stage._inference_mode = pipelining.InferenceMode.STATIC

    # Its name until torch 2.14, and that of torch 2.15.
    schedule._warmup_p2p = schedule._initialize_pipeline_distributed_state = set_static


@contextmanager
def annotate_fsdp(
    label: Callable[[Tensor, str], None],
    around_reduction: Callable[[FSDPParamGroup], AbstractContextManager] = lambda group: nullcontext(),
    around_gather: Callable[[], AbstractContextManager] = nullcontext,
) -> Iterator[None]:
    """Context manager that calls label(tensor, category) for FSDP's unreduced gradients and gathered parameters.

    Args:
        around_reduction: Returns a context manager for each reduction.
        around_gather: Returns a context manager for each gather.
    """
    reduce, gather, wait = FSDPParamGroup.post_backward, FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard

    def label_accumulated(group: FSDPParamGroup) -> None:
        for parameter in group.fsdp_params:
            if parameter.unsharded_accumulated_grad is not None:
                label(parameter.unsharded_accumulated_grad, "gradients")

    def post_backward(group: FSDPParamGroup, *args: Any) -> None:
        for parameter in group.fsdp_params:
            gathered = getattr(parameter, "_unsharded_param", None)
            if gathered is not None and gathered.grad is not None:
                label(gathered.grad, "gradients")
        label_accumulated(group)
        with around_reduction(group):
            reduce(group, *args)
        label_accumulated(group)

    def unshard(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> None:
        with around_gather():
            gather(group, *args, **kwargs)

    def wait_for_unshard(group: FSDPParamGroup) -> None:
        with around_gather():
            wait(group)
        for parameter in group.fsdp_params:
            for output in parameter.all_gather_outputs:
                label(output, "unsharded parameters")

    with (
        patch.object(FSDPParamGroup, "post_backward", post_backward),
        patch.object(FSDPParamGroup, "unshard", unshard),
        patch.object(FSDPParamGroup, "wait_for_unshard", wait_for_unshard),
    ):
        yield


@contextmanager
def ignore_sharding_trials(recorder: Recorder) -> Iterator[None]:
    """Context manager that pauses the recorder while DTensor infers output shapes with operators on full-size fake tensors.
    torch 2.11 infers the shapes at every call; torch 2.13 caches them."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def wrapper(propagator: ShardingPropagator, *args: Any) -> Any:
        with patch.object(recorder, "paused", True):
            return propagate(propagator, *args)

    with patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", wrapper):
        yield


@contextmanager
def bound_loss_chunks(recorder: Recorder) -> Iterator[None]:
    """Context manager that simulates at most three chunks of each loss: the first, one that represents all others, and the last,
    which may be shorter."""

    def starts(num_tokens: int, chunk_tokens: int) -> Iterator[int]:
        every = chunk_starts(num_tokens, chunk_tokens)
        yield every[0]
        if len(every) > 2:
            with patch.object(recorder, "weight", recorder.weight * (len(every) - 2)):
                yield every[1]
        if len(every) > 1:
            yield every[-1]

    with patch.object(cross_entropy, "chunk_starts", starts):
        yield


def own_groups() -> AbstractContextManager:
    """Return a context manager in which each mesh axis gets a process group of its own, whose traffic is counted for this axis.
    In a run, most axes over all ranks share the world's group."""

    def new_group(partition: list[list[int]], axis: str, timeout: timedelta | None) -> ProcessGroup:
        ranks = next(part for part in partition if dist.get_rank() in part)
        return dist.new_group(ranks, timeout, use_local_synchronization=True, group_desc=axis)

    return patch.object(mesh, "_new_group", new_group)


def assumed_splits(imbalance: float) -> AbstractContextManager:
    """Return a context manager that replaces the numbers of rows that ranks of ep send each other: a simulation has no routes.
    This rank receives equally many rows from each rank, together 1 + imbalance times those of an average rank, which are as many
    as it sends. It cannot receive more than all rows of the group."""

    def sizes(num_rows: int, sent: Tensor, received: Tensor) -> tuple[list[int], list[int]]:
        ranks = len(sent)
        num_received = round(num_rows * min(1 + imbalance, ranks))
        to_ranks, from_ranks = ([(n + rank) // ranks for rank in range(ranks)] for n in (num_rows, num_received))
        return to_ranks, from_ranks

    return patch.object(experts, "split_sizes", sizes)


class _FusedNorm(torch.autograd.Function):
    """RMSNorm with the memory use of torch's fused GPU kernel. On a CPU, torch uses several operators that save fp32 tensors."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _fused_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float) -> Tensor:
    weight = x.new_empty(shape) if weight is None else weight
    if not isinstance(x, DTensor):
        return _FusedNorm.apply(x, weight)
    partial = [Replicate() if placement.is_replicate() else Partial() for placement in x.placements]
    out = _FusedNorm.apply(x.to_local(), weight.to_local(grad_placements=partial))
    return DTensor.from_local(out, x.device_mesh, x.placements, run_check=False)


def fused_norms(on_gpu: bool) -> AbstractContextManager:
    return patch.object(F, "rms_norm", _fused_norm) if on_gpu else nullcontext()


def _fused_quantize(factor: Tensor, dtype: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
    """Read a factor for its largest values, then read it and write the rounded one, as the compiler's kernels do."""
    largest = torch.linalg.vector_norm(factor, torch.inf, -1 if by_row else None, keepdim=by_row).float()
    return factor.new_empty(factor.shape, dtype=dtype), largest


def _fused_dequantize(parts: Mapping[str, Tensor], pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """Read codes and write values. Scales, at most 6 % of the codes' bytes, are not counted."""
    codes = parts[CODES]
    return codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype)


@contextmanager
def fused_conversions(compiled: bool) -> Iterator[None]:
    """Context manager that simulates compiled conversions to float8 and from 4 bits. compiled: whether the run compiles its
    blocks."""
    if not compiled:
        yield
        return
    with patch.object(float8, "quantize", _fused_quantize), patch.object(quantized, "dequantize", _fused_dequantize):
        yield

"""What torch does otherwise in an imaginary world, and what it does not tell of itself."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import _utils as pipelining
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from trainer.parallel.attention import AttentionBackend
from trainer.planning.recorder import Recorder
from trainer.runtime.host_memory import HostTransfer

FAKE_GPU_KERNELS = AttentionBackend(lambda cp, by_document, dtype: _NoMask(), lambda plain: plain)
"""flex_attention keeps for backward what the plain kernel keeps, and its mask is small."""


class _NoMask(nn.Module):
    def forward(self, positions: Tensor, documents: Tensor) -> None:
        pass


@contextmanager
def record_host_buffers() -> Iterator[list[Tensor]]:
    """Those that are made to be copied to, which are as other tensors here."""
    made: list[Tensor] = []
    make = HostTransfer.host_like

    def told(link: HostTransfer, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        made.append(make(link, tensor, dtype))
        return made[-1]

    with patch.object(HostTransfer, "host_like", told):
        yield made


def skip_shape_negotiation(schedule: Any) -> None:
    """In torch's pipelines neighbours vote on whether both know the shapes of what passes; here are none, and all do."""

    def agree(stages: Sequence, *rest) -> None:
        for stage in stages:
            stage._inference_mode = pipelining.InferenceMode.STATIC

    schedule._warmup_p2p = agree


@contextmanager
def annotate_fsdp(recorder: Recorder, gathers_once: bool) -> Iterator[None]:
    """Gradients of gathered parameters, which FSDP takes away when it has reduced them or added them up; and in a pipeline, where
    a microbatch stands for several, what it does once a step: reductions, and gathers if gathers_once."""
    reduce, gather, wait = FSDPParamGroup.post_backward, FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard

    def reduced(group: FSDPParamGroup, *args) -> None:
        for parameter in group.fsdp_params:
            gathered = getattr(parameter, "_unsharded_param", None)
            for gradient in (gathered is not None and gathered.grad, parameter.unsharded_accumulated_grad):
                if isinstance(gradient, Tensor):
                    recorder.mark(gradient, "gradients")
        # An update in backward too.
        with recorder.weighted(1.0 if recorder.stepping and group.reduce_grads else recorder.weight):
            reduce(group, *args)
        for parameter in group.fsdp_params:
            if parameter.unsharded_accumulated_grad is not None:
                recorder.mark(parameter.unsharded_accumulated_grad, "gradients")

    def of_gathers() -> AbstractContextManager:
        return recorder.weighted(1.0) if gathers_once else nullcontext()

    def gathered(group: FSDPParamGroup, *args, **kwargs) -> None:
        with of_gathers():
            gather(group, *args, **kwargs)

    def awaited(group: FSDPParamGroup) -> None:
        with of_gathers():
            wait(group)

    with (
        patch.object(FSDPParamGroup, "post_backward", reduced),
        patch.object(FSDPParamGroup, "unshard", gathered),
        patch.object(FSDPParamGroup, "wait_for_unshard", awaited),
    ):
        yield


@contextmanager
def ignore_sharding_trials(recorder: Recorder) -> Iterator[None]:
    """DTensor tries operators on fake tensors of the whole sizes, to know what they give; what torch 2.11 does so each time, 2.13
    remembers."""
    attempt = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(propagator: ShardingPropagator, *args):
        with recorder.paused():
            return attempt(propagator, *args)

    with patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen):
        yield


class _FusedNorm(torch.autograd.Function):
    """What torch's kernel for GPUs keeps and makes; on a CPU the norm is put together of operators that keep fp32 values."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _fused_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    if not isinstance(x, DTensor):
        return _FusedNorm.apply(x, weight)
    partial = [Replicate() if placement.is_replicate() else Partial() for placement in x.placements]
    out = _FusedNorm.apply(x.to_local(), weight.to_local(grad_placements=partial))
    return DTensor.from_local(out, x.device_mesh, x.placements, run_check=False)


def norms(on_gpu: bool) -> AbstractContextManager:
    return patch.object(F, "rms_norm", _fused_norm) if on_gpu else nullcontext()

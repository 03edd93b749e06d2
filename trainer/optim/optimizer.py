"""Optimizers for sharded parameters, with clipping by the global gradient norm."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from trainer.config import ConfigError, OptimizerConfig
from trainer.optim.placement import CpuOffload, InBackward, OnDevice, UpdateStrategy
from trainer.optim.quantization import BLOCK_SIZE, BlockQuantizer, is_quantizable
from trainer.runtime.device import DTYPES
from trainer.runtime.distributed import sum_over
from trainer.runtime.dtensor import sharded_like, to_local


def parameter_groups(parameters: Iterable[Tensor], weight_decay: float) -> list[dict]:
    """Return two groups: matrices with weight decay, and one-dimensional parameters (norms, biases) without."""
    decay, no_decay = [], []
    for parameter in parameters:
        (decay if parameter.dim() >= 2 else no_decay).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


def _adamw(parameters: Iterable[Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101) with torch's fused kernel and allocated moments."""
    groups = [g for g in parameter_groups(parameters, config.weight_decay) if g["params"]]
    same_dtype = all(p.dtype == DTYPES.get(config.state_dtype) for group in groups for p in group["params"])
    hyperparameters = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": True}
    quantizers = {}
    if config.state_dtype == "8bit":
        device = groups[0]["params"][0].device
        quantizers = {name: BlockQuantizer(signed, device) for name, signed in _MOMENTS.items()}
    if same_dtype:
        optimizer = torch.optim.AdamW(groups, **hyperparameters)
    else:
        optimizer = _MixedPrecisionAdamW(groups, quantizers, **hyperparameters)
    # Allocated now instead of in the first step, so that a checkpoint can be loaded and the memory is known from the start.
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
            for name in _MOMENTS:
                optimizer.state[p] |= _new_moment(name, p, quantizers.get(name), DTYPES.get(config.state_dtype))
    return optimizer


_CHUNK_VALUES = 2**23
"""Number of values converted to fp32 at a time."""

_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Name of a moment -> whether its values are signed."""


def _new_moment(name: str, p: Tensor, quantizer: BlockQuantizer | None, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return a moment of zeros: quantized if a quantizer is given and fits the parameter, else of dtype (default fp32)."""
    if quantizer is None or not is_quantizable(p):
        return {name: torch.zeros_like(p, dtype=dtype or torch.float32)}
    codes, scales = quantizer.zeros_like(to_local(p.detach()))
    return {name: sharded_like(p, codes), f"{name}_scale": sharded_like(p, scales)}


class _MixedPrecisionAdamW(torch.optim.AdamW):
    """AdamW for parameters and moments of different precisions. The same fused kernel computes each update in fp32, and the
    result is rounded to nearest."""

    def __init__(self, groups: list[dict], quantizers: dict[str, BlockQuantizer], **hyperparameters: Any):
        """quantizers: name of each 8-bit moment -> its quantizer."""
        super().__init__(groups, **hyperparameters)
        self.quantizers = quantizers

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: Tensor, group: dict) -> None:
        step = self.state[p]["step"]
        step += 1
        tensors = {"p": to_local(p), "grad": to_local(p.grad)}
        tensors |= {name: to_local(t) for name, t in self.state[p].items() if name != "step"}
        rows = max(1, _CHUNK_VALUES // max(1, tensors["p"][:1].numel()))
        for chunk in zip(*(t.split(rows) for t in tensors.values()), strict=True):
            self._update_rows(dict(zip(tensors, chunk, strict=True)), step, group)
        # A skipped update must not increase the step.
        step -= self.found_inf

    def _update_rows(self, stored: dict[str, Tensor], step: Tensor, group: dict) -> None:
        """stored: name -> some rows of the parameter, of its gradient or of a moment."""
        parameter, exp_avg, exp_avg_sq = in_fp32 = [self._to_fp32(stored, name) for name in ("p", *_MOMENTS)]
        torch._fused_adamw_(
            [parameter], [stored["grad"].float()], [exp_avg], [exp_avg_sq], [], [step],
            lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
            eps=group["eps"], amsgrad=False, maximize=False, grad_scale=None, found_inf=self.found_inf,
        )  # fmt: skip
        for name, value in zip(("p", *_MOMENTS), in_fp32, strict=True):
            if f"{name}_scale" in stored:
                self.quantizers[name].quantize_(value, stored[name], stored[f"{name}_scale"])
            else:
                stored[name].copy_(value)

    def _to_fp32(self, stored: dict[str, Tensor], name: str) -> Tensor:
        if f"{name}_scale" in stored:
            return self.quantizers[name].dequantize(stored[name], stored[f"{name}_scale"])
        return stored[name].float()


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor], OptimizerConfig], torch.optim.Optimizer]] = {"adamw": _adamw}


def require_shard_independent_blocks(parameters: Mapping[str, Tensor], config: OptimizerConfig) -> None:
    """Raise ConfigError if 8-bit quantization would depend on the layout. parameters: by name; they may be on the meta device."""
    for name, p in parameters.items():
        if config.state_dtype == "8bit" and is_quantizable(p) and not is_quantizable(to_local(p)):
            columns = to_local(p).shape[1]
            message = (
                f"8bit needs rows of multiples of {BLOCK_SIZE}, but under tp rows of {name} have {columns}; use bf16"
            )
            raise ConfigError("optimizer.state_dtype", message)


class Optimizer:
    """Update of a rank's parameters, optimizer state by parameter name, and global gradient norm."""

    def __init__(
        self, parameters: Mapping[str, Tensor], config: OptimizerConfig, model_group: ProcessGroup, ranks_per_stage: int
    ):
        """parameters: this rank's parameters by name; frozen ones are ignored. model_group: all ranks that hold a shard of the
        model. ranks_per_stage: number of ranks in this rank's pipeline stage, which is all of model_group without a pipeline."""
        self.names = {p: name for name, p in parameters.items() if p.requires_grad}
        self.device = next(iter(self.names)).device
        factors = [_replication_factor(p, ranks_per_stage) for p in self.names]
        self.replication = torch.tensor(factors, dtype=torch.float32, device=self.device)

        def factory(subset: Iterable[Tensor]) -> torch.optim.Optimizer:
            return OPTIMIZERS[config.name](subset, config)

        self.update: UpdateStrategy
        if config.in_backward:
            self.update = InBackward(list(self.names), factory)
        elif config.offload == "none":
            self.update = OnDevice(list(self.names), factory)
        else:
            self.update = CpuOffload(list(self.names), factory, config.offload == "state_and_gradients")
        self.model_group = model_group

    def start_step(self, lr: float) -> None:
        """Set the learning rate and free the gradients, before the first backward of a step."""
        for p in self.names:
            p.grad = None
        self.update.set_lr(lr)

    @torch.no_grad()
    def clip(self, max_norm: float | None, vote: bool = False) -> tuple[Tensor, Tensor]:
        """Scale the gradients so that their global norm is at most max_norm (None: do not scale). Return the norm before
        scaling and the number of ranks that voted, both scalars."""
        # One all-reduce for all layouts: ranks that hold the same values contribute equal shares of their squared norm.
        local = (self.update.norms().square() / self.replication).sum()
        squared, votes = sum_over(torch.stack([local, torch.full_like(local, vote)]), self.model_group).unbind()
        norm = squared.sqrt()
        if max_norm is not None:
            # Multiply in any case, because a condition would need a host synchronization.
            self.update.scale((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm, votes

    def step(self, skip: Tensor) -> None:
        """Update the parameters without a host synchronization. skip: a scalar; if true, parameters and state do not change.

        An update in backward has already run, and has skipped only the shards with non-finite gradients.
        """
        self.update.step(skip.to(self.replication))

    def state(self) -> dict[str, Tensor]:
        """Return the live state: "<parameter>/<quantity>" -> tensor. Hyperparameters are settings, not state."""
        return {
            f"{name}/{quantity}": tensor
            for p, name in self.names.items()
            for quantity, tensor in self.update.state(p).items()
        }

    def sync_master_weights(self, state_loaded: bool) -> None:
        """Call after parameters were loaded. state_loaded: whether the optimizer state was loaded too."""
        self.update.sync_master_weights(state_loaded)

    def host_tensors(self) -> list[Tensor]:
        """Return the tensors that are offloaded to host memory."""
        return self.update.host_tensors()


def _replication_factor(parameter: Tensor, ranks_per_stage: int) -> int:
    """Return the number of ranks that hold the same shard."""
    if not isinstance(parameter, DTensor):
        return ranks_per_stage
    assert not any(placement.is_partial() for placement in parameter.placements)
    shards = math.prod(
        parameter.device_mesh.size(axis)
        for axis, placement in enumerate(parameter.placements)
        if not isinstance(placement, Replicate)
    )
    return ranks_per_stage // shards

"""AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101) with torch's fused kernel, for moments of any precision."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainer.config import OptimizerConfig
from trainer.optim.quantization import BlockQuantizer, is_quantizable
from trainer.runtime.device import DTYPES
from trainer.runtime.dtensor import sharded_like, to_local

_CHUNK_VALUES = 2**23
"""Number of values converted to fp32 at a time."""

_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Name of a moment -> whether its values are signed."""


def parameter_groups(parameters: Iterable[Tensor], weight_decay: float) -> list[dict]:
    """Return two parameter groups: matrices, with weight decay, and one-dimensional parameters, without weight decay."""
    decay, no_decay = [], []
    for parameter in parameters:
        (decay if parameter.dim() >= 2 else no_decay).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


def adamw(parameters: Iterable[Tensor], config: OptimizerConfig) -> "AdamW":
    """Return AdamW. Its state is already allocated, so that a checkpoint can be loaded and the memory is known before step 1."""
    groups = [g for g in parameter_groups(parameters, config.weight_decay) if g["params"]]
    parameters = [p for group in groups for p in group["params"]]
    hyperparameters = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": True}
    quantizers = {}
    if config.state_dtype == "8bit":
        quantizers = {name: BlockQuantizer(signed, parameters[0].device) for name, signed in _MOMENTS.items()}
    if all(p.dtype == DTYPES.get(config.state_dtype) for p in parameters):
        optimizer = AdamW(groups, **hyperparameters)
    else:
        optimizer = _MixedPrecisionAdamW(groups, quantizers, **hyperparameters)
    for p in parameters:
        state = {"step": optimizer.num_steps}
        for name in _MOMENTS:
            if quantizers and is_quantizable(p):
                codes, scales = quantizers[name].zeros_like(to_local(p.detach()))
                state |= {name: sharded_like(p, codes), f"{name}_scale": sharded_like(p, scales)}
            else:
                state[name] = torch.zeros_like(p, dtype=DTYPES.get(config.state_dtype, torch.float32))
        optimizer.state[p] = state
    return optimizer


class AdamW(torch.optim.AdamW):
    """torch's AdamW with less work on the host: all parameters share one counter of steps, and the fused kernel gets local
    tensors. `update` replaces `step`, for which torch also runs hooks and its profiler."""

    def __init__(self, groups: list[dict], **hyperparameters: Any):
        super().__init__(groups, **hyperparameters)
        self.num_steps = torch.zeros((), dtype=torch.float32, device=groups[0]["params"][0].device)

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError("call update")

    @torch.no_grad()
    def update(self, skip: Tensor, grad_scale: Tensor | None = None) -> None:
        """Update all parameters that have a gradient. skip: fp32 scalar; parameters and state do not change if it is 1.
        grad_scale: fp32 scalar by which the gradients are divided."""
        # The kernel's arguments for torch.amp.GradScaler.
        scalars = {"found_inf": skip, "grad_scale": grad_scale}
        self.num_steps += 1 - skip
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(parameters, group | scalars)

    def _update(self, parameters: list[Tensor], group: dict) -> None:
        moments = ([to_local(self.state[p][name]) for p in parameters] for name in _MOMENTS)
        gradients = [to_local(p.grad) for p in parameters]
        self._run_kernel([to_local(p) for p in parameters], gradients, *moments, group)

    def _run_kernel(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        group: dict,
    ) -> None:
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            parameters, gradients, exp_avgs, exp_avg_sqs, [], [self.num_steps] * len(parameters),
            lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
            amsgrad=False, maximize=False, grad_scale=group["grad_scale"], found_inf=group["found_inf"],
        )  # fmt: skip


class _MixedPrecisionAdamW(AdamW):
    """AdamW for parameters and moments of different dtypes. The fused kernel computes each update in fp32. The results are then
    rounded to nearest."""

    def __init__(self, groups: list[dict], quantizers: dict[str, BlockQuantizer], **hyperparameters: Any):
        """quantizers: name of each 8-bit moment -> its quantizer."""
        super().__init__(groups, **hyperparameters)
        self.quantizers = quantizers

    def _update(self, parameters: list[Tensor], group: dict) -> None:
        for p in parameters:
            tensors = {"p": to_local(p), "grad": to_local(p.grad)}
            tensors |= {name: to_local(t) for name, t in self.state[p].items() if name != "step"}
            rows = max(1, _CHUNK_VALUES // max(1, tensors["p"][:1].numel()))
            for chunk in zip(*(t.split(rows) for t in tensors.values()), strict=True):
                self._update_rows(dict(zip(tensors, chunk, strict=True)), group)

    def _update_rows(self, stored: dict[str, Tensor], group: dict) -> None:
        """Update some rows of a parameter. stored: these rows of the parameter, gradient, moments and their scales, by name."""
        values = {}
        for name in ("p", *_MOMENTS):
            value, scales = stored[name], stored.get(f"{name}_scale")
            values[name] = value.float() if scales is None else self.quantizers[name].dequantize(value, scales)
        fp32 = [values["p"]], [stored["grad"].float()], [values["exp_avg"]], [values["exp_avg_sq"]]
        self._run_kernel(*fp32, group)
        for name, value in values.items():
            if f"{name}_scale" in stored:
                self.quantizers[name].quantize_(value, stored[name], stored[f"{name}_scale"])
            else:
                stored[name].copy_(value)

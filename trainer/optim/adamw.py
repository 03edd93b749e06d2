"""AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101) with torch's fused kernel, for moments of any precision."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as fused_adamw

from trainer.config import OptimizerConfig
from trainer.optim.quantization import BlockQuantizer, is_quantizable
from trainer.runtime.device import DTYPES

_CHUNK_VALUES = 2**23
"""Number of values converted to fp32 at a time."""

_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Name of a moment -> whether its values are signed."""


def parameter_groups(parameters: Iterable[Tensor], weight_decay: float, biases: Collection[Tensor] = ()) -> list[dict]:
    """Return two parameter groups: matrices and stacked matrices, with weight decay, and norms and biases, without. biases: those
    that may be stacked, see models.spec.is_bias."""
    decay, no_decay, stacked = [], [], set(biases)
    for parameter in parameters:
        (decay if parameter.dim() >= 2 and parameter not in stacked else no_decay).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


def adamw(parameters: Iterable[Tensor], config: OptimizerConfig, biases: Collection[Tensor] = ()) -> torch.optim.AdamW:
    """Return AdamW. Its state is already allocated, so that a checkpoint can be loaded and the memory is known before step 1.

    Args:
        parameters: Local tensors. DTensors of several meshes cannot be updated by one kernel.
        config: Settings.
        biases: See parameter_groups. Their moments are never quantized.
    """
    matrices, others = parameter_groups(parameters, config.weight_decay, biases)
    groups = [g for g in (matrices, others) if g["params"]]
    quantizable = {p for p in matrices["params"] if is_quantizable(p)}
    parameters = [p for group in groups for p in group["params"]]
    hyperparameters = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": True}
    quantizers = {}
    if config.state_dtype == "8bit":
        quantizers = {name: BlockQuantizer(signed, parameters[0].device) for name, signed in _MOMENTS.items()}
    if all(p.dtype == DTYPES.get(config.state_dtype) for p in parameters):
        optimizer = torch.optim.AdamW(groups, **hyperparameters)
    else:
        optimizer = _MixedPrecisionAdamW(groups, quantizers, **hyperparameters)
    for p in parameters:
        state = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
        for name in _MOMENTS:
            if quantizers and p in quantizable:
                state[name], state[f"{name}_scale"] = quantizers[name].zeros_like(p)
            else:
                state[name] = torch.zeros_like(p, dtype=DTYPES.get(config.state_dtype, torch.float32))
        optimizer.state[p] = state
    return optimizer


def update(optimizer: torch.optim.AdamW, skip: Tensor, grad_scale: Tensor | None = None) -> None:
    """Update all parameters that have a gradient, and free their gradients. The host does not wait.

    Args:
        optimizer: Result of `adamw`.
        skip: fp32 scalar on the parameters' device. Parameters and state do not change if it is 1.
        grad_scale: fp32 scalar by which the gradients are divided, or None.
    """
    # Fused optimizers read these attributes, which torch.amp.GradScaler sets.
    optimizer.found_inf, optimizer.grad_scale = skip, grad_scale
    optimizer.step()
    optimizer.zero_grad()


class _MixedPrecisionAdamW(torch.optim.AdamW):
    """AdamW for parameters and moments of different dtypes. The fused kernel computes each update in fp32. The results are then
    rounded to nearest."""

    found_inf: Tensor
    grad_scale: Tensor | None

    def __init__(self, groups: list[dict], quantizers: dict[str, BlockQuantizer], **hyperparameters: Any):
        """quantizers: name of each 8-bit moment -> its quantizer."""
        super().__init__(groups, **hyperparameters)
        self.quantizers = quantizers

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: Tensor, group: dict) -> None:
        tensors = {"p": p, "grad": p.grad, **self.state[p]}
        step = tensors.pop("step")
        if p.dim() > 2:  # such as a stack of matrices: rows of all of them
            tensors = {name: t.flatten(0, -2) for name, t in tensors.items()}
        rows = max(1, _CHUNK_VALUES // max(1, tensors["p"][:1].numel()))
        for chunk in zip(*(t.split(rows) for t in tensors.values()), strict=True):
            # The kernel counts the step, here once per chunk.
            self._update_rows(dict(zip(tensors, chunk, strict=True)), step.clone(), group)
        step += 1 - self.found_inf

    def _update_rows(self, stored: dict[str, Tensor], step: Tensor, group: dict) -> None:
        """Update some rows of a parameter. stored: these rows of the parameter, gradient, moments and their scales, by name."""
        values = {}
        for name in ("p", *_MOMENTS):
            value, scales = stored[name], stored.get(f"{name}_scale")
            values[name] = value.float() if scales is None else self.quantizers[name].dequantize(value, scales)
        beta1, beta2 = group["betas"]
        fused_adamw(
            [values["p"]], [stored["grad"].float()], [values["exp_avg"]], [values["exp_avg_sq"]], [], [step],
            lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
            amsgrad=False, maximize=False, fused=True, grad_scale=self.grad_scale, found_inf=self.found_inf,
        )  # fmt: skip
        for name, value in values.items():
            if f"{name}_scale" in stored:
                self.quantizers[name].quantize_(value, stored[name], stored[f"{name}_scale"])
            else:
                stored[name].copy_(value)

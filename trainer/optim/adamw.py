"""AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101) with torch's fused kernel, for moments of any precision."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as fused_adamw

from trainer.base.config import OptimizerConfig
from trainer.optim.decay import cautious_factors
from trainer.optim.quantized_moments import BLOCK_SIZE, BlockQuantizer, is_quantizable
from trainer.runtime.device import DTYPES

_CHUNK_VALUES = 2**23
"""Number of values converted to fp32 at a time."""

_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Name of a moment -> whether its values are signed."""


class AdamW(torch.optim.AdamW):
    """AdamW for parameters and moments of one dtype."""

    def update(self, skip: Tensor, grad_scale: Tensor | None = None) -> None:
        """Update all parameters that have a gradient, and free their gradients. The host does not wait.

        Args:
            skip: fp32 scalar on the parameters' device. Parameters and state do not change if it is 1.
            grad_scale: fp32 scalar by which the gradients are divided, or None.
        """
        # Fused optimizers read these attributes, which torch.amp.GradScaler sets.
        self.found_inf, self.grad_scale = skip, grad_scale
        self.step()
        self.zero_grad()


def adamw(groups: Sequence[dict], config: OptimizerConfig, biases: Collection[Tensor]) -> AdamW:
    """Return AdamW. Its state is already allocated, so that a checkpoint can be loaded and the memory is known before step 1.

    Args:
        groups: torch's parameter groups, of local tensors. DTensors of several meshes cannot be updated by one kernel.
        config: Settings.
        biases: Those of the parameters that are biases, see models.spec.is_bias. Their moments are never quantized.
    """
    parameters = [p for group in groups for p in group["params"]]
    quantizable = {p for p in parameters if is_quantizable(p)} - {*biases}
    hyperparameters = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": True}
    quantizers = {}
    if config.state_dtype == "8bit":
        quantizers = {name: BlockQuantizer(signed, parameters[0].device) for name, signed in _MOMENTS.items()}
    if not config.cautious_decay and all(p.dtype == DTYPES.get(config.state_dtype) for p in parameters):
        optimizer = AdamW(groups, **hyperparameters)
    else:
        optimizer = _AdamWByRows(groups, quantizers, config.cautious_decay, **hyperparameters)
    for p in parameters:
        state = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
        for name in _MOMENTS:
            if quantizers and p in quantizable:
                state[name], state[f"{name}_scale"] = quantizers[name].zeros_like(p)
            else:
                state[name] = torch.zeros_like(p, dtype=DTYPES.get(config.state_dtype, torch.float32))
        optimizer.state[p] = state
    return optimizer


def adamw_bytes(parameter: Tensor, is_bias: bool, config: OptimizerConfig) -> float:
    """Return the bytes of a parameter's moments. The parameter may be on the meta device."""
    if config.state_dtype != "8bit":
        return 2 * parameter.numel() * DTYPES[config.state_dtype].itemsize
    is_quantized = is_quantizable(parameter) and not is_bias
    return 2 * parameter.numel() * (1 + 4 / BLOCK_SIZE if is_quantized else 4)  # a byte, and its part of a scale


def adamw_width_powers(config: OptimizerConfig) -> dict[str, float]:
    """See Rule. AdamW changes every value by about the rate, and a product sums the changes of all inputs."""
    return {"hidden": 1.0, "output": 1.0, "scaled_input": 0.5}


class _AdamWByRows(AdamW):
    """AdamW for parameters and moments of different dtypes, and for cautious decay. The fused kernel computes each update in
    fp32, for some rows of a parameter at a time. The results are then rounded to nearest."""

    found_inf: Tensor
    grad_scale: Tensor | None

    def __init__(
        self,
        groups: Sequence[dict],
        quantizers: dict[str, BlockQuantizer],
        cautious_decay: bool,
        **hyperparameters: Any,
    ):
        """Create the optimizer.

        Args:
            groups: torch's parameter groups.
            quantizers: Name of each 8-bit moment -> its quantizer.
            cautious_decay: See OptimizerConfig.
            **hyperparameters: Those of torch's AdamW.
        """
        super().__init__(groups, **hyperparameters)
        self.quantizers, self.cautious_decay = quantizers, cautious_decay

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
        gradient, decay = stored["grad"].float(), group["weight_decay"]
        if self.cautious_decay and decay:
            self._decay_cautiously(values["p"], gradient, values["exp_avg"], group)
            decay = 0.0
        beta1, beta2 = group["betas"]
        fused_adamw(
            [values["p"]], [gradient], [values["exp_avg"]], [values["exp_avg_sq"]], [], [step],
            lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=decay, eps=group["eps"],
            amsgrad=False, maximize=False, fused=True, grad_scale=self.grad_scale, found_inf=self.found_inf,
        )  # fmt: skip
        for name, value in values.items():
            if f"{name}_scale" in stored:
                self.quantizers[name].quantize_(value, stored[name], stored[f"{name}_scale"])
            else:
                stored[name].copy_(value)

    def _decay_cautiously(self, p: Tensor, gradient: Tensor, exp_avg: Tensor, group: dict) -> None:
        """Decay the values of p whose sign is that of the step's update, as the fused kernel does before it subtracts the update.
        The sign is that of the new first moment, because all other factors are positive."""
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        momentum = exp_avg.lerp(gradient, 1 - group["betas"][0])
        factors = cautious_factors(p, momentum, group["lr"] * group["weight_decay"])
        p.mul_(factors.where(self.found_inf == 0, 1.0))

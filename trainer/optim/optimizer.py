"""Optimizers over sharded parameters, with global gradient-norm clipping."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from trainer.config import ConfigError, OptimizerConfig
from trainer.optim import quantization
from trainer.optim.placement import CpuOffload, InBackward, OnDevice, UpdateStrategy
from trainer.optim.quantization import BlockQuantizer
from trainer.runtime.device import DTYPES
from trainer.runtime.distributed import sum_over
from trainer.runtime.dtensor import sharded_like, to_local


def parameter_groups(parameters: Iterable[Tensor], weight_decay: float) -> list[dict]:
    """Matrices decay; norms and biases (one dim) do not."""
    decayed, plain = [], []
    for parameter in parameters:
        (decayed if parameter.dim() >= 2 else plain).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def _adamw(parameters: Iterable[Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Loshchilov & Hutter 2017 (arXiv:1711.05101), torch's fused kernel."""
    groups = [g for g in parameter_groups(parameters, config.weight_decay) if g["params"]]
    alike = all(p.dtype == DTYPES.get(config.state_dtype) for group in groups for p in group["params"])
    hyperparameters = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": True}
    codes = {}
    if config.state_dtype == "8bit":
        device = groups[0]["params"][0].device
        codes = {name: BlockQuantizer(signed, device) for name, signed in _AVERAGES.items()}
    if alike:
        optimizer = torch.optim.AdamW(groups, **hyperparameters)
    else:
        optimizer = _AdamWInFp32(groups, codes, **hyperparameters)
    # Made now, not in the first step: a checkpoint can be loaded into it, and memory is taken from the start.
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
            for name in _AVERAGES:
                optimizer.state[p] |= _new_average(name, p, codes.get(name), DTYPES.get(config.state_dtype))
    return optimizer


_CHUNK = 2**23
"""Values that are in fp32 at a time."""

_AVERAGES = {"exp_avg": True, "exp_avg_sq": False}
"""Name -> whether it has a sign."""


def _new_average(name: str, p: Tensor, codes: BlockQuantizer | None, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """codes: where it is kept in 8 bits, if it can be; else dtype."""
    if codes is None or not quantization.fits(p):
        return {name: torch.zeros_like(p, dtype=dtype or torch.float32)}
    values, scales = codes.zeros_like(to_local(p.detach()))
    return {name: sharded_like(p, values), f"{name}_scale": sharded_like(p, scales)}


class _AdamWInFp32(torch.optim.AdamW):
    """For parameters and averages of different precisions: each parameter's update is computed in fp32, by the same kernel, and
    rounded to the nearest."""

    def __init__(self, groups: list[dict], codes: dict[str, BlockQuantizer], **hyperparameters: Any):
        """codes: of averages that are kept in 8 bits, by name."""
        super().__init__(groups, **hyperparameters)
        self.codes = codes

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
        rows = max(1, _CHUNK // max(1, tensors["p"][:1].numel()))
        names, parts = list(tensors), zip(*(t.split(rows) for t in tensors.values()), strict=True)
        for chunk in parts:
            self._update_rows(dict(zip(names, chunk, strict=True)), step, group)
        # A skipped update has still counted itself.
        step -= self.found_inf

    def _update_rows(self, stored: dict[str, Tensor], step: Tensor, group: dict) -> None:
        """stored: some rows of the parameter, its gradient and state, by name."""
        parameter, average, squares = computed = [self._read(stored, name) for name in ("p", *_AVERAGES)]
        torch._fused_adamw_(
            [parameter], [stored["grad"].float()], [average], [squares], [], [step],
            lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
            eps=group["eps"], amsgrad=False, maximize=False, grad_scale=None, found_inf=self.found_inf,
        )  # fmt: skip
        for name, value in zip(("p", *_AVERAGES), computed, strict=True):
            if f"{name}_scale" in stored:
                self.codes[name].write(value, stored[name], stored[f"{name}_scale"])
            else:
                stored[name].copy_(value)

    def _read(self, stored: dict[str, Tensor], name: str) -> Tensor:
        if f"{name}_scale" in stored:
            return self.codes[name].read(stored[name], stored[f"{name}_scale"])
        return stored[name].float()


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor], OptimizerConfig], torch.optim.Optimizer]] = {"adamw": _adamw}


def require_shard_independent_blocks(parameters: Mapping[str, Tensor], config: OptimizerConfig) -> None:
    """Raises ConfigError where what is kept in 8 bits would depend on the layout. parameters: they need no memory yet."""
    for name, p in parameters.items():
        if config.state_dtype == "8bit" and quantization.fits(p) and not quantization.fits(to_local(p)):
            columns = to_local(p).shape[1]
            rule = (
                f"8bit keeps blocks of {quantization.BLOCK} values, and tp leaves rows of {columns} of {name}; or bf16"
            )
            raise ConfigError("optimizer.state_dtype", rule)


class Optimizer:
    """The update of the parameters, its state under their names, and the global norm of their gradients."""

    def __init__(
        self, parameters: Mapping[str, Tensor], config: OptimizerConfig, model_group: ProcessGroup, ranks_per_stage: int
    ):
        """parameters: by their names, what this rank holds of them; frozen ones are left alone. model_group: all ranks that
        hold a part of the model. ranks_per_stage: how many of them hold a part of what this rank holds; all, unless the model is
        cut into stages."""
        self.names = {p: name for name, p in parameters.items() if p.requires_grad}
        self.device = next(iter(self.names)).device
        self.copies = torch.tensor(
            [_copies(p, ranks_per_stage) for p in self.names], dtype=torch.float32, device=self.device
        )

        def make(some: Iterable[Tensor]) -> torch.optim.Optimizer:
            return OPTIMIZERS[config.name](some, config)

        self.update: UpdateStrategy
        if config.in_backward:
            self.update = InBackward(list(self.names), make)
        elif config.offload == "none":
            self.update = OnDevice(list(self.names), make)
        else:
            self.update = CpuOffload(list(self.names), make, config.offload == "state_and_gradients")
        self.model_group = model_group

    def begin(self, learning_rate: float) -> None:
        """Before the first backward of a step."""
        for p in self.names:
            p.grad = None
        self.update.begin(learning_rate)

    @torch.no_grad()
    def clip(self, max_norm: float | None, vote: bool = False) -> tuple[Tensor, Tensor]:
        """Global norm of the gradients before clipping, a scalar; gradients are scaled so that it becomes max_norm at
        most. None: only the norm. vote: of this rank; the number of votes of all ranks comes back with the norm."""
        # One reduction, whatever the layouts: what several ranks hold, each of them adds a part of.
        part = (self.update.norms().square() / self.copies).sum()
        squared, votes = sum_over(torch.stack([part, torch.full_like(part, vote)]), self.model_group).unbind()
        norm = squared.sqrt()
        if max_norm is not None:
            # As a tensor, without asking the host whether it is needed.
            self.update.scale((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm, votes

    def step(self, skip: Tensor) -> None:
        """skip: a scalar; where it is true, nothing changes: neither parameters nor any state (of an update in backward, what
        is not finite has been skipped already). The host does not ask."""
        self.update.step(skip.to(self.copies))

    def state(self) -> dict[str, Tensor]:
        """The live state: "<parameter>/<quantity>" -> tensor. Hyperparameters are not in it: they are settings."""
        return {
            f"{name}/{quantity}": tensor
            for p, name in self.names.items()
            for quantity, tensor in self.update.state(p).items()
        }

    def after_load(self, state_too: bool) -> None:
        """To be called when parameters, and the state too, were given values from elsewhere."""
        self.update.after_load(state_too)

    def host_tensors(self) -> list[Tensor]:
        """What is in host memory on purpose."""
        return self.update.host_tensors()


def _copies(parameter: Tensor, ranks_per_stage: int) -> int:
    """How many ranks hold the values that this rank holds: all of its stage, less those that hold other shards."""
    if not isinstance(parameter, DTensor):
        return ranks_per_stage
    assert not any(placement.is_partial() for placement in parameter.placements)
    shards = math.prod(
        parameter.device_mesh.size(axis)
        for axis, placement in enumerate(parameter.placements)
        if not isinstance(placement, Replicate)
    )
    return ranks_per_stage // shards

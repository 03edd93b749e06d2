"""Optimizers over sharded parameters, with global gradient-norm clipping."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from trainer.config import OptimizerConfig
from trainer.device import DTYPES, local
from trainer.distributed import sum_over
from trainer.updates import BackwardUpdate, DeviceUpdate, HostUpdate, Update


def parameter_groups(parameters: Iterable[Tensor], weight_decay: float) -> list[dict]:
    """Matrices decay; norms and biases (one dim) do not."""
    decayed, plain = [], []
    for parameter in parameters:
        (decayed if parameter.dim() >= 2 else plain).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def _adamw(parameters: Iterable[Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Loshchilov & Hutter 2017 (arXiv:1711.05101), torch's fused kernel."""
    groups = [g for g in parameter_groups(parameters, config.weight_decay) if g["params"]]
    state_dtype = DTYPES[config.state_dtype]
    alike = all(p.dtype == state_dtype for group in groups for p in group["params"])
    kind = torch.optim.AdamW if alike else _AdamWInFp32
    optimizer = kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    # Made now, not in the first step: a checkpoint can be loaded into it, and memory is taken from the start.
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p, dtype=state_dtype),
                "exp_avg_sq": torch.zeros_like(p, dtype=state_dtype),
            }
    return optimizer


class _AdamWInFp32(torch.optim.AdamW):
    """For parameters and averages of different precisions: each parameter's update is computed in fp32, by the same kernel, and
    rounded to the nearest."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: Tensor, group: dict) -> None:
        state = self.state[p]
        stored = [local(t) for t in (p, state["exp_avg"], state["exp_avg_sq"])]
        parameter, average, squares = computed = [t.float() for t in stored]
        state["step"] += 1
        torch._fused_adamw_(
            [parameter], [local(p.grad).float()], [average], [squares], [], [state["step"]],
            lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
            eps=group["eps"], amsgrad=False, maximize=False, grad_scale=None, found_inf=self.found_inf,
        )  # fmt: skip
        # A skipped update has still counted itself.
        state["step"] -= self.found_inf
        for target, value in zip(stored, computed, strict=True):
            target.copy_(value)


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor], OptimizerConfig], torch.optim.Optimizer]] = {"adamw": _adamw}


class Optimizer:
    """The update of the parameters, its state under their names, and the global norm of their gradients."""

    def __init__(
        self, parameters: Mapping[str, Tensor], config: OptimizerConfig, model_group: ProcessGroup, ranks_of_stage: int
    ):
        """parameters: by their names, what this rank holds of them; frozen ones are left alone. model_group: all ranks that
        hold a part of the model. ranks_of_stage: how many of them hold a part of what this rank holds; all, unless the model is
        cut into stages."""
        self.names = {p: name for name, p in parameters.items() if p.requires_grad}
        self.device = next(iter(self.names)).device
        self.copies = torch.tensor(
            [_copies(p, ranks_of_stage) for p in self.names], dtype=torch.float32, device=self.device
        )

        def make(some: Iterable[Tensor]) -> torch.optim.Optimizer:
            return OPTIMIZERS[config.name](some, config)

        self.update: Update
        if config.in_backward:
            self.update = BackwardUpdate(list(self.names), make)
        elif config.offload == "none":
            self.update = DeviceUpdate(list(self.names), make)
        else:
            self.update = HostUpdate(list(self.names), make, config.offload == "state_and_gradients")
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


def _copies(parameter: Tensor, ranks_of_stage: int) -> int:
    """How many ranks hold the values that this rank holds: all of its stage, less those that hold other shards."""
    if not isinstance(parameter, DTensor):
        return ranks_of_stage
    assert not any(placement.is_partial() for placement in parameter.placements)
    shards = math.prod(
        parameter.device_mesh.size(axis)
        for axis, placement in enumerate(parameter.placements)
        if not isinstance(placement, Replicate)
    )
    return ranks_of_stage // shards

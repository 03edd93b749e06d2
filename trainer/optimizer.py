"""Optimizers over sharded parameters, with global gradient-norm clipping."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from trainer.config import OptimizerConfig
from trainer.distributed import sum_over


def parameter_groups(parameters: Iterable[Tensor], weight_decay: float) -> list[dict]:
    """Matrices decay; norms and biases (one dim) do not."""
    decayed, plain = [], []
    for parameter in parameters:
        (decayed if parameter.dim() >= 2 else plain).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def _adamw(parameters: Iterable[Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Loshchilov & Hutter 2017 (arXiv:1711.05101), torch's fused kernel."""
    groups = [g for g in parameter_groups(parameters, config.weight_decay) if g["params"]]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    # Made now, not in the first step: a checkpoint can be loaded into it, and memory is taken from the start.
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
    return optimizer


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor], OptimizerConfig], torch.optim.Optimizer]] = {"adamw": _adamw}


class Optimizer:
    """One torch optimizer, its state under the names of the parameters, and the global norm of its gradients."""

    def __init__(
        self, parameters: Mapping[str, Tensor], config: OptimizerConfig, model_group: ProcessGroup, ranks_of_stage: int
    ):
        """parameters: by their names, what this rank holds of them. model_group: all ranks that hold a part of the model.
        ranks_of_stage: how many of them hold a part of what this rank holds; all, unless the model is cut into stages."""
        self.names = {p: name for name, p in parameters.items()}
        self.device = next(iter(self.names)).device
        self.copies = torch.tensor(
            [_copies(p, ranks_of_stage) for p in self.names], dtype=torch.float32, device=self.device
        )
        self.inner = OPTIMIZERS[config.name](parameters.values(), config)
        self.model_group = model_group

    def zero_grad(self) -> None:
        self.inner.zero_grad(set_to_none=True)

    @torch.no_grad()
    def clip(self, max_norm: float | None, vote: bool = False) -> tuple[Tensor, Tensor]:
        """Global norm of the gradients before clipping, a scalar; gradients are scaled so that it becomes max_norm at
        most. None: only the norm. vote: of this rank; the number of votes of all ranks comes back with the norm."""
        gradients = [_local(p.grad) for p in self.names]
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
        # One reduction, whatever the layouts: what several ranks hold, each of them adds a part of.
        part = (norms.square() / self.copies).sum()
        squared, votes = sum_over(torch.stack([part, torch.full_like(part, vote)]), self.model_group).unbind()
        norm = squared.sqrt()
        if max_norm is not None:
            # As a tensor, without asking the host whether it is needed.
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, scale)
        return norm, votes

    def step(self, learning_rate: float, skip: Tensor) -> None:
        """skip: a scalar; where it is true, nothing changes: neither parameters nor any state. The host does not ask."""
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        # The protocol of torch.amp.GradScaler, which fused optimizers honour inside their kernels.
        self.inner.grad_scale = None
        self.inner.found_inf = skip.to(self.copies)
        self.inner.step()

    def state(self) -> dict[str, Tensor]:
        """The live state: "<parameter>/<quantity>" -> tensor. Hyperparameters are not in it: they are settings."""
        return {
            f"{self.names[p]}/{quantity}": tensor
            for p, quantities in self.inner.state.items()
            for quantity, tensor in quantities.items()
        }


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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

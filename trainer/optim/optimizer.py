"""Optimizers of sharded parameters. They update the parameters after backward, inside backward, or on the CPU."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from trainer.base.config import OptimizerConfig
from trainer.optim.exchange import Sharding
from trainer.optim.parameter_groups import ParameterGroup
from trainer.optim.rules import RULES, Updater
from trainer.runtime.distributed import sum_over
from trainer.runtime.dtensor import sharded_like, to_local
from trainer.runtime.host_memory import Event, HostTransfer


class Optimizer:
    """Optimizer that updates a rank's parameters after backward, on their device. Subclasses do so in backward or on the CPU."""

    host_tensors: Sequence[Tensor] = ()
    """Tensors that are offloaded to host memory."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: OptimizerConfig,
        groups: Sequence[ParameterGroup],
        ranks_per_stage: int,
        biases: Collection[str] = (),
        stage: ProcessGroup | None = None,
        copies: Mapping[str, int] = {},
    ):
        """Allocate the state.

        Args:
            parameters: This rank's parameters by name. Frozen parameters are ignored.
            config: Settings.
            groups: Those of the model. They contain all trained parameters of this rank, and may contain others.
            ranks_per_stage: Number of ranks in this rank's pipeline stage, or the world size without a pipeline.
            biases: Names of biases, which may be stacked.
            stage: The ranks of this rank's pipeline stage, if there are several and a rule exchanges matrices.
            copies: Name of a parameter that several stages have -> their number. Their gradients are equal.
        """
        self.names = {p: name for name, p in parameters.items() if p.requires_grad}
        self.device = next(iter(self.names)).device
        copies_of = [copies.get(name, 1) for name in self.names.values()]
        shares = [1 / (n * _replication_factor(p, ranks_per_stage)) for p, n in zip(self.names, copies_of, strict=True)]
        self.shares = torch.tensor(shares, dtype=torch.float32, device=self.device)
        self.targets: dict[Tensor, Tensor] = {}
        """Parameter -> tensor that torch's optimizer updates instead: the parameter's local shard."""
        self.config, self.groups, self.biases, self.stage = config, groups, biases, stage
        self.updater_of = self._allocate()
        """Parameter -> updater of its target."""
        self.updaters = list(dict.fromkeys(self.updater_of.values()))
        self.frees_gradients = config.frees_gradients
        self.grad_norms: dict[Tensor, Tensor] = {}
        """Parameter -> norm of its freed gradient."""
        self.grad_scale: Tensor | None = None
        """Number by which the next update divides all gradients, or None."""
        if self.frees_gradients:
            for p in self.names:
                p.register_post_accumulate_grad_hook(self._on_grad_ready)

    def _allocate(self) -> dict[Tensor, Updater]:
        self.targets = {p: to_local(p.detach()) for p in self.names}
        return self._build_updaters(self.names)

    def _build_updaters(self, parameters: Iterable[Tensor]) -> dict[Tensor, Updater]:
        """Return parameter -> updater of its target: one for each rule, in the order of RULES, so that all ranks update
        parameters in the same order."""
        by_name = {self.names[p]: p for p in parameters}
        sharding = Sharding({self.targets[p]: p for p in by_name.values()}, self.stage)
        biases = [self.targets[by_name[name]] for name in self.biases if name in by_name]
        updaters: dict[Tensor, Updater] = {}
        for rule in RULES:
            members = [([by_name[n] for n in g.names if n in by_name], g) for g in self.groups if g.rule == rule]
            param_groups = [
                {"params": [self.targets[p] for p in own], "lr_factor": group.lr, "weight_decay": group.weight_decay}
                for own, group in members
                if own
            ]
            if param_groups:
                updater = RULES[rule].build(param_groups, self.config, biases, sharding)
                updaters |= {p: updater for own, _ in members for p in own}
        return updaters

    @torch.no_grad()
    def _on_grad_ready(self, p: Tensor) -> None:
        if p.grad is None:
            return  # more microbatches follow
        (self.grad_norms[p],) = _grad_norms([p])
        self._use_gradient(p)
        p.grad = None

    def _use_gradient(self, p: Tensor) -> None:
        raise NotImplementedError

    def start_step(self, lr: float) -> None:
        """Prepare a step before its first backward: set the learning rate of each group and free the gradients. lr: before it is
        multiplied by the group's factor."""
        for p in self.names:
            p.grad = None
        for updater in self.updaters:
            for group in updater.param_groups:
                group["lr"] = lr * group["lr_factor"]

    @torch.no_grad()
    def clip(self, max_norm: float | None, vote: bool = False) -> tuple[Tensor, Tensor]:
        """Make the next update scale the gradients so that their global norm is at most max_norm, unless max_norm is None. Return
        two scalars: the norm before scaling, and the number of ranks on which `vote` is true."""
        norms = [self.grad_norms[p] for p in self.names] if self.frees_gradients else _grad_norms(self.names)
        # One all-reduce for all layouts: ranks that hold the same values contribute equal shares of their squared norm.
        local = torch.stack(norms).square().dot(self.shares)
        squared, votes = sum_over(torch.stack([local, torch.full_like(local, vote)]), dist.group.WORLD).unbind()
        norm = squared.sqrt()
        self.grad_scale = None if max_norm is None else ((norm + 1e-6) / max_norm).clamp(min=1.0)
        return norm, votes

    def step(self, skip: Tensor) -> None:
        """Update the parameters without a host synchronization. skip: a scalar; if true, parameters and state do not change."""
        for p in self.names:
            self._hand_over_gradient(p)
        for updater in self.updaters:
            updater.update(skip.to(self.shares), self.grad_scale)

    @torch.no_grad()
    def _hand_over_gradient(self, p: Tensor) -> None:
        """Give the target of p its gradient. p has none afterwards, so that the update can free it."""
        target = self.targets[p]
        target.data = to_local(p)  # FSDP may move a shard before the first forward
        target.grad, p.grad = to_local(p.grad), None

    def state(self) -> dict[str, Tensor]:
        """Return "<parameter>/<quantity>" -> state tensor, not a copy. Hyperparameters are omitted, because they are settings."""
        return {
            f"{name}/{quantity}": tensor
            for p, name in self.names.items()
            for quantity, tensor in self._state_of(p).items()
        }

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        state = self.updater_of[p].state[self.targets[p]]
        return {quantity: sharded_like(p, tensor) for quantity, tensor in state.items()}

    def sync_master_weights(self, state_loaded: bool) -> None:
        """Copy loaded parameters to the master weights. state_loaded: whether the optimizer state was also loaded. If so, master
        weights that are part of the state are not overwritten."""


class InBackward(Optimizer):
    """Optimizer that updates each parameter during backward, as soon as its gradient is reduced, and then frees the gradient
    (Lv et al. 2023, "LOMO", arXiv:2306.09782).

    Gradient clipping and skipped steps are impossible, because both need all gradients. A shard with a non-finite gradient
    stays unchanged, but the other shards are updated. The run must not continue after such a step.
    """

    def _allocate(self) -> dict[Tensor, Updater]:
        self.targets = {p: to_local(p.detach()) for p in self.names}
        return {p: self._build_updaters([p])[p] for p in self.names}

    def _use_gradient(self, p: Tensor) -> None:
        self._hand_over_gradient(p)
        self.updater_of[p].update(self.grad_norms[p].isfinite().logical_not().float())

    def step(self, skip: Tensor) -> None:
        """Do nothing, because backward has already updated the parameters."""


class CpuOffload(Optimizer):
    """Optimizer that updates one parameter at a time on the CPU (Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840). The gradient
    is copied to host memory, where a separate optimizer updates the parameter's fp32 master weights. The result is copied back
    to the device while the next parameter is updated.

    All buffers are allocated once. If the device itself is a CPU, the algorithm is the same, but all copies stay in host memory.
    """

    def _allocate(self) -> dict[Tensor, Updater]:
        self.transfer = HostTransfer(self.device)
        shards = {p: to_local(p.detach()) for p in self.names}
        self.targets = {p: self.transfer.host_like(shard, torch.float32) for p, shard in shards.items()}
        self.gradients = {p: self.transfer.host_like(shard, p.dtype) for p, shard in shards.items()}
        low_precision = {p: shard for p, shard in shards.items() if p.dtype != torch.float32}
        self.results = {p: self.transfer.host_like(shard, p.dtype) for p, shard in low_precision.items()}
        """Parameter of lower precision than fp32 -> buffer for its updated values, in the parameter's dtype."""
        self.arrivals: dict[Tensor, Event] = {}
        self.sync_master_weights(state_loaded=False)
        updaters = {p: self._build_updaters([p])[p] for p in self.names}
        states = [tensor for p, updater in updaters.items() for tensor in updater.state[self.targets[p]].values()]
        self.host_tensors = [*self.targets.values(), *self.gradients.values(), *self.results.values(), *states]
        return updaters

    def _use_gradient(self, p: Tensor) -> None:
        self.arrivals[p] = self.transfer.copy([self.gradients[p]], [to_local(p.grad)])

    @torch.no_grad()
    def step(self, skip: Tensor) -> None:
        if not self.frees_gradients:
            for p in self.names:
                self._use_gradient(p)
        skip = skip.float().cpu()
        grad_scale = None if self.grad_scale is None else self.grad_scale.cpu()
        for p, master in self.targets.items():
            self.arrivals[p].synchronize()
            master.grad = self.gradients[p].float()
            self.updater_of[p].update(skip, grad_scale)
            result = self.results[p].copy_(master) if p in self.results else master
            returned = self.transfer.copy([to_local(p.detach())], [result])
        returned.wait()  # waiting for it includes all earlier copies of this stream

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        """Return the parameter's state in torch's optimizer, and its master weights if these have higher precision."""
        state = super()._state_of(p)
        return state | {"master": sharded_like(p, self.targets[p])} if p in self.results else state

    @torch.no_grad()
    def sync_master_weights(self, state_loaded: bool) -> None:
        for p, master in self.targets.items():
            if p not in self.results or not state_loaded:
                master.copy_(to_local(p.detach()))


def optimizer_class(config: OptimizerConfig) -> type[Optimizer]:
    """Return the class that updates the parameters where the settings say."""
    if config.in_backward:
        return InBackward
    return Optimizer if config.offload == "none" else CpuOffload


def _grad_norms(parameters: Iterable[Tensor]) -> Sequence[Tensor]:
    """Return the norm of each parameter's gradient as an fp32 scalar."""
    return torch._foreach_norm([to_local(p.grad) for p in parameters], 2, dtype=torch.float32)


def _replication_factor(parameter: Tensor, ranks_per_stage: int) -> int:
    """Return the number of ranks of the stage that hold this rank's shard of the parameter."""
    if not isinstance(parameter, DTensor):
        return ranks_per_stage
    assert not any(placement.is_partial() for placement in parameter.placements)
    axes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return ranks_per_stage // math.prod(size for size, placement in axes if not placement.is_replicate())

"""Placement of the optimizer step: on the parameters' device after backward or inside it, or on the CPU."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from trainer.runtime.dtensor import sharded_like, to_local
from trainer.runtime.host_memory import Event, HostTransfer

OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class UpdateStrategy:
    """Update of all parameters of a rank."""

    optimizers: Sequence[torch.optim.Optimizer]

    def norms(self) -> Tensor:
        """Return the norms of this rank's gradient shards, shape (parameters,), fp32."""
        raise NotImplementedError

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradients by a scalar."""
        raise NotImplementedError

    def set_lr(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def step(self, skip: Tensor) -> None:
        """Update the parameters. skip: scalar, fp32; if it is 1, nothing changes."""

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the live state by quantity."""
        raise NotImplementedError

    def sync_master_weights(self, state_loaded: bool) -> None:
        """Copy loaded parameters to the master weights, unless the master weights were loaded too (state_loaded)."""

    def host_tensors(self) -> list[Tensor]:
        """Return the tensors in host memory."""
        return []


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [to_local(p.grad) for p in parameters]


def _grad_norms(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of each gradient, as scalars in fp32."""
    return list(torch._foreach_norm(_gradients(parameters), 2, dtype=torch.float32))


def _step(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """skip: scalar, fp32."""
    # The protocol of torch.amp.GradScaler, which fused optimizers implement inside their kernels.
    optimizer.grad_scale = None
    optimizer.found_inf = skip
    optimizer.step()


class OnDevice(UpdateStrategy):
    """Update on the parameters' device, after backward."""

    def __init__(self, parameters: Sequence[Tensor], factory: OptimizerFactory):
        self.parameters = parameters
        self.optimizers = [factory(parameters)]

    def norms(self) -> Tensor:
        return torch.stack(_grad_norms(self.parameters))

    def scale(self, factor: Tensor) -> None:
        torch._foreach_mul_(_gradients(self.parameters), factor)

    def step(self, skip: Tensor) -> None:
        _step(self.optimizers[0], skip)

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        return self.optimizers[0].state[parameter]


class InBackward(UpdateStrategy):
    """Update of each parameter in backward, as soon as its gradient is reduced. The gradient is freed after the update (Lv et
    al. 2023, "LOMO", arXiv:2306.09782).

    Clipping and skipping a complete step are impossible, because they need all gradients. A shard with a non-finite gradient
    stays unchanged, but other shards are updated, so the run must not continue from this state.
    """

    def __init__(self, parameters: Sequence[Tensor], factory: OptimizerFactory):
        self.optimizer_of = {p: factory([p]) for p in parameters}
        self.optimizers = list(self.optimizer_of.values())
        self.grad_norms: dict[Tensor, Tensor] = {}
        for p in parameters:
            p.register_post_accumulate_grad_hook(self._on_grad_ready)

    @torch.no_grad()
    def _on_grad_ready(self, p: Tensor) -> None:
        (norm,) = _grad_norms([p])
        self.grad_norms[p] = norm
        _step(self.optimizer_of[p], skip=norm.isfinite().logical_not().float())
        p.grad = None

    def norms(self) -> Tensor:
        return torch.stack([self.grad_norms[p] for p in self.optimizer_of])

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        return self.optimizer_of[parameter].state[parameter]


class CpuOffload(UpdateStrategy):
    """Update on the CPU, one parameter at a time: its gradient is copied to host memory, a separate optimizer updates its fp32
    master weights there, and the result is copied back during the next update (Ren et al. 2021, "ZeRO-Offload",
    arXiv:2101.06840).

    All buffers are allocated once. On a CPU device the copies stay within host memory; everything else is the same.
    """

    def __init__(self, parameters: Sequence[Tensor], factory: OptimizerFactory, offload_gradients: bool):
        """offload_gradients: whether each gradient is copied in backward, as soon as it is reduced, and not in `step`."""
        self.parameters = parameters
        self.indices = {p: i for i, p in enumerate(parameters)}
        self.transfer = HostTransfer(parameters[0].device)
        self.masters = [self.transfer.host_like(to_local(p.detach()), torch.float32) for p in parameters]
        self.gradients = [self.transfer.host_like(to_local(p.detach()), p.dtype) for p in parameters]
        self.results = [
            master if p.dtype == master.dtype else self.transfer.host_like(to_local(p.detach()), p.dtype)
            for p, master in zip(parameters, self.masters, strict=True)
        ]
        """Updated values in the parameters' precision."""
        self.optimizers = [factory([master]) for master in self.masters]
        self.sync_master_weights(state_loaded=False)
        self.arrivals: dict[int, Event] = {}
        self.grad_norms: dict[int, Tensor] = {}
        self.offload_gradients = offload_gradients
        if offload_gradients:
            for i, p in enumerate(parameters):
                p.register_post_accumulate_grad_hook(lambda p, i=i: self._on_grad_ready(i))

    @torch.no_grad()
    def _on_grad_ready(self, i: int) -> None:
        p = self.parameters[i]
        (self.grad_norms[i],) = _grad_norms([p])
        self._copy_to_host(i)
        p.grad = None

    def _copy_to_host(self, i: int) -> None:
        self.arrivals[i] = self.transfer.copy([self.gradients[i]], [to_local(self.parameters[i].grad)])

    def norms(self) -> Tensor:
        if self.offload_gradients:
            return torch.stack([self.grad_norms[i] for i in range(len(self.parameters))])
        return torch.stack(_grad_norms(self.parameters))

    def scale(self, factor: Tensor) -> None:
        if not self.offload_gradients:
            torch._foreach_mul_(_gradients(self.parameters), factor)
            return
        factor = factor.cpu()
        for i, gradient in enumerate(self.gradients):
            self.arrivals[i].synchronize()
            gradient.mul_(factor)

    @torch.no_grad()
    def step(self, skip: Tensor) -> None:
        if not self.offload_gradients:
            for i in range(len(self.parameters)):
                self._copy_to_host(i)
        skip = skip.cpu()
        for i, p in enumerate(self.parameters):
            self.arrivals[i].synchronize()
            master, result = self.masters[i], self.results[i]
            master.grad = self.gradients[i].float()
            _step(self.optimizers[i], skip)
            master.grad = None
            if result is not master:
                result.copy_(master)
            returned = self.transfer.copy([to_local(p.detach())], [result])
        returned.wait()  # waiting for it includes all earlier copies of this stream

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Include the master weights if they are more precise than the parameter."""
        i = self.indices[parameter]
        state = dict(self.optimizers[i].state[self.masters[i]])
        if self.results[i] is not self.masters[i]:
            state["master"] = self.masters[i]
        return {quantity: sharded_like(parameter, tensor) for quantity, tensor in state.items()}

    @torch.no_grad()
    def sync_master_weights(self, state_loaded: bool) -> None:
        for p, master, result in zip(self.parameters, self.masters, self.results, strict=True):
            if result is master or not state_loaded:
                master.copy_(to_local(p.detach()))

    def host_tensors(self) -> list[Tensor]:
        states = [t for optimizer in self.optimizers for state in optimizer.state.values() for t in state.values()]
        return [*self.masters, *self.gradients, *self.results, *states]

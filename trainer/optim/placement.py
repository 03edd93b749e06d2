"""Where the update of the parameters runs, and when: on their device, after backward or in it, or in host memory."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer.runtime.dtensor import sharded_like, to_local
from trainer.runtime.host_memory import HostTransfer

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class UpdateStrategy(Protocol):
    """Of all parameters of a rank."""

    def norms(self) -> Tensor:
        """Of each parameter's gradient, this rank's part: (parameters,), fp32."""

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradients by a scalar."""

    def begin(self, learning_rate: float) -> None:
        """Before the first backward."""

    def step(self, skip: Tensor) -> None:
        """skip: as fp32."""

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The live state, by quantity."""

    def after_load(self, state_too: bool) -> None:
        """As of Optimizer."""

    def host_tensors(self) -> list[Tensor]:
        """As of Optimizer."""
        return []


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [to_local(p.grad) for p in parameters]


def _norms(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Of their gradients: scalars, fp32."""
    return list(torch._foreach_norm(_gradients(parameters), 2, dtype=torch.float32))


def _set_learning_rate(inners: Iterable[torch.optim.Optimizer], learning_rate: float) -> None:
    for inner in inners:
        for group in inner.param_groups:
            group["lr"] = learning_rate


def _step(inner: torch.optim.Optimizer, skip: Tensor) -> None:
    """skip: as fp32."""
    # The protocol of torch.amp.GradScaler, which fused optimizers honour inside their kernels.
    inner.grad_scale = None
    inner.found_inf = skip
    inner.step()


class OnDevice(UpdateStrategy):
    """On the device of the parameters, after backward."""

    def __init__(self, parameters: Sequence[Tensor], make: MakeOptimizer):
        self.parameters = parameters
        self.inner = make(parameters)

    def norms(self) -> Tensor:
        return torch.stack(_norms(self.parameters))

    def scale(self, factor: Tensor) -> None:
        torch._foreach_mul_(_gradients(self.parameters), factor)

    def begin(self, learning_rate: float) -> None:
        _set_learning_rate([self.inner], learning_rate)

    def step(self, skip: Tensor) -> None:
        _step(self.inner, skip)

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        return self.inner.state[parameter]


class InBackward(UpdateStrategy):
    """In backward: each parameter as soon as its gradient is complete, which is let go of then (Lv et al. 2023, "LOMO",
    arXiv:2306.09782). What depends on all gradients cannot be: a norm to scale by, or an update that is left out as a whole.
    A shard whose gradient is no number stays as it is, but the run must not go on from there."""

    def __init__(self, parameters: Sequence[Tensor], make: MakeOptimizer):
        self.inners = {p: make([p]) for p in parameters}
        self.found_norms: dict[Tensor, Tensor] = {}
        for p in parameters:
            p.register_post_accumulate_grad_hook(self._take)

    @torch.no_grad()
    def _take(self, p: Tensor) -> None:
        """Its gradient is complete."""
        (norm,) = _norms([p])
        self.found_norms[p] = norm
        _step(self.inners[p], skip=norm.isfinite().logical_not().float())
        p.grad = None

    def norms(self) -> Tensor:
        return torch.stack([self.found_norms[p] for p in self.inners])

    def scale(self, factor: Tensor) -> None:
        raise AssertionError("the configuration refuses clipping")

    def begin(self, learning_rate: float) -> None:
        _set_learning_rate(self.inners.values(), learning_rate)

    def step(self, skip: Tensor) -> None:
        pass  # done

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        return self.inners[parameter].state[parameter]


class CpuOffload(UpdateStrategy):
    """In host memory, parameter by parameter: a gradient comes there, an optimizer of its own updates an fp32 copy of the
    parameter, and the result goes back, while the next one is on its way (Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840).

    All buffers are made once. On a CPU the copies are ones within its memory; all else is the same.
    """

    def __init__(self, parameters: Sequence[Tensor], make: MakeOptimizer, gradients_too: bool):
        """gradients_too: gradients leave the device in backward, as they come; else when the update begins."""
        self.parameters = parameters
        self.numbers = {p: number for number, p in enumerate(parameters)}
        self.link = HostTransfer(parameters[0].device)
        self.masters = [self.link.host_like(to_local(p.detach()), torch.float32) for p in parameters]
        self.gradients = [self.link.host_like(to_local(p.detach()), p.dtype) for p in parameters]
        self.results = [
            master if p.dtype == master.dtype else self.link.host_like(to_local(p.detach()), p.dtype)
            for p, master in zip(parameters, self.masters, strict=True)
        ]
        """What goes back: of the parameter's precision."""
        self.inners = [make([master]) for master in self.masters]
        self.after_load(state_too=False)
        self.arrived: list[Callable[[], None]] = [lambda: None] * len(parameters)
        self.found_norms: list[Tensor | None] = [None] * len(parameters)
        self.gradients_too = gradients_too
        if gradients_too:
            for number, p in enumerate(parameters):
                p.register_post_accumulate_grad_hook(lambda p, number=number: self._take(number))

    @torch.no_grad()
    def _take(self, number: int) -> None:
        """A gradient that is complete."""
        p = self.parameters[number]
        (self.found_norms[number],) = _norms([p])
        self._send(number)
        p.grad = None

    def _send(self, number: int) -> None:
        self.arrived[number] = self.link.to_host(self.gradients[number], to_local(self.parameters[number].grad))

    def norms(self) -> Tensor:
        if self.gradients_too:
            return torch.stack(self.found_norms)
        return torch.stack(_norms(self.parameters))

    def scale(self, factor: Tensor) -> None:
        if not self.gradients_too:
            torch._foreach_mul_(_gradients(self.parameters), factor)
            return
        factor = factor.cpu()
        for arrived, gradient in zip(self.arrived, self.gradients, strict=True):
            arrived()
            gradient.mul_(factor)

    def begin(self, learning_rate: float) -> None:
        _set_learning_rate(self.inners, learning_rate)

    @torch.no_grad()
    def step(self, skip: Tensor) -> None:
        if not self.gradients_too:
            for number in range(len(self.parameters)):
                self._send(number)
        skip = skip.cpu()
        for number, p in enumerate(self.parameters):
            self.arrived[number]()
            master = self.masters[number]
            master.grad = self.gradients[number].float()
            _step(self.inners[number], skip)
            master.grad = None
            if self.results[number] is not master:
                self.results[number].copy_(master)
            returned = self.link.to_device(to_local(p.detach()), self.results[number])
        returned()  # and so all before it

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The copy too, where it is more than the parameter."""
        number = self.numbers[parameter]
        state = dict(self.inners[number].state[self.masters[number]])
        if self.results[number] is not self.masters[number]:
            state["master"] = self.masters[number]
        return {quantity: sharded_like(parameter, tensor) for quantity, tensor in state.items()}

    @torch.no_grad()
    def after_load(self, state_too: bool) -> None:
        for p, master, result in zip(self.parameters, self.masters, self.results, strict=True):
            if result is master or not state_too:
                master.copy_(to_local(p.detach()))

    def host_tensors(self) -> list[Tensor]:
        states = [t for inner in self.inners for state in inner.state.values() for t in state.values()]
        return [*self.masters, *self.gradients, *self.results, *states]

"""Exponential moving average of the weights (Polyak & Juditsky 1992, "Acceleration of stochastic approximation by averaging")."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer.optim.optimizer import Optimizer
from trainer.runtime.dtensor import sharded_like, to_local


class WeightAverage:
    """The averages of the trained parameters: fp32, sharded like the parameters, and on the device that updates them.

    After update n, an average moves to its parameter by 1 - min(decay, (1 + n) / (10 + n)), so that it soon forgets the initial
    weights. A skipped step changes nothing.
    """

    def __init__(self, optimizer: Optimizer, decay: float):
        """Allocate the averages; `start` or a checkpoint gives them values. optimizer: updates the parameters."""
        self.names, self.targets, self.decay = optimizer.names, optimizer.targets, decay
        self.averages = {p: torch.zeros_like(t, dtype=torch.float32) for p, t in self.targets.items()}
        self.num_updates = torch.zeros((), dtype=torch.float32, device=next(iter(self.averages.values())).device)

    @torch.no_grad()
    def start(self) -> None:
        """Set the averages to the parameters."""
        self.num_updates.zero_()
        for p, average in self.averages.items():
            average.copy_(to_local(p.detach()))

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Follow an update of the parameters, without a host synchronization on their device. skip: a scalar; if true, nothing
        changes."""
        is_kept = 1 - skip.to(self.num_updates)
        self.num_updates += is_kept
        decay = ((1 + self.num_updates) / (10 + self.num_updates)).clamp(max=self.decay)
        weight = (1 - decay) * is_kept
        for p, average in self.averages.items():
            average.lerp_(self.targets[p].float(), weight)

    @contextmanager
    def in_use(self, reshard: Callable[[], None]) -> Iterator[None]:
        """Context manager in which the parameters have the averages as their values. It keeps a copy of the parameters, as large
        as their gradients, which do not exist then. reshard: frees gathered parameters, which would keep the values before."""
        originals = {p: to_local(p.detach()).clone() for p in self.names}
        try:
            self._replace(self.averages, reshard)
            yield
        finally:
            self._replace(originals, reshard)

    def _replace(self, values: Mapping[Tensor, Tensor], reshard: Callable[[], None]) -> None:
        for p, value in values.items():
            to_local(p.detach()).copy_(value)
        reshard()

    def state(self) -> dict[str, Tensor]:
        """Return name -> tensor to save, not a copy."""
        averages = {name: sharded_like(p, self.averages[p]) for p, name in self.names.items()}
        return averages | {"num_updates": self.num_updates}

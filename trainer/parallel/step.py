"""Steps that compute a loss and gradients from microbatches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainer.batch import Batch
from trainer.loss import Objective
from trainer.parallel.fsdp import reshard_all
from trainer.runtime.distributed import sum_over
from trainer.runtime.phases import PhaseTimer


@dataclass(kw_only=True, eq=False)
class Step(ABC):
    """Forward and backward over microbatches. Returned values are global: they are identical on every rank."""

    model_parts: Mapping[Any, nn.Module]
    """Stage -> this rank's part of the model, in order. Without pipeline parallelism, the only part is the model."""
    objective: Objective
    """Objective of training."""
    shard_sequence: Callable[[Batch], Batch]
    """Function that maps a batch of full sequences to this rank's shard of each sequence."""
    batch_group: ProcessGroup
    """Group of the ranks that read different samples."""
    phases: PhaseTimer
    loss_group: ProcessGroup
    """Group of ranks that compute the loss of different tokens. All of them belong to the same pipeline stage."""

    @abstractmethod
    def __call__(self, microbatches: Sequence[Batch], num_terms: Tensor) -> Tensor:
        """Run forward and backward. Return the means of the loss and of the objective's metrics, (1 + metrics,). num_terms:
        global number of the objective's terms."""

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch], objective: Objective | None = None) -> tuple[Tensor, Tensor]:
        """Return the sums of the loss and of the objective's metrics, (1 + metrics,), and the number of terms. objective:
        default: that of training."""
        objective = objective or self.objective
        results = [self._forward(self.shard_sequence(batch), objective) for batch in microbatches]
        for part in self.model_parts.values():
            reshard_all(part)  # backward normally does this, but it does not run here
        return self._sum(results, objective), count_terms(microbatches, objective, self.batch_group)

    @abstractmethod
    def _forward(self, batch: Batch, objective: Objective) -> Tensor | None:
        """Return the head's result for a batch of sharded sequences, or None on a rank without the last stage."""

    def _sum(self, results: Sequence[Tensor | None], objective: Objective) -> Tensor:
        """Return the sum over the microbatches and over all ranks, as a vector."""
        own = [result for result in results if result is not None]
        total = _total(own) if own else torch.zeros(objective.shape, device=self.phases.device)
        return sum_over(total.reshape(-1), self.loss_group)


@torch.no_grad()
def count_terms(microbatches: Sequence[Batch], objective: Objective, batch_group: ProcessGroup) -> Tensor:
    """Return the number of an objective's terms on all ranks as a scalar. microbatches: full sequences. If the loss is divided by
    this number, every term has the same weight, regardless of padding and masks."""
    return sum_over(_total([objective.count(batch) for batch in microbatches]), batch_group)


def _total(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0) if len(tensors) > 1 else tensors[0]


@dataclass(kw_only=True, eq=False)
class SpmdStep(Step):
    """A step in which every rank runs the full model on its share of the samples and sequences."""

    start_microbatch: Callable[[bool], None]
    """Function called before each microbatch of a training step. Its argument is whether the microbatch is the last one."""

    def __call__(self, microbatches: Sequence[Batch], num_terms: Tensor) -> Tensor:
        results, scale = [], num_terms.clamp(min=1).reciprocal()  # a batch may be all padding
        for i, batch in enumerate(microbatches):
            self.start_microbatch(i == len(microbatches) - 1)
            self.phases.start("forward")
            result = self._forward(self.shard_sequence(batch), self.objective, scale)
            self.phases.start("backward")
            result.backward(torch.ones_like(result))  # only the loss has a gradient, metrics have none
            results.append(result.detach())
        self.phases.start("reduction")
        return self._sum(results, self.objective)

    def _forward(self, batch: Batch, objective: Objective, scale: Tensor | float = 1.0) -> Tensor:
        (model,) = self.model_parts.values()
        head = objective.head(batch.labels, batch.documents, batch.reference, scale)
        return model(batch.tokens, batch.positions, batch.documents, head=head)

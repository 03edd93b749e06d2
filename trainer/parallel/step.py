"""Steps that compute a loss and gradients from microbatches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from models.context import Context
from trainer.batch import Batch
from trainer.objective.objective import Objective, Readout, by_name
from trainer.objective.prediction import with_future
from trainer.parallel.fsdp import reshard_all
from trainer.runtime.distributed import sum_over
from trainer.runtime.step_timer import StepTimer


@dataclass(frozen=True)
class EvaluationSums:
    """Sums over the terms of some microbatches, on all ranks."""

    sums: dict[str, Tensor]
    """Sums of the loss and of the objective's metrics, by name."""
    num_terms: Tensor
    """Number of the terms, a scalar."""


@dataclass(kw_only=True, eq=False)
class Step(ABC):
    """Forward and backward over microbatches. Returned values are global: they are identical on every rank."""

    model_parts: Mapping[Any, nn.Module]
    """Stage -> this rank's part of the model, in order. Without pipeline parallelism, the only part is the model."""
    objective: Objective
    num_predictions: int = 0
    """Number of layers for multi-token prediction, which only training runs."""
    shard_sequence: Callable[[Batch], Batch]
    """Function that maps a batch of full sequences to this rank's shard of each sequence."""
    batch_group: ProcessGroup
    """Group of the ranks that read different samples."""
    timer: StepTimer
    loss_group: ProcessGroup
    """Group of ranks that compute the loss of different tokens. All of them belong to the same pipeline stage."""

    def __call__(self, microbatches: Sequence[Batch], num_terms: Tensor) -> dict[str, Tensor]:
        """Run forward and backward. Return the means of the loss and of the objective's metrics over the terms, by name.

        Args:
            microbatches: This rank's microbatches, with full sequences.
            num_terms: Number of the objective's terms on all ranks, a scalar.
        """
        results = self._forward_backward(microbatches, num_terms.clamp(min=1))  # a batch may be all padding
        self.timer.start("reduction")
        return by_name(self.objective, self._sum(results, self.objective))

    def evaluate(self, microbatches: Sequence[Batch], objective: Objective) -> EvaluationSums:
        """Run forward. Return what the objective's means over these microbatches and others are computed from."""
        sums = self.read(microbatches, objective)
        num_terms = count_terms(microbatches, objective, self.batch_group)
        return EvaluationSums(by_name(objective, sums), num_terms)

    @torch.no_grad()
    def read(self, microbatches: Sequence[Batch], readout: Readout) -> Tensor:
        """Run forward. Return the sum of the heads' results over microbatches and ranks, as a vector."""
        results = [self._forward(self.shard_sequence(batch), readout) for batch in microbatches]
        for part in self.model_parts.values():
            reshard_all(part)  # backward normally does this, but it does not run here
        return self._sum(results, readout)

    @abstractmethod
    def _forward_backward(self, microbatches: Sequence[Batch], num_terms: Tensor) -> Sequence[Tensor]:
        """Run forward and backward. Return the head's result of each microbatch, divided by the number of terms, or nothing on a
        rank without the last stage."""

    @abstractmethod
    def _forward(self, batch: Batch, readout: Readout) -> Tensor | None:
        """Return the head's result for a batch of sharded sequences, or None on a rank without the last stage."""

    def _sum(self, results: Sequence[Tensor | None], readout: Readout) -> Tensor:
        """Return the sum over the microbatches and over loss_group, as a vector. PipelineStep adds the sum over the stages."""
        own = [result for result in results if result is not None]
        total = _total(own) if own else torch.zeros(readout.shape, dtype=torch.float32, device=self.timer.device)
        return sum_over(total.reshape(-1), self.loss_group)


@torch.no_grad()
def count_terms(microbatches: Sequence[Batch], objective: Objective, batch_group: ProcessGroup) -> Tensor:
    """Return the number of an objective's terms on all ranks as a scalar. microbatches: full sequences. If the loss is divided by
    this number, every term has the same weight, regardless of padding and masks."""
    return sum_over(_total([objective.count(batch) for batch in microbatches]), batch_group)


def context_of(batch: Batch) -> Context:
    return Context(batch.positions, batch.documents, batch.samples, batch.last_readers, future=batch.future)


def _total(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0) if len(tensors) > 1 else tensors[0]


@dataclass(kw_only=True, eq=False)
class SpmdStep(Step):
    """A step in which every rank runs the full model on its share of the samples and sequences."""

    start_microbatch: Callable[[bool], None]
    """Function called before each microbatch of a training step. Its argument is whether the microbatch is the last one."""

    def _forward_backward(self, microbatches: Sequence[Batch], num_terms: Tensor) -> Sequence[Tensor]:
        results = []
        for i, batch in enumerate(microbatches):
            self.start_microbatch(i == len(microbatches) - 1)
            self.timer.start("forward")
            batch = self.shard_sequence(with_future(batch, self.num_predictions))
            result = self._forward(batch, self.objective) / num_terms
            self.timer.start("backward")
            result.backward(torch.ones_like(result))  # only the loss has a gradient, metrics have none
            results.append(result.detach())
        return results

    def _forward(self, batch: Batch, readout: Readout) -> Tensor:
        (model,) = self.model_parts.values()
        head = readout.head(batch.labels, batch.documents, batch.reference)
        return model(batch.tokens, context_of(batch), head=head)

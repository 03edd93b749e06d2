"""Steps that compute a loss and gradients from microbatches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from models.spec import Head
from trainer.batch import IGNORE_INDEX, Batch
from trainer.runtime.distributed import sum_over
from trainer.runtime.phases import PhaseTimer


@dataclass(kw_only=True, eq=False)
class Step(ABC):
    """Forward and backward over microbatches. Returned values are global: they are identical on every rank."""

    make_head: Callable[[Tensor], Head]
    """Function that maps labels (batch, seq / cp) to a head, which computes the summed loss."""
    shard_sequence: Callable[[Batch], Batch]
    """Function that maps a batch of full sequences to this rank's shard of each sequence."""
    batch_group: ProcessGroup
    """Group of the ranks that read different samples."""
    phases: PhaseTimer
    loss_group: ProcessGroup
    """Group of ranks that compute the loss of different tokens. All of them belong to the same pipeline stage."""

    @abstractmethod
    def __call__(self, microbatches: Sequence[Batch], num_targets: Tensor) -> Tensor:
        """Run forward and backward. Return the mean loss per target token. num_targets: global number of target tokens."""

    @abstractmethod
    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Return the sum of the token losses and the number of target tokens."""


def count_targets(microbatches: Sequence[Batch], batch_group: ProcessGroup) -> Tensor:
    """Return the number of target tokens on all ranks as a scalar. microbatches: full sequences. If the loss is divided by this
    number, every target token has the same weight, regardless of padding and masks."""
    counts = [(batch.labels != IGNORE_INDEX).sum() for batch in microbatches]
    return sum_over(_sum(counts), batch_group)


def _sum(scalars: Sequence[Tensor]) -> Tensor:
    return torch.stack(scalars).sum() if len(scalars) > 1 else scalars[0]


@dataclass(kw_only=True, eq=False)
class SpmdStep(Step):
    """A step in which every rank runs the full model on its share of the samples and sequences."""

    model: nn.Module
    start_microbatch: Callable[[bool], None]
    """Function called before each microbatch of a training step. Its argument is whether the microbatch is the last one."""

    def __call__(self, microbatches: Sequence[Batch], num_targets: Tensor) -> Tensor:
        losses, divisor = [], num_targets.clamp(min=1)  # a batch may be all padding
        for i, batch in enumerate(microbatches):
            self.start_microbatch(i == len(microbatches) - 1)
            self.phases.start("forward")
            loss = self._loss_sum(batch) / divisor
            self.phases.start("backward")
            loss.backward()
            losses.append(loss.detach())
        self.phases.start("reduction")
        return sum_over(_sum(losses), self.loss_group)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        losses = [self._loss_sum(batch) for batch in microbatches]
        return sum_over(_sum(losses), self.loss_group), count_targets(microbatches, self.batch_group)

    def _loss_sum(self, batch: Batch) -> Tensor:
        batch = self.shard_sequence(batch)
        return self.model(batch.tokens, batch.positions, batch.documents, head=self.make_head(batch.labels))

"""Microbatches -> loss and gradients."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from trainer.batch import IGNORE_INDEX, Batch
from trainer.runtime.distributed import sum_over

MakeHead = Callable[[Tensor], Callable[[Tensor, Tensor], Tensor]]
"""Labels (batch, seq) -> what the output module applies to (hidden, weight), giving the summed loss."""


ShardSequence = Callable[[Batch], Batch]
"""Whole sequences -> what this rank has of them."""


class Step(Protocol):
    """Both return global values, the same on every rank."""

    def __call__(self, microbatches: Sequence[Batch], num_targets: Tensor) -> Tensor:
        """Forward and backward. num_targets: of all microbatches on all ranks. Returns the mean loss of a target."""

    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Sum of the targets' losses, and the number of targets."""


def count_targets(microbatches: Sequence[Batch], batch_group: ProcessGroup) -> Tensor:
    """Targets of the microbatches of all ranks, over whole sequences, so that every target weighs the same wherever padding
    and masks fall: a scalar."""
    mine = torch.stack([(batch.labels != IGNORE_INDEX).sum() for batch in microbatches]).sum()
    return sum_over(mine, batch_group)


class SpmdStep:
    """Every rank runs the whole model, on its part of the samples and sequences."""

    def __init__(
        self,
        model: FSDPModule,
        make_head: MakeHead,
        shard_sequence: ShardSequence,
        batch_group: ProcessGroup,
        loss_group: ProcessGroup,
        reduce_every_microbatch: bool,
    ):
        """batch_group: the ranks that read different samples; loss_group: those that compute different targets."""
        self.model = model
        self.make_head = make_head
        self.shard_sequence = shard_sequence
        self.batch_group = batch_group
        self.loss_group = loss_group
        self.reduce_every_microbatch = reduce_every_microbatch

    def __call__(self, microbatches: Sequence[Batch], num_targets: Tensor) -> Tensor:
        losses = []
        for number, batch in enumerate(microbatches, start=1):
            last = number == len(microbatches)
            self.model.set_requires_gradient_sync(last or self.reduce_every_microbatch)
            self.model.set_is_last_backward(last)
            loss = self._loss_sum(batch) / num_targets.clamp(min=1)  # a batch may be all padding
            loss.backward()
            losses.append(loss.detach())
        return sum_over(torch.stack(losses).sum(), self.loss_group)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        loss_sum = torch.stack([self._loss_sum(batch) for batch in microbatches]).sum()
        return sum_over(loss_sum, self.loss_group), count_targets(microbatches, self.batch_group)

    def _loss_sum(self, batch: Batch) -> Tensor:
        batch = self.shard_sequence(batch)
        return self.model(batch.tokens, batch.positions, batch.documents, head=self.make_head(batch.labels))

"""Held-out loss, by the same Step that trains."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from trainer.batch import Batch
from trainer.config import ConfigError, EvaluationConfig
from trainer.data.loader import Cut, held_out_batches
from trainer.data.packing import WrappedSamples
from trainer.parallel.step import Step


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """Mean over all targets, in nats."""
    num_targets: int


class HeldOut:
    """The held-out samples of a run."""

    def __init__(self, samples: WrappedSamples, config: EvaluationConfig):
        """Raises ConfigError where the held-out documents do not fill one sample."""
        self.samples = samples
        self.num_samples = min(len(samples), config.max_samples or len(samples))
        if not self.num_samples:
            raise ConfigError(
                "evaluation.interval_steps",
                f"the held-out documents have {len(samples.store.tokens)} tokens, less than one sample of "
                f"seq_len {samples.seq_len}; raise [data] held_out_fraction",
            )

    @functools.cached_property
    def unigram_entropy(self) -> float:
        """Entropy of the targets' own frequencies, in nats: the loss of the best model that ignores all context."""
        targets = self.samples.store.tokens[1 : self.num_samples * self.samples.seq_len + 1]
        counts = np.bincount(targets)
        shares = counts[counts > 0] / len(targets)
        return float(-(shares * np.log(shares)).sum())

    def evaluate(self, step: Step, cut: Cut, to_device: Callable[[Batch], Batch]) -> Evaluation:
        """On all ranks together; the same result on each."""
        batches = map(to_device, held_out_batches(self.samples, self.num_samples, cut))
        sums = [step.evaluate(group) for group in _groups(batches, cut.grad_accum)]
        loss_sum = torch.stack([loss for loss, _ in sums]).double().sum()
        num_targets = torch.stack([count for _, count in sums]).sum()
        return Evaluation((loss_sum / num_targets).item(), int(num_targets.item()))


def _groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    while group := list(islice(batches, size)):
        yield group

"""Held-out loss, by the same Step that trains."""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from trainer.batch import IGNORE_INDEX, Batch
from trainer.config import ConfigError, EvaluationConfig
from trainer.data.sampling.loader import BatchPartition, evaluation_batches
from trainer.data.sampling.samples import Samples
from trainer.parallel.step import Step
from trainer.system import logging

_BLOCK = 256
"""Samples that are looked at together."""


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """Mean over all targets, in nats."""
    num_targets: int
    bits_per_byte: float | None
    """Of the text that the targets stand for, whatever the tokenizer; None where they stand for none."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


class EvalSet:
    """One set of samples that are not trained on."""

    def __init__(self, name: str, samples: Samples, max_samples: int, text_bytes: np.ndarray):
        """text_bytes: (vocabulary,), of the text of each token. Raises ConfigError where the documents do not fill one
        sample."""
        self.name = name
        self.samples = samples
        self.num_samples = min(len(samples), max_samples or len(samples))
        self.text_bytes = text_bytes
        if not self.num_samples:
            raise ConfigError(
                "evaluation.interval_steps",
                f"the documents of {name} do not fill one sample of training.seq_len; a larger [data] held_out_fraction, or "
                "another set, may",
            )

    @functools.cached_property
    def target_counts(self) -> np.ndarray:
        """(tokens,): how often each is a target."""
        counts = np.zeros(len(self.text_bytes), np.int64)
        for first in range(0, self.num_samples, _BLOCK):
            labels = self.samples.batch(np.arange(first, min(first + _BLOCK, self.num_samples))).labels.numpy()
            counts += np.bincount(labels[labels != IGNORE_INDEX], minlength=len(counts))
        return counts

    @property
    def unigram_entropy(self) -> float:
        """Entropy of the targets' own frequencies, in nats: the loss of the best model that ignores all context."""
        counts = self.target_counts[self.target_counts > 0]
        shares = counts / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    def evaluate(self, step: Step, cut: BatchPartition, to_device: Callable[[Batch], Batch]) -> Evaluation:
        """On all ranks together; the same result on each."""
        batches = map(to_device, evaluation_batches(self.samples, self.num_samples, cut))
        sums = [step.evaluate(group) for group in _groups(batches, cut.grad_accum)]
        loss_sum = torch.stack([loss for loss, _ in sums]).double().sum().item()
        num_targets = int(torch.stack([count for _, count in sums]).sum().item())
        num_bytes = int(self.target_counts @ self.text_bytes)
        bits_per_byte = loss_sum / math.log(2) / num_bytes if num_bytes else None
        return Evaluation(loss_sum / max(1, num_targets), num_targets, bits_per_byte)


class BestTracker:
    """The saved step with the lowest loss on a set, whose checkpoint is kept."""

    def __init__(self, config: EvaluationConfig, data: str):
        """data: changes with the content of the set, where the rest of the run allows for another one."""
        self.name = config.keep_best_on
        self.of = f"{config.keep_best_on}/{config.max_samples}/{data}"
        self._saved = self._before = (0, math.inf)
        self._better: float | None = None

    @property
    def step(self) -> int:
        """0: none yet."""
        return self._saved[0]

    @property
    def to_save(self) -> bool:
        """Whether a lower loss was seen since the last save."""
        return self._better is not None

    def see(self, name: str, loss: float) -> None:
        if name == self.name and loss < self._saved[1]:
            self._better = loss

    def before_save(self, step: int) -> None:
        if self._better is not None:
            self._before, self._saved, self._better = self._saved, (step, self._better), None

    def after_failed_save(self, step: int) -> None:
        if step == self.step:
            self._saved = self._before

    def state(self) -> list:
        return [self.of, *self._saved] if self.step else []

    def load_state(self, state: list, steps: Collection[int]) -> None:
        """What was best on another set, on another part of it, or at a step of which there is no checkpoint any more, does not
        count. steps: of those that are there."""
        counts = state[:1] == [self.of] and state[1] in steps
        if state and self.name and not counts:
            logging.info(
                f"step {state[1]} was the best, of other data or with a checkpoint that is gone: it does not count"
            )
        self._saved, self._better = (state[1], state[2]) if counts else (0, math.inf), None


def build_eval_sets(
    sets: Mapping[str, Samples], config: EvaluationConfig, text_bytes: Callable[[], np.ndarray]
) -> list[EvalSet]:
    """Those of a run; none where it does not evaluate. Raises ConfigError."""
    if not config.interval_steps:
        return []
    if config.keep_best_on and config.keep_best_on not in sets:
        raise ConfigError("evaluation.keep_best_on", f"is no set; there are: {', '.join(sets)}")
    table = text_bytes()
    return [EvalSet(name, samples, config.max_samples, table) for name, samples in sets.items()]


def _groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    while group := list(islice(batches, size)):
        yield group

"""Evaluation loss on held-out documents and other datasets, by the Step that trains."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from trainer.batch import IGNORE_INDEX, Batch
from trainer.config import ConfigError, EvaluationConfig
from trainer.data.sampling.loader import BatchPartition, evaluation_batches
from trainer.data.sampling.samples import Samples
from trainer.parallel.step import Step
from trainer.state import is_due
from trainer.system import logging

_CHUNK_SAMPLES = 256
"""Number of samples whose targets are counted at once."""


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """Mean loss over all target tokens, in nats."""
    unigram_entropy: float
    """Entropy of the target tokens' frequencies, in nats."""
    num_targets: int
    bits_per_byte: float | None
    """Loss in bits per byte of the targets' text, comparable between tokenizers; None if the targets have no text."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def record(self) -> dict[str, float | int]:
        values = {"loss": self.loss, "perplexity": self.perplexity, "unigram_entropy": self.unigram_entropy}
        values["num_targets"] = self.num_targets
        return values if self.bits_per_byte is None else values | {"bits_per_byte": self.bits_per_byte}


class EvalSet:
    """Evaluation dataset, whose samples are not trained on."""

    def __init__(self, name: str, samples: Samples, max_samples: int, text_bytes: np.ndarray):
        """text_bytes: number of bytes of each token's text, shape (vocab_size,). Raise ConfigError for less than one sample."""
        self.name = name
        self.samples = samples
        self.num_samples = min(len(samples), max_samples or len(samples))
        self.text_bytes = text_bytes
        if not self.num_samples:
            raise ConfigError(
                "evaluation.interval_steps",
                f"the documents of {name} do not fill one sample of training.seq_len; increase [data] held_out_fraction or use "
                "another dataset",
            )

    @functools.cached_property
    def target_counts(self) -> np.ndarray:
        """Return how often each token is a target, shape (vocab_size,)."""
        counts = np.zeros(len(self.text_bytes), np.int64)
        for first in range(0, self.num_samples, _CHUNK_SAMPLES):
            labels = self.samples[np.arange(first, min(first + _CHUNK_SAMPLES, self.num_samples))].labels.numpy()
            counts += np.bincount(labels[labels != IGNORE_INDEX], minlength=len(counts))
        return counts

    @property
    def unigram_entropy(self) -> float:
        """Entropy of the targets' frequencies, in nats: the loss of the best model that ignores all context."""
        counts = self.target_counts[self.target_counts > 0]
        shares = counts / counts.sum()
        return float(-(shares * np.log(shares)).sum())


class Evaluator:
    """Evaluation of the model on every evaluation dataset, at intervals and after the last step."""

    def __init__(
        self,
        config: EvaluationConfig,
        datasets: list[EvalSet],
        step: Step,
        partition: BatchPartition,
        to_device: Callable[[Batch], Batch],
        *,
        steps: int,
    ):
        """step: the training Step, whose `evaluate` is used. steps: number of steps of the complete run."""
        self.config = config
        self.datasets = datasets
        self.step = step
        self.partition = partition
        self.to_device = to_device
        self.steps = steps

    def due(self, step: int) -> bool:
        return bool(self.datasets) and is_due(step, self.config.interval_steps, self.steps)

    def run(self, dataset: EvalSet) -> Evaluation:
        """Evaluate on one dataset, collectively. All ranks return the same result."""
        batches = map(self.to_device, evaluation_batches(dataset.samples, dataset.num_samples, self.partition))
        sums = [self.step.evaluate(group) for group in _groups(batches, self.partition.grad_accum)]
        loss_sum = torch.stack([loss for loss, _ in sums]).double().sum().item()
        num_targets = int(torch.stack([count for _, count in sums]).sum().item())
        num_bytes = int(dataset.target_counts @ dataset.text_bytes)
        result = Evaluation(
            loss=loss_sum / max(1, num_targets),
            unigram_entropy=dataset.unigram_entropy,
            num_targets=num_targets,
            bits_per_byte=loss_sum / math.log(2) / num_bytes if num_bytes else None,
        )
        logging.info(
            f"{dataset.name}: loss {result.loss:.4f} nats over {num_targets} tokens (unigram entropy of these tokens: "
            f"{result.unigram_entropy:.4f}, {result.unigram_entropy - result.loss:+.4f} above the loss)"
        )
        return result


def build_eval_sets(
    sets: Mapping[str, Samples], config: EvaluationConfig, text_bytes: Callable[[], np.ndarray]
) -> list[EvalSet]:
    """Return the evaluation datasets of a run, or [] if the run does not evaluate. Raise ConfigError."""
    if not config.interval_steps:
        return []
    if config.keep_best_on and config.keep_best_on not in sets:
        raise ConfigError("evaluation.keep_best_on", f"unknown evaluation dataset; available: {', '.join(sets)}")
    table = text_bytes()
    return [EvalSet(name, samples, config.max_samples, table) for name, samples in sets.items()]


def _groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    while group := list(islice(batches, size)):
        yield group

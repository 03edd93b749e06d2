"""Evaluation loss on held-out documents and on other datasets. It is computed by the same Step as the training loss."""

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from trainer.base.config import ConfigError, EvaluationConfig
from trainer.base.system import console
from trainer.batch import IGNORE_INDEX
from trainer.data.datasets import require_evaluated
from trainer.data.sampling.loader import BatchPartition, evaluation_batches
from trainer.data.sampling.samples import Samples
from trainer.objective.objective import Objective
from trainer.parallel.step import Step
from trainer.state import is_due

_CHUNK_SAMPLES = 256
"""Number of samples whose targets are counted at once."""
_FEW = {"num_targets": 1000, "num_pairs": 100}
"""Unit of an objective -> number of terms below which a mean is rough. The losses of tokens differ by about 2 nats, so the mean
of 1,000 has a standard error of about 0.06."""
_FEW_SAMPLES = 64
"""Maximum number of samples whose targets are counted when a run starts."""


@dataclass(frozen=True)
class EvalSet:
    """An evaluation dataset, on which the run does not train."""

    name: str
    samples: Samples
    num_samples: int
    """Number of samples to evaluate. They are the first samples of the dataset."""
    text_bytes: np.ndarray
    """Number of bytes of each token's text, shape (vocab_size,)."""

    @functools.cached_property
    def target_counts(self) -> np.ndarray:
        """Return how often each token is a target, shape (vocab_size,)."""
        counts = np.zeros(len(self.text_bytes), np.int64)
        for first in range(0, self.num_samples, _CHUNK_SAMPLES):
            labels = self.samples[np.arange(first, min(first + _CHUNK_SAMPLES, self.num_samples))].labels.numpy()
            counts += np.bincount(labels[labels != IGNORE_INDEX], minlength=len(counts))
        return counts

    @functools.cached_property
    def target_statistics(self) -> tuple[float, int]:
        """Return the unigram entropy of the target tokens in nats, and the number of bytes in their text. The entropy is the
        lowest possible loss of a model that ignores all context."""
        counts = self.target_counts
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum()), int(counts @ self.text_bytes)


_WAYS_OUT = (
    "increase [data] held_out_fraction, or name other data in [evaluation] datasets (with held_out_fraction = 0, these alone are "
    "evaluated); without evaluation, set interval_steps = 0"
)


def build_eval_sets(
    sets: Mapping[str, Samples], config: EvaluationConfig, text_bytes: Callable[[], np.ndarray]
) -> list[EvalSet]:
    """Return the evaluation datasets of a run, or [] if the run does not evaluate. Raises ConfigError if keep_best_on
    is the name of an unknown dataset, or if a dataset has no complete sample."""
    if not config.interval_steps:
        return []
    require_evaluated(config, sets)
    for name, samples in sets.items():
        if not len(samples):
            raise ConfigError(
                "evaluation.interval_steps", f"the documents of {name} give no sample with a target; {_WAYS_OUT}"
            )
    limit, table = config.max_samples or math.inf, text_bytes()
    eval_sets = [EvalSet(name, samples, min(len(samples), limit), table) for name, samples in sets.items()]
    for dataset in eval_sets:
        if dataset.num_samples <= _FEW_SAMPLES and (targets := int(dataset.target_counts.sum())) < _FEW["num_targets"]:
            message = f"its loss will be rough, because it has only {targets} target tokens"
            is_limited = dataset.num_samples < len(dataset.samples)
            way_out = "increase [evaluation] max_samples" if is_limited else _WAYS_OUT
            console.warning(f"{dataset.name}: {message}; {way_out}")
    return eval_sets


@dataclass(frozen=True)
class Evaluator:
    """Evaluation of the model on every evaluation dataset, at intervals and after the last step."""

    config: EvaluationConfig
    datasets: list[EvalSet]
    partition: BatchPartition
    num_microbatches: int
    """Number of microbatches that are evaluated at a time."""
    device: torch.device
    steps: int
    """Total number of steps in the run."""
    objective: Objective
    """What is evaluated. Terms of the training's objective that only keep values small, such as the z-loss, may be absent."""

    def due(self, step: int) -> bool:
        return bool(self.datasets) and is_due(step, self.config.interval_steps, self.steps)

    def run(
        self, dataset: EvalSet, step: Step, loading: Callable[[], AbstractContextManager[None]]
    ) -> dict[str, float]:
        """Evaluate the model on one dataset. This is a collective call, and it returns the same metrics on all ranks. The loss is
        the mean over all target tokens or pairs. Loss and unigram entropy are in nats. bits_per_byte is the loss in bits per byte
        of the targets' text. It is comparable between tokenizers, and it is omitted if the targets have no text. loading: context
        manager of the wait for one microbatch."""
        batches = evaluation_batches(dataset.samples, dataset.num_samples, self.partition)
        total, parts = self.partition.num_microbatches(dataset.num_samples), []
        for first in range(0, total, self.num_microbatches):
            microbatches = []
            for _ in range(first, min(first + self.num_microbatches, total)):
                with loading():
                    microbatches.append(next(batches).to(self.device))
            parts.append(step.evaluate(microbatches, self.objective))
        objective = self.objective
        num_terms = int(torch.stack([part.num_terms for part in parts]).sum().item())
        totals = {
            name: torch.stack([part.sums[name] for part in parts]).double().sum().item() for name in parts[0].sums
        }
        means = {name: total / max(1, num_terms) for name, total in totals.items()}
        if objective.metrics:
            return means | {objective.unit: num_terms}
        loss, (entropy, num_bytes) = means["loss"], dataset.target_statistics
        perplexity = math.exp(min(loss, 700.0))
        metrics = {"loss": loss, "perplexity": perplexity, "unigram_entropy": entropy, "num_targets": num_terms}
        if num_bytes:
            metrics["bits_per_byte"] = totals["loss"] / math.log(2) / num_bytes
        return metrics


def evaluation_line(dataset: str, result: Mapping[str, float], objective: Objective) -> str:
    """Return the console's text for the result of an evaluation."""
    num_terms = result[objective.unit]
    loss = f"{dataset}: loss {result['loss']:.4f}"
    only = "only " if num_terms < _FEW.get(objective.unit, 0) else ""
    terms = f"{only}{num_terms} {objective.unit.removeprefix('num_')}"
    if objective.metrics:
        shown = ", ".join(f"{name} {result[name]:.4f}" for name in objective.metrics)
        return f"{loss} over {terms} ({shown})"
    entropy = result["unigram_entropy"]
    return (
        f"{loss} nats, perplexity {result['perplexity']:.4g}, over {terms} "
        f"(unigram entropy {entropy:.4f}, entropy minus loss {entropy - result['loss']:+.4f})"
    )

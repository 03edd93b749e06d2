"""Phases of a mixture of datasets: their text in the settings, and exact weights. This module does not import torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainer.base.config import ConfigError
from trainer.base.system.spelling import did_you_mean
from trainer.data.sampling.packing import concatenated_ranges

PERIOD = 10_000
"""Number of samples over which the weights hold exactly. Weights are rounded to multiples of 1 / PERIOD."""

KEY = "data.mixture"
_MAX_START = 10**18
_MAX_WEIGHT = 1e18


@dataclass(frozen=True)
class MixturePhase:
    """A range of the global sample order in which the weights of the datasets are constant."""

    start: int
    """Global index of the phase's first sample."""
    names: tuple[str, ...]
    quotas: tuple[int, ...]
    """Number of samples of each dataset per PERIOD samples."""

    def __str__(self) -> str:
        return f"{self.weights_text} from sample {self.start}"

    @property
    def weights(self) -> dict[str, float]:
        """Dataset -> its share of the samples, of those that have one."""
        return {name: quota / PERIOD for name, quota in zip(self.names, self.quotas, strict=True) if quota}

    @property
    def weights_text(self) -> str:
        return " ".join(f"{name}={weight:g}" for name, weight in self.weights.items())

    @cached_property
    def pattern(self) -> tuple[np.ndarray, np.ndarray]:
        """Dataset at each index of a period, and number of samples of this dataset before that index. The samples of each dataset
        are spaced evenly, so that the weights hold approximately over any range."""
        quotas = np.array(self.quotas)
        dataset, count = np.repeat(np.arange(len(quotas)), quotas), concatenated_ranges(0, quotas)
        order = np.argsort((count + 0.5) / quotas[dataset], kind="stable")
        return dataset[order], count[order]

    def consumed(self, num_samples: int) -> np.ndarray:
        """Return how many of the phase's first num_samples samples come from each dataset, shape (datasets,)."""
        periods, remainder = divmod(num_samples, PERIOD)
        dataset, _ = self.pattern
        return periods * np.array(self.quotas) + np.bincount(dataset[:remainder], minlength=len(self.quotas))


def samples_of_epoch(phases: Sequence[MixturePhase], dataset: str, size: int) -> float | None:
    """Return the mean number of samples of the run until a dataset has been seen once, or None if the weights never let it. size:
    number of its samples."""
    index, left = phases[0].names.index(dataset), size
    for phase, following in zip(phases, [*phases[1:], None], strict=True):
        seen = None if following is None else int(phase.consumed(following.start - phase.start)[index])
        if seen is None or seen >= left:
            quota = phase.quotas[index]
            return phase.start + left * PERIOD / quota if quota else None
        left -= seen
    return None


def parse_mixture(mixture: Sequence[str], names: Sequence[str]) -> tuple[MixturePhase, ...]:
    """Parse the phases, each written "START: NAME=WEIGHT NAME=WEIGHT ...", where START is a sample index. If the mixture is
    empty, all datasets have equal weights. Raises ConfigError."""
    if not mixture:
        return (MixturePhase(0, tuple(names), _quotas(dict.fromkeys(names, 1.0), names, "")),)
    phases: list[MixturePhase] = []
    for text in mixture:
        start, colon, weights_text = text.partition(":")
        if not colon or not re.fullmatch("[0-9]+", start.strip()):
            raise ConfigError(KEY, f"{text!r}: expected 'START: NAME=WEIGHT ...', such as '0: web=0.7 code=0.3'")
        if len(start.strip()) > len(str(_MAX_START)) or int(start) > _MAX_START:
            raise ConfigError(KEY, f"{text!r}: a phase must start at {_MAX_START} or earlier")
        if int(start) != 0 if not phases else int(start) <= phases[-1].start:
            message = "this phase must start after the previous phase" if phases else "the first phase must start at 0"
            raise ConfigError(KEY, f"{text!r}: {message}")
        pairs = weights_text.split()
        weights = dict(_weight(pair, text, names) for pair in pairs)
        if len(weights) < len(pairs):
            raise ConfigError(KEY, f"{text!r}: this phase names a dataset twice")
        phases.append(MixturePhase(int(start), tuple(names), _quotas(weights, names, text)))
    return tuple(phases)


def _weight(pair: str, text: str, names: Sequence[str]) -> tuple[str, float]:
    name, _, value = pair.partition("=")
    if name not in names:
        raise ConfigError(KEY, f"{text!r}: {name} is not defined in data.datasets{did_you_mean(name, names)}")
    try:
        weight = float(value)
    except ValueError:
        weight = -1.0
    if not 0 <= weight <= _MAX_WEIGHT:
        raise ConfigError(KEY, f"{text!r}: the weight of {name} must be a number from 0 to {_MAX_WEIGHT:g}")
    return name, weight


def _quotas(weights: Mapping[str, float], names: Sequence[str], text: str) -> tuple[int, ...]:
    """Round the weights to integers that sum to PERIOD, by the largest-remainder method."""
    total = sum(weights.values())
    if total <= 0:
        raise ConfigError(KEY, f"{text!r}: at least one weight must be positive")
    exact = np.array([weights.get(name, 0.0) / total * PERIOD for name in names])
    quotas = np.floor(exact).astype(int)
    rounded_up = np.argsort(-(exact - quotas), kind="stable")[: PERIOD - quotas.sum()]
    quotas[rounded_up] += 1
    for name, quota in zip(names, quotas, strict=True):
        if weights.get(name) and not quota:
            raise ConfigError(KEY, f"{text!r}: the weight of {name} is less than 1/{PERIOD} of the total")
    return tuple(quotas.tolist())

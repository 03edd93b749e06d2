"""Several datasets in one order: exact shares, the same for every reader, from any place on without history."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainer.batch import Batch
from trainer.config import ConfigError
from trainer.config.fields import did_you_mean
from trainer.data.sampling.samples import Samples

PERIOD = 10_000
"""Samples after which the shares come out exactly; weights are rounded to such parts."""

_KEY = "data.mixture"


@dataclass(frozen=True)
class MixturePhase:
    """A stretch of the order with the same shares."""

    start: int
    """Its first place in the order."""
    quotas: tuple[int, ...]
    """Of each dataset in PERIOD samples."""

    @cached_property
    def pattern(self) -> tuple[np.ndarray, np.ndarray]:
        """For each place of a period: the dataset, and how many of its samples come before in the period. The samples of each
        dataset stand as evenly as can be, so that any stretch has about the shares."""
        ideal = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in self.quotas if quota])
        dataset = np.repeat(np.arange(len(self.quotas)), self.quotas)
        nth = np.concatenate([np.arange(quota) for quota in self.quotas])
        order = np.argsort(ideal, kind="stable")
        return dataset[order], nth[order]

    def consumed(self, samples: int) -> np.ndarray:
        """(datasets,): of each dataset, in the first so many samples of the stage."""
        periods, rest = divmod(samples, PERIOD)
        dataset, _ = self.pattern
        return periods * np.array(self.quotas) + np.bincount(dataset[:rest], minlength=len(self.quotas))


def phases_of(mixture: Sequence[str], names: Sequence[str]) -> tuple[MixturePhase, ...]:
    """mixture: "START: NAME=WEIGHT NAME=WEIGHT ..." for each stage, START in samples; none: all datasets by equal weights.
    Raises ConfigError."""
    if not mixture:
        return (MixturePhase(0, _quotas(dict.fromkeys(names, 1.0), names, "")),)
    stages: list[MixturePhase] = []
    for text in mixture:
        start, colon, shares = text.partition(":")
        if not colon or not start.strip().isdecimal():
            raise ConfigError(_KEY, f"{text!r}: expected 'START: NAME=WEIGHT ...', such as '0: web=0.7 code=0.3'")
        if int(start) != 0 if not stages else int(start) <= stages[-1].start:
            rule = "must start behind the one before" if stages else "the first stage must start at 0"
            raise ConfigError(_KEY, f"{text!r}: {rule}")
        weights = dict(_weight(part, text, names) for part in shares.split())
        if len(weights) < len(shares.split()):
            raise ConfigError(_KEY, f"{text!r}: a dataset is named twice")
        stages.append(MixturePhase(int(start), _quotas(weights, names, text)))
    return tuple(stages)


def _weight(part: str, text: str, names: Sequence[str]) -> tuple[str, float]:
    name, _, number = part.partition("=")
    if name not in names:
        raise ConfigError(_KEY, f"{text!r}: {name} is no dataset of [data] datasets{did_you_mean(name, names)}")
    try:
        weight = float(number)
    except ValueError:
        weight = -1.0
    if not 0 <= weight < float("inf"):
        raise ConfigError(_KEY, f"{text!r}: the weight of {name} must be a number from 0 on")
    return name, weight


def _quotas(weights: Mapping[str, float], names: Sequence[str], text: str) -> tuple[int, ...]:
    """By largest remainders."""
    total = sum(weights.values())
    if total <= 0:
        raise ConfigError(_KEY, f"{text!r}: some weight must be above 0")
    exact = np.array([weights.get(name, 0.0) / total * PERIOD for name in names])
    quotas = np.floor(exact).astype(int)
    most = np.argsort(-(exact - quotas), kind="stable")[: PERIOD - quotas.sum()]
    quotas[most] += 1
    for name, quota in zip(names, quotas, strict=True):
        if weights.get(name) and not quota:
            raise ConfigError(_KEY, f"{text!r}: the weight of {name} is less than 1/{PERIOD} of all")
    return tuple(quotas.tolist())


def require_same_past(saved: Sequence[Sequence[int]], now: Sequence[MixturePhase], consumed: int) -> None:
    """Raises ConfigError where stages that had begun when `consumed` samples were consumed are not what they were. saved: start
    and quotas of each."""
    past = [list(stage) for stage in saved if stage[0] < max(consumed, 1)]
    given = [[stage.start, *stage.quotas] for stage in now if stage.start < max(consumed, 1)]
    if past != given:
        raise ConfigError(
            _KEY,
            f"stages that have begun cannot change: of {PERIOD} samples they had, from a sample on, {past}, and now {given}; a "
            f"new stage may start from sample {consumed} on",
        )


class CombinedSamples:
    """The samples of several datasets, numbered one dataset after the other."""

    def __init__(self, parts: Sequence[Samples]):
        self.parts = parts
        self.firsts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def batch(self, samples: np.ndarray) -> Batch:
        """See Samples."""
        dataset = np.maximum(np.searchsorted(self.firsts, samples, side="right") - 1, 0)
        if (dataset == dataset[0]).all():
            number = int(dataset[0])
            return self.parts[number].batch(np.where(samples < 0, -1, samples - self.firsts[number]))
        return Batch.cat([self.batch(samples[i : i + 1]) for i in range(len(samples))])

"""Mixture of datasets with exact weights. The dataset of a sample is computed directly from its global index."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.base.config import ConfigError
from trainer.batch import Batch
from trainer.data.sampling.phases import KEY, MixturePhase
from trainer.data.sampling.samples import Samples


def require_unchanged_phases(saved: Sequence[Sequence[int]], phases: Sequence[MixturePhase], consumed: int) -> None:
    """Raise ConfigError if a phase that started within the first `consumed` samples differs from the saved phase.

    saved: start and quotas of each phase in the checkpoint.
    """
    limit = max(consumed, 1)
    before = [MixturePhase(start, phases[0].names, tuple(quotas)) for start, *quotas in saved if start < limit]
    now = [phase for phase in phases if phase.start < limit]
    if before != now:
        was, given = ("; ".join(map(str, p)) for p in (before, now))
        raise ConfigError(
            KEY,
            f"phases that have already started cannot be changed (was {was}, now {given}); add a new phase starting at sample "
            f"{consumed} or later",
        )


class CombinedSamples:
    """The samples of several datasets, indexed one dataset after the other."""

    def __init__(self, datasets: Sequence[Samples]):
        self.datasets = datasets
        self.offsets = np.cumsum([0, *map(len, datasets)])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __getitem__(self, samples: np.ndarray) -> Batch:
        dataset = np.maximum(np.searchsorted(self.offsets, samples, side="right") - 1, 0)
        if (dataset == dataset[0]).all():
            return self.datasets[dataset[0]][samples - self.offsets[dataset[0]]]
        rows = [self[samples[i : i + 1]] for i in range(len(samples))]
        return Batch(*(_concatenate(tensors) for tensors in zip(*rows, strict=True)))


def _concatenate(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate along the batch dim, by NumPy: torch would start OpenMP threads for the thread that loads ahead."""
    return None if tensors[0] is None else torch.from_numpy(np.concatenate([*map(Tensor.numpy, tensors)]))

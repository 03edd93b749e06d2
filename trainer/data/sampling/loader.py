"""The global order of samples, cut into the microbatches of each rank.

A step that starts at cursor c consumes samples [c, c + G) of the global order, G the global batch. They are cut into
leaves of local_batch_size; at accumulation j, data-parallel rank r of W takes leaf j * W + r. Neither the order nor the
content of a step depends on W, so the whole state of the data is the cursor.
"""

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer.batch import Batch
from trainer.config import DataConfig
from trainer.data.sampling.mixture import PERIOD, MixturePhase
from trainer.data.sampling.permutation import permute
from trainer.data.sampling.samples import Samples
from trainer.system.process import detach_signals

_LEAVES_TOGETHER = 64


@dataclass(frozen=True)
class SampleOrder:
    """An endless order: of each dataset one permutation of its samples after the other, keyed by (seed, epoch, dataset), mixed
    as the stages say."""

    sizes: tuple[int, ...]
    """Samples of each dataset, which are numbered one dataset after the other."""
    stages: tuple[MixturePhase, ...]
    seed: int
    shuffle: bool
    skipped_samples: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of places that are left out on purpose, in order."""

    def place(self, consumed: np.ndarray) -> np.ndarray:
        """Places in the order of all samples, of places in the order without those that are passed over. int64."""
        place = consumed.copy()
        for start, stop in self.skipped_samples:
            place += (place >= start) * (stop - start)
        return place

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """Numbers of the samples at these places of the order without those that are passed over. int64."""
        dataset, nth = self._drawn(self.place(index.ravel()))
        epoch, place = np.divmod(nth, np.array(self.sizes)[dataset])
        firsts = np.cumsum([0, *self.sizes])
        result = place + firsts[dataset]
        if self.shuffle:
            for d, e in np.unique(np.stack([dataset, epoch]), axis=1).T.tolist():  # a batch may span epochs
                chosen = (dataset == d) & (epoch == e)
                key = (self.seed, e, d) if d else (self.seed, e)
                result[chosen] = firsts[d] + permute(place[chosen], self.sizes[d], *key)
        return result.reshape(index.shape)

    def _drawn(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The dataset at each place, and how many of its samples come before, in all stages."""
        dataset, nth = np.empty_like(place), np.empty_like(place)
        stage_of = np.searchsorted([stage.start for stage in self.stages], place, side="right") - 1
        before = np.zeros(len(self.sizes), np.int64)
        for number, stage in enumerate(self.stages):
            chosen = stage_of == number
            if chosen.any():
                periods, slot = np.divmod(place[chosen] - stage.start, PERIOD)
                which, nth_in_period = (table[slot] for table in stage.pattern)
                dataset[chosen] = which
                nth[chosen] = before[which] + periods * np.array(stage.quotas)[which] + nth_in_period
            if number + 1 < len(self.stages):
                before = before + stage.consumed(self.stages[number + 1].start - stage.start)
        return dataset, nth


@dataclass(frozen=True, kw_only=True)
class BatchPartition:
    """How the global batch falls on the ranks."""

    global_batch_size: int
    local_batch_size: int
    rank: int
    """Of the batch axis."""
    ranks: int

    @property
    def grad_accum(self) -> int:
        """Microbatches of one step."""
        return self.global_batch_size // (self.local_batch_size * self.ranks)

    def leaves(self, cursor: int) -> Iterator[int]:
        """First place in the global order of each of this rank's microbatches, from the cursor on, without end."""
        while True:
            for j in range(self.grad_accum):
                yield cursor + (j * self.ranks + self.rank) * self.local_batch_size
            cursor += self.global_batch_size


class _Leaves(Dataset):
    """Microbatches by the numbers of their samples."""

    def __init__(self, samples: Samples):
        self.samples = samples

    def __getitem__(self, numbers: np.ndarray) -> Batch:
        return self.samples.batch(numbers)


class _LeafSampler(Sampler):
    def __init__(self, order: SampleOrder, cut: BatchPartition, cursor: int):
        self.order = order
        self.cut = cut
        self.cursor = cursor

    def __iter__(self) -> Iterator[np.ndarray]:
        leaves = self.cut.leaves(self.cursor)
        while True:
            # Many at once: to permute a few numbers costs as much as to permute hundreds.
            first = np.fromiter(itertools.islice(leaves, _LEAVES_TOGETHER), np.int64, _LEAVES_TOGETHER)
            yield from self.order(first[:, None] + np.arange(self.cut.local_batch_size))


def training_batches(
    samples: Samples, order: SampleOrder, cut: BatchPartition, cursor: int, config: DataConfig, pin_memory: bool
) -> Iterator[Batch]:
    """This rank's microbatches from the cursor on, without end; grad_accum of them make a step.

    The loader's own state is never saved: the cursor says all, whatever the number of workers and what they prefetched.
    """
    workers = {"num_workers": config.num_workers, "prefetch_factor": config.prefetch} if config.num_workers else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*set_vital.*")  # torchdata 0.11 calls what torch has deprecated
        loader = StatefulDataLoader(
            _Leaves(samples),
            batch_size=None,
            sampler=_LeafSampler(order, cut, cursor),
            pin_memory=pin_memory,
            worker_init_fn=detach_signals,
            generator=torch.Generator(),  # else it draws from the rank's own, whose state is part of a checkpoint
            **workers,
        )
    return iter(loader)


def held_out_batches(samples: Samples, num_samples: int, cut: BatchPartition) -> Iterator[Batch]:
    """The first num_samples samples in the order of the store, the same number of microbatches on every rank: where they
    do not come out even, the rest has no targets."""
    step = cut.local_batch_size * cut.ranks
    for first in range(0, num_samples, step):
        mine = first + cut.rank * cut.local_batch_size + np.arange(cut.local_batch_size)
        yield samples.batch(np.where(mine < num_samples, mine, -1))

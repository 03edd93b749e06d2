"""The global order of samples and its partition into microbatches.

A step at cursor c consumes samples [c, c + G) of the global order, where G is the global batch size. They are partitioned into
microbatches of local_batch_size: at accumulation j, data-parallel rank r of W takes microbatch j * W + r. Neither the order nor
the content of a step depends on W, so the data state is the cursor plus the sample ranges skipped on purpose.
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

_INDEX_CHUNK = 64
"""Number of microbatches whose sample indices are computed at once: permuting a few indices costs as much as hundreds."""


@dataclass(frozen=True)
class SampleOrder:
    """An endless order of samples. Each epoch of a dataset is a permutation keyed by (seed, epoch, dataset), and the weights of
    the phases mix the datasets."""

    sizes: tuple[int, ...]
    """Number of samples of each dataset. A sample index counts through the datasets one after the other."""
    phases: tuple[MixturePhase, ...]
    seed: int
    shuffle: bool
    skipped_samples: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of the global indices to skip, in ascending order."""

    def global_index(self, cursor: np.ndarray) -> np.ndarray:
        """Return the int64 global index at each cursor position. A cursor counts only samples that are not skipped."""
        index = cursor.copy()
        for start, stop in self.skipped_samples:
            index += (index >= start) * (stop - start)
        return index

    def __call__(self, cursor: np.ndarray) -> np.ndarray:
        """Return the int64 sample index at each cursor position, in the shape of `cursor`."""
        dataset, count = self._dataset_and_count(self.global_index(cursor.ravel()))
        epoch, index = np.divmod(count, np.array(self.sizes)[dataset])
        offsets = np.cumsum([0, *self.sizes])
        result = index + offsets[dataset]
        if self.shuffle:
            for d, e in np.unique(np.stack([dataset, epoch]), axis=1).T.tolist():  # a batch may span epochs
                selected = (dataset == d) & (epoch == e)
                key = (self.seed, e, d) if d else (self.seed, e)
                result[selected] = offsets[d] + permute(index[selected], self.sizes[d], *key)
        return result.reshape(cursor.shape)

    def _dataset_and_count(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset at each global index, and the number of samples of this dataset before that index."""
        dataset, count = np.empty_like(index), np.empty_like(index)
        phase_of = np.searchsorted([phase.start for phase in self.phases], index, side="right") - 1
        before = np.zeros(len(self.sizes), np.int64)
        for i, phase in enumerate(self.phases):
            selected = phase_of == i
            if selected.any():
                periods, slot = np.divmod(index[selected] - phase.start, PERIOD)
                datasets, count_in_period = (table[slot] for table in phase.pattern)
                dataset[selected] = datasets
                count[selected] = before[datasets] + periods * np.array(phase.quotas)[datasets] + count_in_period
            if i + 1 < len(self.phases):
                before = before + phase.consumed(self.phases[i + 1].start - phase.start)
        return dataset, count


@dataclass(frozen=True, kw_only=True)
class BatchPartition:
    """The partition of a global batch into microbatches of the ranks."""

    global_batch_size: int
    local_batch_size: int
    rank: int
    """Index of this rank on the batch axis of the mesh."""
    ranks: int

    @property
    def grad_accum(self) -> int:
        """Number of microbatches per step."""
        return self.global_batch_size // (self.local_batch_size * self.ranks)

    def microbatch_starts(self, cursor: int) -> Iterator[int]:
        """Yield the cursor of the first sample of each of this rank's microbatches, endlessly."""
        while True:
            for j in range(self.grad_accum):
                yield cursor + (j * self.ranks + self.rank) * self.local_batch_size
            cursor += self.global_batch_size


class _MicrobatchDataset(Dataset):
    """Dataset of microbatches. The key of a microbatch is the tuple of its sample indices."""

    def __init__(self, samples: Samples):
        self.samples = samples

    def __getitem__(self, indices: np.ndarray) -> Batch:
        return self.samples.batch(indices)


class _MicrobatchSampler(Sampler):
    def __init__(self, order: SampleOrder, partition: BatchPartition, cursor: int):
        self.order = order
        self.partition = partition
        self.cursor = cursor

    def __iter__(self) -> Iterator[np.ndarray]:
        starts = self.partition.microbatch_starts(self.cursor)
        while True:
            chunk = np.fromiter(itertools.islice(starts, _INDEX_CHUNK), np.int64, _INDEX_CHUNK)
            yield from self.order(chunk[:, None] + np.arange(self.partition.local_batch_size))


def training_batches(
    samples: Samples, order: SampleOrder, partition: BatchPartition, cursor: int, config: DataConfig, pin_memory: bool
) -> Iterator[Batch]:
    """Yield this rank's microbatches from the cursor on, endlessly. A step consumes `grad_accum` of them.

    The loader has no state to save: the cursor determines the batches, for any number of workers and prefetched batches.
    """
    workers = {"num_workers": config.num_workers, "prefetch_factor": config.prefetch} if config.num_workers else {}
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*set_vital.*"
        )  # torchdata 0.11 calls a function that torch has deprecated
        loader = StatefulDataLoader(
            _MicrobatchDataset(samples),
            batch_size=None,
            sampler=_MicrobatchSampler(order, partition, cursor),
            pin_memory=pin_memory,
            worker_init_fn=detach_signals,
            generator=torch.Generator(),  # by default the loader would use the rank's generator, which checkpoints save
            **workers,
        )
    return iter(loader)


def evaluation_batches(samples: Samples, num_samples: int, partition: BatchPartition) -> Iterator[Batch]:
    """Yield this rank's microbatches of the first num_samples samples, unshuffled. Every rank gets the same number of
    microbatches; the last microbatches are padded with samples that have no targets."""
    step = partition.local_batch_size * partition.ranks
    for start in range(0, num_samples, step):
        index = start + partition.rank * partition.local_batch_size + np.arange(partition.local_batch_size)
        yield samples.batch(np.where(index < num_samples, index, -1))

"""The global order of samples and its partition into microbatches.

A step at cursor c consumes samples [c, c + G) of the global order, where G is the global batch size of the step. They are
partitioned into microbatches of local_batch_size: at accumulation step j, rank r of W data-parallel ranks takes microbatch
j * W + r. Neither the order nor the content of a step depends on W, so the data state consists of the cursor and the skipped
sample ranges. G is a multiple of W * local_batch_size, so a rank's microbatches follow each other in the same order for any G.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torchdata.nodes import IterableWrapper, Mapper, Prefetcher

from trainer.base.config import DataConfig
from trainer.batch import Batch
from trainer.data.sampling.permutation import permute
from trainer.data.sampling.phases import PERIOD, MixturePhase
from trainer.data.sampling.samples import Samples
from trainer.data.store.arrays import LoadingFailed

_INDEX_CHUNK = 64
"""Number of microbatches whose sample indices are computed at once. Permuting a few indices is as slow as permuting hundreds."""


@dataclass(frozen=True)
class SampleOrder:
    """An endless order of samples. Each epoch of a dataset is a permutation keyed by (seed, epoch, dataset). The weights of the
    phases determine how datasets are mixed."""

    sizes: tuple[int, ...]
    """Number of samples of each dataset. Sample indices run through the first dataset, then the second, and so on."""
    phases: tuple[MixturePhase, ...]
    seed: int
    shuffle: bool
    skipped_samples: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of the global indices to skip, in ascending order."""

    def global_index(self, cursor: np.ndarray) -> np.ndarray:
        """Map cursor positions, which do not count skipped samples, to indices of the global order, which do. Both int64."""
        index = cursor.copy()
        for start, stop in self.skipped_samples:
            index += (index >= start) * (stop - start)
        return index

    def phase_starts(self) -> list[tuple[int, MixturePhase]]:
        """Return the cursor position at which each phase starts, without phases all of whose samples are skipped."""
        skipped = self.skipped_samples
        starts = (p.start - sum(max(0, min(stop, p.start) - start) for start, stop in skipped) for p in self.phases)
        return list(
            dict(zip(starts, self.phases, strict=True)).items()
        )  # of phases at one position, the last has samples

    def __call__(self, cursor: np.ndarray) -> np.ndarray:
        """Return the int64 sample index at each cursor position, in the shape of `cursor`."""
        dataset, count = self._dataset_and_count(self.global_index(cursor.ravel()))
        epoch, index = np.divmod(count, np.array(self.sizes)[dataset])
        if self.shuffle:
            for d in np.unique(dataset).tolist():
                selected = dataset == d
                epochs = epoch[selected]  # an array, because one call may span epochs
                # A single dataset keeps the order that it had before runs could have several.
                key = (self.seed, epochs, d) if d else (self.seed, epochs)
                index[selected] = permute(index[selected], self.sizes[d], *key)
        return (index + np.cumsum([0, *self.sizes])[dataset]).reshape(cursor.shape)

    def consumed(self, cursor: int) -> np.ndarray:
        """Return how many of the first `cursor` samples come from each dataset, shape (datasets,)."""
        end = int(self.global_index(np.array([cursor]))[0])
        counts = self._before(end)
        for start, stop in self.skipped_samples:
            if start < end:
                counts = counts - (self._before(stop) - self._before(start))
        return counts

    def _before(self, index: int) -> np.ndarray:
        """Return how many samples of each dataset come before a global index, shape (datasets,)."""
        last = max(i for i, phase in enumerate(self.phases) if phase.start <= index)
        return self._before_phases[last] + self.phases[last].consumed(index - self.phases[last].start)

    @cached_property
    def _before_phases(self) -> list[np.ndarray]:
        """Number of samples of each dataset before each phase, shape (datasets,)."""
        before = [np.zeros(len(self.sizes), np.int64)]
        for phase, following in itertools.pairwise(self.phases):
            before.append(before[-1] + phase.consumed(following.start - phase.start))
        return before

    def _dataset_and_count(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset at each global index, and the number of samples of this dataset before that index."""
        dataset, count = np.empty_like(index), np.empty_like(index)
        for phase, before in zip(self.phases, self._before_phases, strict=True):
            selected = index >= phase.start  # the next phase overwrites the values from its start on
            periods, slot = np.divmod(index[selected] - phase.start, PERIOD)
            datasets, count_in_period = (table[slot] for table in phase.pattern)
            dataset[selected] = datasets
            count[selected] = before[datasets] + periods * np.array(phase.quotas)[datasets] + count_in_period
        return dataset, count


@dataclass(frozen=True, kw_only=True)
class BatchPartition:
    """The partition of global batches into microbatches, and their assignment to ranks."""

    local_batch_size: int
    rank: int
    """Index of this rank on the batch axis of the mesh."""
    ranks: int

    def num_microbatches(self, num_samples: int) -> int:
        """Return the number of microbatches of each rank that together contain num_samples samples."""
        return -(-num_samples // (self.local_batch_size * self.ranks))

    def samples(self, microbatches: np.ndarray) -> np.ndarray:
        """Return the samples of the selected microbatches, as offsets from the first sample of the first global batch, shape
        (microbatches, local_batch_size). microbatches: their indices among this rank's microbatches, counted from 0."""
        first = (microbatches * self.ranks + self.rank) * self.local_batch_size
        return first[:, None] + np.arange(self.local_batch_size)


def _sample_indices(order: SampleOrder, partition: BatchPartition, cursor: int) -> Iterator[np.ndarray]:
    """Yield the sample indices of each of this rank's microbatches, endlessly."""
    for first in itertools.count(0, _INDEX_CHUNK):
        yield from order(cursor + partition.samples(np.arange(first, first + _INDEX_CHUNK)))


@contextmanager
def _explain_lack_of_memory() -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise LoadingFailed("the memory is exhausted: no more training data can be loaded") from None


def _load_ahead(samples: Samples, indices: Iterator[np.ndarray], count: int) -> Iterator[Batch]:
    """Yield the microbatch of each array of sample indices, while a thread loads up to `count` microbatches ahead. The thread
    ends with the iterator. Raises LoadingFailed if it cannot be started."""

    def load(_: None) -> Batch | BaseException:
        try:
            return samples[next(indices)]
        except BaseException as error:
            # As a value: torchdata makes another exception of the text of an Exception, and waits forever after any other.
            return error

    # One thread: ParallelMapper needs semaphores in /dev/shm. Not `torch.set_num_threads`: it would hold in all threads.
    microbatches = Prefetcher(Mapper(IterableWrapper(itertools.repeat(None)), load), count, snapshot_frequency=0)
    try:
        microbatches.reset()
    except RuntimeError as error:
        limit = "the limit of processes (ulimit -u, or the container's pids.max) is too low"
        message = f"the thread of data.prefetch cannot be started ({error}): {limit}; data.prefetch = 0 needs none"
        raise LoadingFailed(message) from None
    for loaded in microbatches:
        if isinstance(loaded, BaseException):
            raise loaded
        yield loaded


def training_batches(
    samples: Samples,
    order: SampleOrder,
    partition: BatchPartition,
    cursor: int,
    config: DataConfig,
    pin_memory: bool,
) -> Iterator[Batch]:
    """Yield this rank's microbatches endlessly, starting at the cursor.

    The iterator has no state to save, because the cursor determines the batches. Prefetching does not change them.

    Args:
        samples: The training data.
        order: Order of the samples.
        partition: Which rank reads which samples.
        cursor: Number of consumed samples.
        config: Prefetching.
        pin_memory: Whether the batches are in pinned memory.

    Raises:
        LoadingFailed: A file cannot be read, or the memory is exhausted.
    """
    indices = _sample_indices(order, partition, cursor)
    batches = _load_ahead(samples, indices, config.prefetch) if config.prefetch else map(samples.__getitem__, indices)
    with _explain_lack_of_memory():
        for i, batch in enumerate(batches):
            # Cursor positions identify samples in any layout.
            (offsets,) = partition.samples(np.array([i]))
            batch = batch._replace(samples=torch.from_numpy(cursor + offsets))
            yield batch.map(Tensor.pin_memory) if pin_memory else batch


def evaluation_batches(samples: Samples, stop: int, partition: BatchPartition, first: int = 0) -> Iterator[Batch]:
    """Yield this rank's microbatches of the samples [first, stop), unshuffled. Every rank gets the same number of microbatches;
    the last microbatches are padded with samples that have no targets. Raises LoadingFailed."""
    with _explain_lack_of_memory():
        for index in first + partition.samples(np.arange(partition.num_microbatches(stop - first))):
            yield samples[np.where(index < stop, index, -1)]

"""Samples of fixed length from a token store. Depending on data.packing, a sample contains a slice of the concatenated documents,
several packed document spans, or a single span."""

import functools
from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trainer.batch import IGNORE_INDEX, Batch
from trainer.data.sampling.packing import PackedIndex, concatenated_ranges
from trainer.data.store.store import TokenStore

PADDING = 0
"""Token id at positions outside all documents. These positions have no label, and their document index is -1."""


class Samples(Protocol):
    """Indexed samples for training or evaluation."""

    def __len__(self) -> int: ...

    def __getitem__(self, samples: np.ndarray) -> Batch:
        """Return a batch. samples: indices of its samples, shape (batch,), where -1 stands for a sample without targets."""


@dataclass(frozen=True)
class WrappedSamples:
    """The concatenated tokens of all documents, split every seq_len tokens. Consecutive samples overlap by one token, so that
    every token except the first can be a label. An incomplete last sample is dropped."""

    store: TokenStore
    seq_len: int
    reset_positions: bool
    """Whether positions restart at 0 in each document. If not, a sample is treated as one document."""

    def __len__(self) -> int:
        return max(0, len(self.store.tokens) - 1) // self.seq_len

    def __getitem__(self, samples: np.ndarray) -> Batch:
        tokens, labels, positions, documents = np.empty((4, len(samples), self.seq_len), np.int64)
        for row, sample in enumerate(samples.tolist()):
            start = max(sample, 0) * self.seq_len
            span = self.store.tokens[start : start + self.seq_len + 1]
            tokens[row], labels[row] = span[:-1], span[1:]
            if self.store.targets is not None:
                labels[row][self.store.targets[start + 1 : start + self.seq_len + 1] == 0] = IGNORE_INDEX
            if self.reset_positions:
                first = bisect_right(self.store.documents, start)
                last = bisect_right(self.store.documents, start + self.seq_len, lo=first)
                # Position in the sample, or right after it, at which each further document begins.
                boundaries = self.store.documents[first:last] - start
                # The last token of a document does not predict the first token of the next one.
                labels[row, boundaries - 1] = IGNORE_INDEX
                starts = np.append(0, boundaries)
                lengths = np.append(boundaries, self.seq_len) - starts
                positions[row] = np.arange(self.seq_len) - np.repeat(starts, lengths)
                documents[row] = np.repeat(np.arange(first - 1, last), lengths)
            if sample < 0:
                labels[row] = IGNORE_INDEX
        if not self.reset_positions:
            positions_and_documents = _one_document(labels.shape)
            return Batch(*map(torch.from_numpy, (tokens, labels)), *positions_and_documents, torch.from_numpy(samples))
        return Batch(*map(torch.from_numpy, (tokens, labels, positions, documents, samples)))


@functools.lru_cache(maxsize=4)
def _one_document(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return positions and document indices of a batch in which each sample counts as one document. The result is cached, because
    creating it takes as long as reading the tokens."""
    positions, documents = np.tile(np.arange(shape[1]), (shape[0], 1)), np.zeros(shape, np.int64)
    return torch.from_numpy(positions), torch.from_numpy(documents)


@dataclass(frozen=True)
class PackedSamples:
    """Samples that consist of spans of documents and padding. Documents are numbered from 0 in each sample."""

    store: TokenStore
    seq_len: int
    index: PackedIndex
    reset_positions: bool
    """Whether positions restart at 0 in each span."""

    def __len__(self) -> int:
        return len(self.index.samples) - 1

    def __getitem__(self, samples: np.ndarray) -> Batch:
        shape = (len(samples), self.seq_len)
        tokens, labels = np.full(shape, PADDING, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        positions, documents = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        for row, sample in enumerate(np.maximum(samples, 0)):
            spans = slice(*self.index.samples[sample : sample + 2].tolist())
            lengths = self.index.lengths[spans].astype(np.int64)
            token_index = concatenated_ranges(self.index.starts[spans], lengths)
            size = len(token_index)
            tokens[row, :size], labels[row, :size] = self.store.tokens[token_index], self.store.tokens[token_index + 1]
            if self.store.targets is not None:
                labels[row, :size][self.store.targets[token_index + 1] == 0] = IGNORE_INDEX
            positions[row, :size] = concatenated_ranges(0, lengths) if self.reset_positions else np.arange(size)
            documents[row, :size] = np.repeat(np.arange(len(lengths)), lengths)
        labels[samples < 0] = IGNORE_INDEX
        return Batch(*map(torch.from_numpy, (tokens, labels, positions, documents, samples)))

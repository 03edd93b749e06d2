"""Samples of fixed length from a token store. A sample is wrapped, packed, or contains one document."""

import functools
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trainer.batch import IGNORE_INDEX, Batch
from trainer.data.sampling.packing import PackedIndex
from trainer.data.store.store import TokenStore

PADDING = 0
"""Token id at positions outside all documents. These positions have no label and belong to document -1."""


class Samples(Protocol):
    """Indexed samples for training or evaluation."""

    def __len__(self) -> int: ...

    def batch(self, samples: np.ndarray) -> Batch:
        """Return samples. samples: their indices, shape (batch,); index -1 stands for a sample without targets."""


class ConcatSamples:
    """The concatenated tokens of all documents, split every seq_len tokens. Consecutive samples overlap by one token, so that
    every token except the first is the label of one position. An incomplete last sample is dropped."""

    def __init__(self, store: TokenStore, seq_len: int, reset_positions: bool):
        """reset_positions: whether positions restart at 0 in each document; if not, a sample counts as one document."""
        self.store = store
        self.seq_len = seq_len
        self.reset_positions = reset_positions

    def __len__(self) -> int:
        return max(0, len(self.store.tokens) - 1) // self.seq_len

    def batch(self, samples: np.ndarray) -> Batch:
        """See Samples."""
        starts = np.maximum(samples, 0) * self.seq_len
        tokens, labels = (np.empty((len(samples), self.seq_len), np.int64) for _ in range(2))
        targets = self.store.targets
        for row, start in enumerate(starts.tolist()):  # slicing a memory map is three times as fast as indexing
            span = slice(start, start + self.seq_len + 1)
            span_tokens = self.store.tokens[span]
            tokens[row], labels[row] = span_tokens[:-1], span_tokens[1:]
            if targets is not None:
                labels[row][targets[span][1:] == 0] = IGNORE_INDEX
        labels[samples < 0] = IGNORE_INDEX
        if not self.reset_positions:
            return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), *_one_document(labels.shape))
        documents = self._documents(starts)
        positions = np.arange(self.seq_len) - np.maximum(self.store.documents[documents] - starts[:, None], 0)
        # The last token of a document does not predict the first token of the next one.
        labels[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORE_INDEX
        offsets, ends = self.store.documents, starts + self.seq_len
        labels[:, -1][offsets[np.searchsorted(offsets, ends)] == ends] = IGNORE_INDEX
        return _batch(tokens, labels, positions, documents)

    def _documents(self, starts: np.ndarray) -> np.ndarray:
        """Return the document index of each token, shape (batch, seq). starts: index of each sample's first token."""
        offsets = self.store.documents
        first = np.searchsorted(offsets, starts, side="right") - 1
        counts = np.searchsorted(offsets, starts + self.seq_len, side="left") - first  # number of documents per sample
        before = np.cumsum(counts) - counts
        documents = np.repeat(first - before, counts) + np.arange(counts.sum())  # sample after sample
        start = np.repeat(starts, counts)
        lengths = np.minimum(offsets[documents + 1], start + self.seq_len) - np.maximum(offsets[documents], start)
        return np.repeat(documents, lengths).reshape(len(starts), self.seq_len)


@functools.lru_cache(maxsize=4)
def _one_document(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return positions and document indices of a batch whose samples each count as one document. The result is cached, because
    creating it takes as long as reading the tokens."""
    return torch.arange(shape[1]).repeat(shape[0], 1), torch.zeros(shape, dtype=torch.int64)


def _labels(store: TokenStore, index: np.ndarray) -> np.ndarray:
    """Return the int64 labels at these token indices: the token, or IGNORE_INDEX if it is not a target."""
    labels = store.tokens[index].astype(np.int64)
    if store.targets is not None:
        labels[store.targets[index] == 0] = IGNORE_INDEX
    return labels


def _batch(*arrays: np.ndarray) -> Batch:
    return Batch(*(torch.from_numpy(np.require(array, np.int64, ["C", "W"])) for array in arrays))


class PackedSamples:
    """Samples that consist of spans of documents and padding. Documents are numbered from 0 in each sample."""

    def __init__(self, store: TokenStore, seq_len: int, index: PackedIndex, reset_positions: bool):
        """reset_positions: whether positions restart at 0 in each span."""
        self.store = store
        self.seq_len = seq_len
        self.index = index
        self.reset_positions = reset_positions

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, samples: np.ndarray) -> Batch:
        """See Samples."""
        index = self.index
        shape = (len(samples), self.seq_len)
        tokens, labels = np.full(shape, PADDING, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        positions, documents = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        for row, sample in enumerate(np.maximum(samples, 0)):
            spans = slice(index.samples[sample], index.samples[sample + 1])
            lengths = index.lengths[spans].astype(np.int64)
            size = int(lengths.sum())
            span_starts = np.repeat(np.cumsum(lengths) - lengths, lengths)  # within the sample, for each position
            offsets = np.arange(size) - span_starts  # within the span
            positions[row, :size] = offsets if self.reset_positions else np.arange(size)
            token_index = np.repeat(index.starts[spans], lengths) + offsets
            tokens[row, :size] = self.store.tokens[token_index]
            if samples[row] >= 0:
                labels[row, :size] = _labels(self.store, token_index + 1)
            documents[row, :size] = np.repeat(np.arange(len(lengths)), lengths)
        return _batch(tokens, labels, positions, documents)

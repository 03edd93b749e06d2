"""Token store -> samples of a fixed length: documents in a row and cut, packed whole, or one by one."""

import functools
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trainer.batch import IGNORE_INDEX, Batch
from trainer.data.sampling.packing import PackedIndex
from trainer.data.store.store import TokenStore

PADDING = 0
"""The token at places that belong to no document; it is no target, and of no document that a target is of."""


class Samples(Protocol):
    """What is trained on or evaluated, by numbers from 0 on."""

    def __len__(self) -> int: ...

    def batch(self, samples: np.ndarray) -> Batch:
        """The samples of these numbers, (batch,); -1 gives a sample without targets."""


# ---------------------------------------------------------------- in a row, cut


class ConcatSamples:
    """The tokens of all documents in a row, cut at every seq_len. Samples overlap by one token, so that each token but
    the first of the store is the label of one position; the tail that fills no sample is left out."""

    def __init__(self, store: TokenStore, seq_len: int, reset_positions: bool):
        """reset_positions: positions, at each document; else a sample is one document."""
        self.store = store
        self.seq_len = seq_len
        self.reset_positions = reset_positions

    def __len__(self) -> int:
        return max(0, len(self.store.tokens) - 1) // self.seq_len

    def batch(self, samples: np.ndarray) -> Batch:
        """See Samples."""
        begins = np.maximum(samples, 0) * self.seq_len
        tokens, labels = (np.empty((len(samples), self.seq_len), np.int64) for _ in range(2))
        targets = self.store.targets
        for row, begin in enumerate(begins.tolist()):  # stretches of the store: read as such, they cost a third
            stretch = slice(begin, begin + self.seq_len + 1)
            read = self.store.tokens[stretch]
            tokens[row], labels[row] = read[:-1], read[1:]
            if targets is not None:
                labels[row][targets[stretch][1:] == 0] = IGNORE_INDEX
        labels[samples < 0] = IGNORE_INDEX
        if not self.reset_positions:
            return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), *_one_document(labels.shape))
        documents = self._documents(begins)
        positions = np.arange(self.seq_len) - np.maximum(self.store.documents[documents] - begins[:, None], 0)
        # What follows the end of a document is another one's beginning.
        labels[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORE_INDEX
        offsets, behind = self.store.documents, begins + self.seq_len
        labels[:, -1][offsets[np.searchsorted(offsets, behind)] == behind] = IGNORE_INDEX
        return _batch(tokens, labels, positions, documents)

    def _documents(self, begins: np.ndarray) -> np.ndarray:
        """Number of the document of each token of the samples that begin there, (batch, seq)."""
        offsets = self.store.documents
        first = np.searchsorted(offsets, begins, side="right") - 1
        counts = np.searchsorted(offsets, begins + self.seq_len, side="left") - first  # of documents in each sample
        before = np.cumsum(counts) - counts
        numbers = np.repeat(first - before, counts) + np.arange(counts.sum())  # of the documents, sample after sample
        begin = np.repeat(begins, counts)
        lengths = np.minimum(offsets[numbers + 1], begin + self.seq_len) - np.maximum(offsets[numbers], begin)
        return np.repeat(numbers, lengths).reshape(len(begins), self.seq_len)


@functools.lru_cache(maxsize=4)
def _one_document(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Positions and documents, the same for every batch of that shape: to write them anew takes as long as to read the tokens."""
    return torch.arange(shape[1]).repeat(shape[0], 1), torch.zeros(shape, dtype=torch.int64)


def _labels(store: TokenStore, places: np.ndarray) -> np.ndarray:
    """int64: the tokens there, where they are targets."""
    labels = store.tokens[places].astype(np.int64)
    if store.targets is not None:
        labels[store.targets[places] == 0] = IGNORE_INDEX
    return labels


def _batch(*arrays: np.ndarray) -> Batch:
    return Batch(*(torch.from_numpy(np.require(array, np.int64, ["C", "W"])) for array in arrays))


# ---------------------------------------------------------------- pieces


class PackedSamples:
    """Samples that are made of pieces, filled up with padding. Documents are numbered in each sample anew."""

    def __init__(self, store: TokenStore, seq_len: int, pieces: PackedIndex, reset_positions: bool):
        """reset_positions: positions, at each piece."""
        self.store = store
        self.seq_len = seq_len
        self.pieces = pieces
        self.reset_positions = reset_positions

    def __len__(self) -> int:
        return len(self.pieces)

    def batch(self, samples: np.ndarray) -> Batch:
        """See Samples."""
        pieces = self.pieces
        shape = (len(samples), self.seq_len)
        tokens, labels = np.full(shape, PADDING, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        positions, documents = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        for row, sample in enumerate(np.maximum(samples, 0)):
            mine = slice(pieces.samples[sample], pieces.samples[sample + 1])
            lengths = pieces.lengths[mine].astype(np.int64)
            size = int(lengths.sum())
            begins = np.repeat(np.cumsum(lengths) - lengths, lengths)  # of each position's piece, in the sample
            inside = np.arange(size) - begins
            positions[row, :size] = inside if self.reset_positions else np.arange(size)
            places = np.repeat(pieces.starts[mine], lengths) + inside
            tokens[row, :size] = self.store.tokens[places]
            if samples[row] >= 0:
                labels[row, :size] = _labels(self.store, places + 1)
            documents[row, :size] = np.repeat(np.arange(len(lengths)), lengths)
        return _batch(tokens, labels, positions, documents)

"""Token store -> samples of a fixed length."""

import functools

import numpy as np
import torch
from torch import Tensor

from trainer.batch import IGNORED, Batch
from trainer.data.store import TokenStore


@functools.lru_cache(maxsize=4)
def _positions(batch: int, seq_len: int) -> Tensor:
    """(batch, seq), the same for every batch of that shape, and never written to. Not restarted at each document, since
    attention reaches across them."""
    return torch.arange(seq_len).repeat(batch, 1)


class WrappedSamples:
    """The tokens of all documents in a row, cut at every seq_len. Samples overlap by one token, so that each token but
    the first of the store is the label of one position; the tail that fills no sample is left out."""

    def __init__(self, store: TokenStore, seq_len: int):
        self.store = store
        self.seq_len = seq_len

    def __len__(self) -> int:
        return max(0, len(self.store.tokens) - 1) // self.seq_len

    def batch(self, samples: np.ndarray) -> Batch:
        """The samples of these numbers, (batch,); -1 gives a sample without targets."""
        tokens, labels = (np.empty((len(samples), self.seq_len), np.int64) for _ in range(2))
        begins = np.maximum(samples, 0) * self.seq_len
        for row, begin in enumerate(
            begins.tolist()
        ):  # rows are stretches of the store: read as such, they cost a third
            stretch = self.store.tokens[begin : begin + self.seq_len + 1]
            tokens[row], labels[row] = stretch[:-1], stretch[1:]
        labels[samples < 0] = IGNORED
        return Batch(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(labels),
            positions=_positions(len(samples), self.seq_len),
            documents=torch.from_numpy(self._documents(begins)),
        )

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

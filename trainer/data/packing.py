"""Token store -> samples of a fixed length."""

import numpy as np
import torch
from torch import Tensor

from trainer.batch import IGNORED, Batch
from trainer.data.store import TokenStore


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
        rows = np.maximum(samples, 0)[:, None] * self.seq_len + np.arange(self.seq_len + 1)  # (batch, seq + 1)
        tokens = torch.from_numpy(self.store.tokens[rows].astype(np.int64))
        documents = np.searchsorted(self.store.documents, rows[:, :-1], side="right") - 1
        labels = tokens[:, 1:].clone()
        labels[torch.from_numpy(samples < 0)] = IGNORED
        return Batch(
            tokens=tokens[:, :-1].contiguous(),
            labels=labels,
            positions=self._positions(len(samples)),
            documents=torch.from_numpy(documents),
        )

    def _positions(self, batch: int) -> Tensor:
        # Not restarted at each document, since attention reaches across them.
        return torch.arange(self.seq_len).repeat(batch, 1)

"""Requests of tasks, packed into samples as documents. Requests of one question that have the same context share its computation.

A document is one continuation: its tokens are the last token of the context and the continuation without its last token, and its
targets are the continuation. The other tokens of the context stand before the documents that share them, and have no target. A
token is read by the tokens of its own document and, if it is a part of a context, by those of all documents that share it. So the
result of a request does not depend on what else stands in the sample.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from trainer.batch import IGNORE_INDEX, Batch
from trainer.data.tasks.encode import Request


class _Unit(NamedTuple):
    """Requests that share a context without its last token."""

    shared: tuple[int, ...]
    requests: list[int]
    """Indices of the requests."""
    length: int


@dataclass(frozen=True)
class PackedRequests:
    """Samples of seq_len tokens that contain each different request of a question once. They depend neither on the layout nor on
    the batch size."""

    requests: Sequence[Request]
    seq_len: int
    rows: list[list[_Unit]]
    copies: list[tuple[int, int]]
    """(index, index of an equal request of the same question, which is in a sample in its place). Two documents would differ in
    the last bit, and so decide between equal choices."""

    @classmethod
    def pack(
        cls, questions: Sequence[Sequence[Request]], seq_len: int, shares_contexts: bool = True
    ) -> "PackedRequests":
        """Pack the requests of questions.

        Args:
            questions: Requests of each question. None has more than seq_len tokens for the model to read.
            seq_len: Length of a sample in tokens.
            shares_contexts: Whether several documents may continue one context. A recurrence cannot: its state passes from one
                document to the next.
        """
        requests = [request for question in questions for request in question]
        rows: list[list[_Unit]] = []
        copies: list[tuple[int, int]] = []
        free: list[tuple[int, int]] = []  # (tokens left, row), sorted
        first = 0
        for question in questions:
            indices = range(first, first := first + len(question))
            original = {requests[i]: i for i in reversed(indices)}
            copies += [(i, original[requests[i]]) for i in indices if original[requests[i]] != i]
            own = [i for i in indices if original[requests[i]] == i and requests[i].continuation]
            for unit in _units(requests, own, seq_len if shares_contexts else 0):
                place = bisect.bisect_left(free, (unit.length, -1))  # the row that is filled best
                left, row = free.pop(place) if place < len(free) else (seq_len, len(rows))
                if row == len(rows):
                    rows.append([])
                rows[row].append(unit)
                bisect.insort(free, (left - unit.length, row))
        return cls(requests, seq_len, rows, copies)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the model reads, without padding."""
        return sum(unit.length for row in self.rows for unit in row)

    @property
    def num_documents(self) -> int:
        """Maximum number of documents of a sample."""
        return max((len(self.of_row(row)) for row in range(len(self))), default=1)

    def of_row(self, row: int) -> list[int]:
        """Return the indices of the requests in a sample, in the order of its documents."""
        return [index for unit in self.rows[row] for index in unit.requests]

    def __getitem__(self, rows: np.ndarray) -> Batch:
        """Return samples as a batch. Index -1 is a sample of padding."""
        shape = len(rows), self.seq_len
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        labels, documents = np.full(shape, IGNORE_INDEX, np.int64), np.full(shape, -1, np.int64)
        last_readers = np.tile(np.arange(self.seq_len), (len(rows), 1))  # padding is read by itself only
        for row, index in enumerate(rows.tolist()):
            start = document = 0
            for unit in self.rows[index] if index >= 0 else ():
                num_shared, first, end = len(unit.shared), start, start + unit.length
                tokens[row, start : start + num_shared] = unit.shared
                positions[row, start : start + num_shared] = np.arange(num_shared)
                last_readers[row, start : start + num_shared] = end - 1
                documents[row, first:end] = document
                start += num_shared
                for i in unit.requests:
                    own = (*self.requests[i].context[num_shared:], *self.requests[i].continuation)
                    stop, targets = start + len(own) - 1, self.requests[i].continuation
                    tokens[row, start:stop] = own[:-1]
                    positions[row, start:stop] = num_shared + np.arange(stop - start)
                    labels[row, stop - len(targets) : stop] = targets
                    documents[row, start:stop] = document
                    last_readers[row, start:stop] = stop - 1
                    start, document = stop, document + 1
        arrays = tokens, labels, positions, documents, np.arange(len(rows))
        return Batch(*map(torch.from_numpy, arrays), last_readers=torch.from_numpy(last_readers))


def _units(requests: Sequence[Request], indices: list[int], longest: int) -> list[_Unit]:
    """Return the requests of one question as units: one for all with the same context, if it is not longer than `longest`."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in indices:
        groups.setdefault(requests[i].context[:-1], []).append(i)
    units = []
    for shared, members in groups.items():
        length = len(shared) + sum(len(requests[i].continuation) for i in members)
        if len(members) > 1 and length <= longest:
            units.append(_Unit(shared, members, length))
        else:
            units += [_Unit((), [i], len(shared) + len(requests[i].continuation)) for i in members]
    return units

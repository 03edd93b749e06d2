"""Readout of the log-probability of every document, and of whether a greedy choice of tokens would write it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.spec import Head
from trainer.batch import Batch
from trainer.data.sampling.loader import BatchPartition, evaluation_batches
from trainer.data.tasks.packed_requests import PackedRequests
from trainer.objective.cross_entropy import token_log_probs


def sum_by_document(values: Tensor, documents: Tensor, num_documents: int) -> Tensor:
    """Return the sums of the values of each document, (batch, num_documents).

    Args:
        values: (batch, seq).
        documents: (batch, seq). Negative: outside all documents.
        num_documents: Maximum number of documents of a sample.
    """
    index = documents.where(documents >= 0, num_documents)  # positions outside all documents are last
    sums = values.new_zeros(len(values), num_documents + 1)
    return sums.scatter_add(1, index.clamp(max=num_documents), values)[:, :num_documents]


class Scores(NamedTuple):
    """Scores of the documents of the samples of all ranks. A document without targets has the log-probability 0."""

    log_probs: Tensor
    """Log-probability of the targets, (samples, documents), fp32."""
    is_greedy: Tensor
    """Whether each target is the most likely token, (samples, documents), boolean. Of several equal ones, any is."""


@dataclass(frozen=True, kw_only=True)
class DocumentScores:
    num_documents: int
    """Maximum number of documents of a sample."""
    partition: BatchPartition
    chunk_tokens: int
    compiled: bool
    """See CrossEntropyHead."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.partition.ranks, self.partition.local_batch_size, self.num_documents, 2

    def head(self, labels: Tensor, documents: Tensor, reference: Tensor | None) -> Head:
        def head(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
            scores = token_log_probs(labels, hidden, weight, softcap, self.chunk_tokens, self.compiled)
            log_probs, is_likeliest = scores
            # The sum over all ranks contains the samples of all ranks, and all tokens of each sample.
            result = log_probs.new_zeros(self.shape)
            values = log_probs, (~is_likeliest).float()
            sums = [sum_by_document(value, documents, self.num_documents) for value in values]
            result[self.partition.rank] = torch.stack(sums, dim=-1)
            return result

        return head

    def scores(self, total: Tensor) -> Scores:
        """Return the scores in the sum of the heads' results over all ranks."""
        log_probs, num_others = total.cpu().view(-1, self.num_documents, 2).unbind(-1)
        return Scores(log_probs, num_others == 0)


class RequestScores(NamedTuple):
    """Scores of requests, each (requests,)."""

    log_probs: np.ndarray
    """Log-probability of each continuation, fp64. That of a continuation without tokens is 0."""
    is_greedy: np.ndarray
    """Whether each of its tokens is the most likely one, boolean."""
    is_done: np.ndarray
    """Whether both are known, boolean."""


def score_requests(
    packed: PackedRequests,
    read: Callable[[Batch, DocumentScores], Tensor],
    partition: BatchPartition,
    chunk_tokens: int,
    compiled: bool,
    device: torch.device,
    loading: Callable[[], AbstractContextManager[None]] = nullcontext,
    is_late: Callable[[], bool] = lambda: False,
) -> RequestScores:
    """Return the scores of all requests, the same on all ranks of the partition.

    Args:
        packed: The requests.
        read: Runs the model forward, with attention that ends at document boundaries, and returns the sum of a readout over all
            ranks.
        partition: Which rank reads which samples.
        chunk_tokens: See CrossEntropyHead.
        compiled: See CrossEntropyHead.
        device: Device of the batches.
        loading: Context manager in which a batch is made.
        is_late: Whether no further batch is begun.
    """
    size = partition.ranks * partition.local_batch_size
    readout = DocumentScores(
        num_documents=packed.num_documents, partition=partition, chunk_tokens=chunk_tokens, compiled=compiled
    )
    # A continuation without tokens is in no sample.
    is_done = np.array([not request.continuation for request in packed.requests], bool)
    log_probs, is_greedy = np.zeros(len(is_done)), is_done.copy()
    batches = evaluation_batches(packed, len(packed), partition)
    for first in range(0, len(packed), size):
        if first and is_late():
            break
        with loading():
            batch = next(batches).to(device)
        scores = readout.scores(read(batch, readout))
        for row in range(first, min(first + size, len(packed))):
            documents = packed.of_row(row)
            log_probs[documents] = scores.log_probs[row - first, : len(documents)].numpy()
            is_greedy[documents] = scores.is_greedy[row - first, : len(documents)].numpy()
            is_done[documents] = True
    for index, same in packed.copies:
        log_probs[index], is_greedy[index], is_done[index] = log_probs[same], is_greedy[same], is_done[same]
    return RequestScores(log_probs, is_greedy, is_done)

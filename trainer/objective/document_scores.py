"""Readout of the log-probability of every document, and of whether a greedy choice of tokens would write it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.spec import Head
from trainer.data.sampling.loader import BatchPartition
from trainer.objective.cross_entropy import token_log_probs
from trainer.objective.preference import sum_by_document


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

"""Texts from the model in training, in any layout.

Each new token is one forward of the training step over complete sequences, without a cache of keys and values. The parameters
stay where training has them, so FSDP, tensor, pipeline and context parallelism need no code of their own, and nothing that
training uses changes: neither parameters nor random generators.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.batch import IGNORE_INDEX, Batch
from trainer.data.sampling.loader import BatchPartition
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.inference.engine import Answer, TextRequest, generate
from trainer.inference.next_logits import READ_HERE, NextLogits
from trainer.parallel.step import Step

Loading = Callable[[], AbstractContextManager[None]]
"""Returns the context manager in which a batch is made."""
_LOGITS_AT_ONCE = 2**26
"""Maximum number of logits that are summed over all ranks for one token of each text."""


@dataclass(frozen=True, kw_only=True)
class TrainingGenerator:
    """Generator of texts in training. A forward has one text in each row of the microbatches of all data-parallel ranks."""

    tokenizer: Tokenizer
    stop_tokens: frozenset[int]
    """Tokens that end a text."""
    partition: BatchPartition
    """This rank's rows."""
    device: torch.device
    seq_len: int
    """Length of the sequences of training, which a prompt and its text do not exceed."""
    vocab_size: int
    """Number of rows of the output weight."""

    @property
    def max_rows(self) -> int:
        """Maximum number of texts in one forward."""
        rows = self.partition.ranks * self.partition.local_batch_size
        return max(1, min(rows, _LOGITS_AT_ONCE // self.vocab_size))

    def generate(self, requests: Sequence[TextRequest], step: Step, loading: Loading) -> list[Answer]:
        """Return the answer to each request, collectively over all ranks.

        Args:
            requests: The same on all ranks. Their prompts are shorter than seq_len.
            step: The step of training, or of evaluation.
            loading: Context manager in which a batch is made.
        """
        return generate(requests, _TrainingBackend(self, step, loading), self.tokenizer)


class _TrainingBackend:
    """A Backend of the engine."""

    def __init__(self, generator: TrainingGenerator, step: Step, loading: Loading):
        self.generator, self.step, self.loading = generator, step, loading
        self.max_rows, self.max_seq_len, self.group = generator.max_rows, generator.seq_len, dist.group.WORLD

    def next_logits(self, rows: Mapping[int, Sequence[int]]) -> Tensor:
        """See Backend."""
        partition = self.generator.partition
        shape = max(rows) + 1, self.generator.vocab_size
        readout = NextLogits(shape=shape, first_row=partition.rank * partition.local_batch_size)
        with self.loading():
            batch = self._batch(rows, readout.first_row)
        return self.step.read([batch], readout).reshape(shape)[list(rows)]

    def _batch(self, rows: Mapping[int, Sequence[int]], first_row: int) -> Batch:
        """Return this rank's microbatch of its rows. Rows without a text have no label."""
        size = self.generator.partition.local_batch_size
        tokens = torch.zeros(size, self.max_seq_len, dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORE_INDEX)
        for i in range(size):
            if text := rows.get(first_row + i):
                tokens[i, : len(text)] = torch.tensor(text)
                labels[i, len(text) - 1] = READ_HERE
        positions = torch.arange(self.max_seq_len).repeat(size, 1)
        return Batch(tokens, labels, positions, torch.zeros_like(tokens), torch.arange(size)).to(self.generator.device)

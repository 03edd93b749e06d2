"""Texts that the model in training generates from given prompts, in any layout.

Each new token is one forward of the training step over complete sequences, without a cache of keys and values. The parameters
stay where training has them, so FSDP, tensor, pipeline and context parallelism need no code of their own, and nothing that
training uses changes: neither parameters nor random generators.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.spec import Head
from trainer.base.config import ConfigError, DataConfig, SamplesConfig
from trainer.batch import IGNORE_INDEX, Batch
from trainer.data.prepare.encode import chat_format
from trainer.data.sampling.loader import BatchPartition
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.inference.generate import Sampling, TextStream, sample
from trainer.parallel.step import Step
from trainer.runtime.distributed import run_on_rank_0
from trainer.state import is_due

NON_FINITE = "(the model returns non-finite logits)"
"""End of a text that the model cannot continue."""
_READ_HERE = 0
"""Label of the position whose logits are read. All other positions have no label."""


@dataclass(frozen=True, kw_only=True)
class NextLogits:
    """Readout of the logits at the marked position of each row, of which a microbatch has at most one."""

    shape: tuple[int, int]
    """(rows of all ranks, vocabulary)."""
    first_row: int
    """Index of this rank's first row."""

    def head(self, labels: Tensor, documents: Tensor, reference: Tensor | None) -> Head:
        def head(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
            first_token, group = 0, None
            if isinstance(weight, DTensor):
                mesh = weight.device_mesh
                group = mesh.get_group()
                first_token = -(-weight.shape[0] // mesh.size()) * mesh.get_local_rank()
                hidden, weight = hidden.to_local(), weight.to_local()
            rows, positions = (labels == _READ_HERE).nonzero(as_tuple=True)
            logits = F.linear(
                hidden[rows, positions], weight.to(hidden.dtype)
            ).float()  # (marked rows, tokens on this rank)
            if softcap is not None:
                logits = softcap * (logits / softcap).tanh()
            result = logits.new_zeros(self.shape)
            result[self.first_row + rows, first_token : first_token + logits.shape[1]] = logits
            if group is not None:
                dist.all_reduce(result, group=group)
            return result

        return head


@dataclass(frozen=True, kw_only=True)
class SampleGenerator:
    """Generator of one text for each prompt, at intervals and after the last step."""

    config: SamplesConfig
    prompts: list[list[int]]
    """Tokens of each prompt, fewer than seq_len."""
    is_chat: bool
    """Whether each prompt is a conversation, of which a text is the next message."""
    tokenizer: Tokenizer
    stop: frozenset[int]
    """Tokens that end a text."""
    vocab_size: int
    """Number of rows of the output weight."""
    seq_len: int
    """Length of the sequences of training, which the prompt and the text do not exceed."""
    partition: BatchPartition
    device: torch.device
    steps: int
    """Total number of steps in the run."""

    def due(self, step: int) -> bool:
        return bool(self.prompts) and is_due(step, self.config.interval_steps, self.steps)

    def run(self, step: Step, loading: Callable[[], AbstractContextManager[None]]) -> list[dict[str, str]]:
        """Return each prompt and its text, collectively. loading: context manager in which a batch is made."""
        size = self.partition.ranks * self.partition.local_batch_size
        texts: list[str] = []
        for first in range(0, len(self.prompts), size):
            texts += self._texts(self.prompts[first : first + size], step, loading)
        return [{"prompt": p, "text": text} for p, text in zip(self.config.prompts, texts, strict=True)]

    def _texts(
        self, prompts: Sequence[list[int]], step: Step, loading: Callable[[], AbstractContextManager[None]]
    ) -> list[str]:
        """Continue the prompts, one in each row of the global microbatch."""
        first_row = self.partition.rank * self.partition.local_batch_size
        readout = NextLogits(shape=(len(prompts), self.vocab_size), first_row=first_row)
        rows, ended = [list(prompt) for prompt in prompts], [False] * len(prompts)
        generators = [torch.Generator().manual_seed(self.config.seed) for _ in prompts]
        while not all(ended):
            with loading():
                batch = self._batch(rows[first_row : first_row + self.partition.local_batch_size])
            logits = step.read([batch], readout).reshape(readout.shape)[:, : self.tokenizer.vocab_size].double().cpu()
            # By one rank: processors differ in the last bit of a softmax.
            for i, token in enumerate(run_on_rank_0(lambda: self._sample(logits, ended, generators))):  # noqa: B023
                if ended[i]:
                    continue
                if token is not None:
                    rows[i].append(token)
                new = len(rows[i]) - len(prompts[i])
                is_full = new == self.config.max_new_tokens or len(rows[i]) == self.seq_len
                ended[i] = token is None or token in self.stop or is_full
            is_finite = logits.isfinite().all(1).tolist()
        return [self._text(*row) for row in zip(prompts, rows, is_finite, strict=True)]

    def _sample(self, logits: Tensor, ended: Sequence[bool], generators: Sequence[torch.Generator]) -> list[int | None]:
        """Return the next token of each row, or None if it has ended or cannot continue."""
        config = self.config
        sampling = Sampling(config.temperature, config.top_k, config.top_p)
        return [
            None if done or not row.isfinite().all() else sample(row, sampling, generator)
            for row, done, generator in zip(logits, ended, generators, strict=True)
        ]

    def _batch(self, rows: Sequence[list[int]]) -> Batch:
        """Return this rank's microbatch of its rows. Rows without a prompt have no label."""
        size = self.partition.local_batch_size
        tokens = torch.zeros(size, self.seq_len, dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORE_INDEX)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
            labels[i, len(row) - 1] = _READ_HERE
        positions = torch.arange(self.seq_len).repeat(size, 1)
        return Batch(tokens, labels, positions, torch.zeros_like(tokens), torch.arange(size)).to(self.device)

    def _text(self, prompt: list[int], row: list[int], is_finite: bool) -> str:
        """Return the text after the prompt, without the token that ends it."""
        stream = TextStream(self.tokenizer, [] if self.is_chat else prompt[len(self.tokenizer.prefix) :])
        new = [token for token in row[len(prompt) :] if token not in self.stop]
        return "".join([*map(stream.put, new), stream.rest(), "" if is_finite else NON_FINITE])


def encode_prompts(
    config: SamplesConfig, data: DataConfig, tokenizer: Tokenizer, is_chat: bool, seq_len: int
) -> list[list[int]]:
    """Return the tokens of each prompt, collectively.

    Args:
        config: Settings of the samples.
        data: Settings of the training data, which name the chat template.
        tokenizer: Tokenizer of the run.
        is_chat: Whether the run trains on conversations, so that each prompt is a message of a user.
        seq_len: Length of the sequences in training.

    Raises:
        ConfigError: A prompt is empty, or leaves no room for a token.
    """

    def encode() -> list[list[int]]:
        if is_chat:
            chat = chat_format(data, tokenizer)
            return [chat.prompt([{"role": "user", "content": text}]) for text in config.prompts]
        return [[*tokenizer.prefix, *tokenizer.encode(text)] for text in config.prompts]

    prompts = run_on_rank_0(encode) if config.prompts else []
    for text, prompt in zip(config.prompts, prompts, strict=True):
        if not prompt:
            message = (
                "a prompt must not be empty, because the tokenizer adds no BOS token, so that the model has no input"
            )
            raise ConfigError("samples.prompts", message)
        if len(prompt) >= seq_len:
            message = (
                f"the prompt {text[:40]!r} has {len(prompt)} tokens, but [training] seq_len = {seq_len} must be larger"
            )
            raise ConfigError("samples.prompts", message)
    return prompts

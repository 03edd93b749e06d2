"""Texts that the model in training generates from given prompts."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from trainer.base.config import ConfigError, DataConfig, SamplesConfig
from trainer.data.prepare.encode import chat_format
from trainer.data.sampling.loader import BatchPartition
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.inference.engine import NON_FINITE, Request, Sampling
from trainer.inference.in_training import generate_in_training
from trainer.parallel.step import Step
from trainer.runtime.distributed import run_on_rank_0
from trainer.state import is_due


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
        requests = [self._request(prompt) for prompt in self.prompts]
        answers = generate_in_training(
            requests, step, self.partition, self.device, loading, self.tokenizer, self.seq_len, self.vocab_size
        )
        texts = [answer.text + (NON_FINITE if answer.end == "non-finite" else "") for answer in answers]
        return [{"prompt": p, "text": text} for p, text in zip(self.config.prompts, texts, strict=True)]

    def _request(self, prompt: list[int]) -> Request:
        config = self.config
        return Request(
            prompt=prompt,
            sampling=Sampling(config.temperature, config.top_k, config.top_p),
            seed=config.seed,
            stop_tokens=self.stop,
            max_new_tokens=config.max_new_tokens,
            continues=[] if self.is_chat else prompt[len(self.tokenizer.prefix) :],
        )


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

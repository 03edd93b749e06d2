"""Texts that the model in training generates from given prompts."""

from dataclasses import dataclass

from trainer.base.config import ConfigError, DataConfig, SamplesConfig
from trainer.data.prepare.encode import chat_format
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.inference.engine import NON_FINITE, Sampling, TextRequest
from trainer.inference.in_training import Loading, TrainingGenerator
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
    generator: TrainingGenerator
    steps: int
    """Total number of steps in the run."""

    def due(self, step: int) -> bool:
        return bool(self.prompts) and is_due(step, self.config.interval_steps, self.steps)

    def run(self, step: Step, loading: Loading) -> list[dict[str, str]]:
        """Return each prompt and its text, collectively. See TrainingGenerator.generate."""
        requests = [self._request(prompt) for prompt in self.prompts]
        answers = self.generator.generate(requests, step, loading)
        texts = [answer.text + (NON_FINITE if answer.end == "non-finite" else "") for answer in answers]
        return [{"prompt": p, "text": text} for p, text in zip(self.config.prompts, texts, strict=True)]

    def _request(self, prompt: list[int]) -> TextRequest:
        config = self.config
        return TextRequest(
            prompt=prompt,
            sampling=Sampling(config.temperature, config.top_k, config.top_p),
            seed=config.seed,
            stop_tokens=self.generator.stop_tokens,
            max_new_tokens=config.max_new_tokens,
            continues=[] if self.is_chat else prompt[len(self.generator.tokenizer.prefix) :],
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

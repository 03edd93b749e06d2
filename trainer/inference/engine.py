"""The one way to make text from a model: requests in batches, whatever computes the logits.

Each request has its own random numbers, and the logits of a text do not depend on the others beyond rounding. So a text is the
same alone and in any batch, unless two tokens are as likely up to rounding.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data.tokenizer.protocol import Tokenizer
from trainer.inference.text import StoppedText, TextStream

End = Literal["token", "string", "length", "non-finite"]
"""Why a text ends: a token or a string that ends texts, no room for a further token, or logits that are not finite."""

NON_FINITE = "(the model returns non-finite logits)"
"""What is shown at the end of a text that the model cannot continue."""
_NO_TOKEN = -1
"""In place of a token that cannot be chosen."""


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. They are applied in the order of the fields."""

    temperature: float = 0.8
    """Divisor of the logits. 0 selects the most likely token."""
    top_k: int = 0
    """Number of most likely tokens from which the next token is sampled. 0 disables this filter."""
    top_p: float = 1.0
    """Total probability of the most likely tokens from which the next is sampled (Holtzman et al. 2020, arXiv:1904.09751)."""


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample a token. logits: fp64, shape (vocabulary,), on the CPU so that the random numbers do not depend on the device."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / sampling.temperature  # at most 0, so that a low temperature cannot overflow
    ordered, tokens = scaled.sort(descending=True, stable=True)
    if sampling.top_k:
        ordered, tokens = ordered[: sampling.top_k], tokens[: sampling.top_k]
    probs = ordered.softmax(0)
    preceding = probs.cumsum(0) - probs
    probs = probs.masked_fill(preceding >= sampling.top_p, 0.0)  # this never removes the first token
    return int(tokens[torch.multinomial(probs, 1, generator=generator)])


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A text to generate."""

    prompt: Sequence[int]
    """Tokens before the text, at least one."""
    sampling: Sampling = Sampling()
    seed: int = 0
    stop_tokens: Collection[int] = ()
    """Tokens that end the text."""
    stop: Sequence[str] = ()
    """Strings before which the text ends."""
    max_new_tokens: int = 256
    continues: Sequence[int] = ()
    """Tokens of the prompt whose text goes on, which decide whether the new text begins with a space. Empty in a chat."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A generated text."""

    tokens: list[int]
    """All new tokens, with those that end the text."""
    text: str
    """Without the token or the string that ends it."""
    end: End


class Backend(Protocol):
    """What computes the logits of the next token. All ranks call it together."""

    max_rows: int
    """Largest number of texts in a batch."""
    max_seq_len: int
    """Largest number of tokens of a text and its prompt."""
    group: dist.ProcessGroup | None
    """Ranks that must choose the same tokens. None: this one alone."""

    def next_logits(self, rows: Mapping[int, Sequence[int]]) -> Tensor:
        """Return logits of each row's next token, (rows, at least the tokenizer's vocabulary).

        Args:
            rows: Index of a text in its batch -> its prompt and its new tokens. Each call has one more token in each row. Texts
                that have ended are missing.
        """


def generate(
    requests: Sequence[TextRequest],
    backend: Backend,
    tokenizer: Tokenizer,
    on_text: Callable[[int, str], None] = lambda index, text: None,
) -> list[Answer]:
    """Return the answer to each request. Prompts of similar lengths share a batch.

    Args:
        requests: Their prompts are shorter than backend.max_seq_len.
        backend: Computes the logits.
        tokenizer: Of the model.
        on_text: Called with the index of a request and the characters that its text has grown by.
    """
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt), reverse=True)
    answers: dict[int, Answer] = {}
    for first in range(0, len(order), backend.max_rows):
        batch = order[first : first + backend.max_rows]
        texts = [_Text(requests[i], tokenizer, backend.max_seq_len) for i in batch]
        while active := {row: text for row, text in enumerate(texts) if text.end is None}:
            logits = backend.next_logits({row: text.tokens for row, text in active.items()})
            tokens = _choose(logits[:, : tokenizer.vocab_size], list(active.values()), backend.group)
            for (row, text), token in zip(active.items(), tokens, strict=True):
                if new := text.put(token):
                    on_text(batch[row], new)
        answers |= {i: text.answer() for i, text in zip(batch, texts, strict=True)}
    return [answers[i] for i in range(len(requests))]


def _choose(logits: Tensor, texts: Sequence["_Text"], group: dist.ProcessGroup | None) -> list[int]:
    """Return the next token of each text. One rank chooses, because processors differ in the last bit of a softmax. logits:
    (texts, vocabulary)."""
    chosen: list[int] = []
    if group is None or group.rank() == 0:
        likeliest, is_finite = logits.argmax(-1).tolist(), logits.isfinite().all(-1).tolist()
        rows = zip(texts, logits, likeliest, is_finite, strict=True)
        chosen = [text.choose(row, token) if finite else _NO_TOKEN for text, row, token, finite in rows]
    if group is None or group.size() == 1:
        return chosen
    tokens = torch.tensor(chosen or [_NO_TOKEN] * len(texts), device=logits.device)
    dist.broadcast(tokens, group=group, group_src=0)
    return tokens.tolist()


class _Text:
    """The state of a text in progress."""

    def __init__(self, request: TextRequest, tokenizer: Tokenizer, max_seq_len: int):
        self.request = request
        self.tokens = list(request.prompt)
        self.end: End | None = None
        self._generator = torch.Generator().manual_seed(request.seed)
        self._stream = TextStream(tokenizer, request.continues)
        self._stopped = StoppedText(request.stop)
        self._text = ""
        self._max_tokens = min(len(self.tokens) + request.max_new_tokens, max_seq_len)

    def choose(self, logits: Tensor, likeliest: int) -> int:
        """Return the next token.

        Args:
            logits: (vocabulary,), finite.
            likeliest: The token with the largest one.
        """
        sampling = self.request.sampling
        if sampling.temperature == 0:  # for all texts at once, on the device
            return likeliest
        return sample(logits.cpu().double(), sampling, self._generator)

    def put(self, token: int) -> str:
        """Add a token. Return the characters that the text has grown by."""
        if token == _NO_TOKEN:
            return self._finish("non-finite")
        self.tokens.append(token)
        if token in self.request.stop_tokens:
            return self._finish("token")
        new = self._stopped.put(self._stream.put(token))
        self._text += new
        if self._stopped.has_stopped:
            self.end = "string"
        elif len(self.tokens) == self._max_tokens:
            new += self._finish("length")
        return new

    def _finish(self, end: End) -> str:
        """End the text. Return the characters that were withheld."""
        new = self._stopped.put(self._stream.rest())
        if self._stopped.has_stopped:
            end = "string"
        else:
            new += self._stopped.withheld
        self.end, self._text = end, self._text + new
        return new

    def answer(self) -> Answer:
        return Answer(tokens=self.tokens[len(self.request.prompt) :], text=self._text, end=self.end)

"""Tokens of the requests of tasks, by the rules of lm-evaluation-harness (Gao et al., version 0.4.13, TemplateLM), so that scores
are the same.

- The text is encoded as a whole, and split after as many tokens as the context alone has.
- White space at the end of a context belongs to the continuation.
- An empty context is one token: BOS, or EOS if the tokenizer has no BOS.
- BOS precedes other contexts if the tokenizer itself adds it.
- A request that is too long loses its first tokens.
- A continuation without text has no tokens; its log-probability is 0, and it is the most likely one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from trainer.data.tokenizer.protocol import Tokenizer


class Request(NamedTuple):
    context: tuple[int, ...]
    """At least one token, unless the continuation has none."""
    continuation: tuple[int, ...]


class RequestTooLong(Exception):
    """The reason why the model cannot read a request."""


@dataclass(frozen=True, kw_only=True)
class RequestEncoder:
    tokenizer: Tokenizer
    max_tokens: int
    """Maximum number of tokens that the model reads: of both parts, without the last token, which it only predicts."""
    render: Callable[[str], list[int]] | None
    """Encodes the message of a user up to the answer. None: contexts are plain text."""

    def __call__(self, context: str, continuation: str) -> Request:
        """Return the tokens of a request. In a chat, the template sets the boundary, so a continuation is encoded alone, without
        white space at its start. Raises RequestTooLong if the continuation is longer than max_tokens."""
        if context and self.render is not None:
            return self._fitted(self.render(context), self.tokenizer.encode(continuation.lstrip()))
        kept = context.rstrip()
        continuation, prefix = context[len(kept) :] + continuation, list(self.tokenizer.prefix)
        if not kept:
            return self._fitted([self._before_empty], self.tokenizer.encode(continuation))
        whole = prefix + self.tokenizer.encode(kept + continuation)
        before = prefix + self.tokenizer.encode(kept)
        return self._fitted(before, whole[len(before) :])

    def prompt(self, context: str, max_new_tokens: int) -> list[int]:
        """Return the tokens after which the model generates. Raises RequestTooLong if max_new_tokens leaves no room for them."""
        if (room := self.max_tokens - max_new_tokens) < 1:
            message = f"max_new_tokens = {max_new_tokens} leaves no room for a prompt"
            raise RequestTooLong(f"{message} in the {self.max_tokens} tokens of a request")
        if context and self.render is not None:
            return self.render(context)[-room:]
        return [*self.tokenizer.prefix, *self.tokenizer.encode(context)][-room:] or [self._before_empty]

    @property
    def _before_empty(self) -> int:
        return self.tokenizer.eos if self.tokenizer.bos is None else self.tokenizer.bos

    def _fitted(self, before: list[int], after: list[int]) -> Request:
        """Return a request that loses its first tokens if the model would read more than max_tokens."""
        if len(after) > self.max_tokens:
            message = f"a continuation has {len(after)} tokens, but a request has at most {self.max_tokens}"
            raise RequestTooLong(f"{message}; see max_seq_len and [training] seq_len")
        excess = max(0, len(before) + len(after) - 1 - self.max_tokens)
        return Request(tuple(before[excess:]), tuple(after))

"""Tokens of the requests of tasks, by the rules of lm-evaluation-harness (Gao et al., version 0.4.13, TemplateLM), so that scores
are the same.

- The text is encoded as a whole, and split after as many tokens as the context alone has.
- White space at the end of a context belongs to the continuation.
- An empty context is one token: BOS, or EOS if the tokenizer has no BOS. It is not doubled.
- BOS precedes other contexts if the tokenizer itself adds it.
- Names of special tokens in a text are these tokens.
- A request that is too long loses its first tokens.
- A continuation without text has no tokens; its log-probability is 0, and it is the most likely one.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from trainer.data.tokenizer.protocol import Tokenizer


class Request(NamedTuple):
    context: tuple[int, ...]
    """At least one token, unless the continuation has none."""
    continuation: tuple[int, ...]


def before_empty(tokenizer: Tokenizer) -> int:
    """Return the token that stands for an empty context."""
    return tokenizer.eos if tokenizer.bos is None else tokenizer.bos


def encode(tokenizer: Tokenizer, text: str, with_prefix: bool | None) -> list[int]:
    """Return the tokens of a text in which names of special tokens are these tokens. with_prefix: whether to prepend what the
    tokenizer prepends to a document. None: unless the text begins with it."""
    parts: list[str | int] = []
    end = 0
    for found in _special_names(tuple(tokenizer.special_tokens)).finditer(text):
        parts += [text[end : found.start()], tokenizer.special_tokens[found.group()]]
        end = found.end()
    parts = [part for part in (*parts, text[end:]) if part != ""]
    is_there = bool(tokenizer.prefix) and parts[:1] == [tokenizer.prefix[0]]
    prefix = tokenizer.prefix if with_prefix or (with_prefix is None and not is_there) else ()
    return [*prefix, *tokenizer.encode_parts(parts)]


@lru_cache(maxsize=8)
def _special_names(names: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


class UnusableRequest(Exception):
    """The reason why a request has no score."""


NO_TOKEN = "a continuation has a text, but no token of its own: its text and the end of the context are one token"
"""Reason. Its log-probability of 0 would be the highest of all choices."""


@dataclass(kw_only=True)
class RequestEncoder:
    tokenizer: Tokenizer
    max_tokens: int
    """Maximum number of tokens that the model reads: of both parts, without the last token, which it only predicts."""
    render: Callable[[str], list[int]] | None
    """Encodes the message of a user up to the answer. None: contexts are plain text."""
    _last: tuple[str | None, tuple[int, ...]] = field(default=(None, ()), init=False)
    """The last context, and its tokens."""

    def __call__(self, context: str, continuation: str) -> Request:
        """Return the tokens of a request. In a chat, the template sets the boundary, so a continuation is encoded alone, without
        white space at its start. Raises UnusableRequest if the continuation is longer than max_tokens, or has a text without a
        token."""
        tokenizer, kept = self.tokenizer, context.rstrip()
        if self.render is not None:
            continuation = continuation.lstrip()
            before = self._context(context) if context else (before_empty(tokenizer),)
            return fitted(before, encode(tokenizer, continuation, with_prefix=False), self.max_tokens)
        has_text = bool(continuation)
        continuation = context[len(kept) :] + continuation
        if kept:
            before = self._context(kept)
            after = encode(tokenizer, kept + continuation, with_prefix=None)[len(before) :]
        else:
            before, after = (before_empty(tokenizer),), encode(tokenizer, continuation, with_prefix=False)
            after = after[1:] if after[:1] == [*before] else after  # the text begins with BOS
        if has_text and not after:
            raise UnusableRequest(NO_TOKEN)
        return fitted(before, after, self.max_tokens)

    def prompt(self, context: str, max_tokens: int) -> list[int]:
        """Return the tokens after which the model generates, at most max_tokens, the last ones."""
        return [*self._context(context)][-max_tokens:] or [before_empty(self.tokenizer)]

    def _context(self, context: str) -> tuple[int, ...]:
        """Return the tokens of a context. Choices of one question have the same one, so the last one is kept."""
        if self._last[0] != context:
            tokens = encode(self.tokenizer, context, None) if self.render is None else self.render(context)
            self._last = context, tuple(tokens)
        return self._last[1]


def fitted(before: Sequence[int], after: Sequence[int], max_tokens: int) -> Request:
    """Return a request that loses its first tokens if the model would read more than max_tokens. Raises UnusableRequest if there
    are more targets."""
    if len(after) > max_tokens:
        raise UnusableRequest(f"a continuation has {len(after)} tokens, but a request has at most {max_tokens}")
    excess = max(0, len(before) + len(after) - 1 - max_tokens)
    return Request(tuple(before[excess:]), tuple(after))

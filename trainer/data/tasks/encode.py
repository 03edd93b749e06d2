"""Tokens of the requests of tasks, by the rules of lm-evaluation-harness (Gao et al., version 0.4.13, TemplateLM), so that scores
are the same.

- The text is encoded as a whole, and split after as many tokens as the context alone has.
- White space at the end of a context belongs to the continuation.
- An empty context is one token: BOS, or EOS if the tokenizer has no BOS.
- BOS precedes other contexts if the tokenizer itself adds it.
- Names of special tokens in a text are these tokens.
- A request that is too long loses its first tokens.
- A continuation without text has no tokens; its log-probability is 0, and it is the most likely one.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    parts: list[str | int] = []
    end = 0
    for found in re.finditer("|".join(map(re.escape, names)) or "(?!)", text):
        parts += [text[end : found.start()], tokenizer.special_tokens[found.group()]]
        end = found.end()
    parts = [part for part in (*parts, text[end:]) if part != ""]
    is_there = bool(tokenizer.prefix) and parts[:1] == [tokenizer.prefix[0]]
    prefix = tokenizer.prefix if with_prefix or (with_prefix is None and not is_there) else ()
    return [*prefix, *tokenizer.encode_parts(parts)]


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
            return fitted(
                self.render(context), encode(self.tokenizer, continuation.lstrip(), with_prefix=False), self.max_tokens
            )
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        if not kept:
            return fitted(
                [before_empty(self.tokenizer)], encode(self.tokenizer, continuation, with_prefix=False), self.max_tokens
            )
        before = encode(self.tokenizer, kept, with_prefix=None)
        whole = encode(self.tokenizer, kept + continuation, with_prefix=None)
        return fitted(before, whole[len(before) :], self.max_tokens)

    def prompt(self, context: str, max_new_tokens: int) -> list[int]:
        """Return the tokens after which the model generates. Raises RequestTooLong if max_new_tokens leaves no room for them."""
        if (room := self.max_tokens - max_new_tokens) < 1:
            message = f"max_new_tokens = {max_new_tokens} leaves no room for a prompt"
            raise RequestTooLong(f"{message} in the {self.max_tokens} tokens of a request")
        if context and self.render is not None:
            return self.render(context)[-room:]
        return encode(self.tokenizer, context, with_prefix=None)[-room:] or [before_empty(self.tokenizer)]


def fitted(before: Sequence[int], after: Sequence[int], max_tokens: int) -> Request:
    """Return a request that loses its first tokens if the model would read more than max_tokens. Raises RequestTooLong if there
    are more targets."""
    if len(after) > max_tokens:
        raise RequestTooLong(f"a continuation has {len(after)} tokens, but a request has at most {max_tokens}")
    excess = max(0, len(before) + len(after) - 1 - max_tokens)
    return Request(tuple(before[excess:]), tuple(after))

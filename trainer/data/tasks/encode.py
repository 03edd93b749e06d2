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
from typing import NamedTuple

from trainer.base.config import ConfigError
from trainer.data.tokenizer.protocol import Tokenizer


class Request(NamedTuple):
    context: tuple[int, ...]
    """At least one token, unless the continuation has none."""
    continuation: tuple[int, ...]


def encode_request(context: str, continuation: str, tokenizer: Tokenizer, max_tokens: int, key: str) -> Request:
    """Return the tokens of a request.

    Args:
        context: Text that precedes the continuation.
        continuation: Text whose log-probability is asked for.
        tokenizer: Tokenizer of the run.
        max_tokens: Maximum number of tokens that the model reads: of both, without the last one, which it only predicts.
        key: Setting that an error names.

    Raises:
        ConfigError: The continuation is longer than max_tokens, or there is no token that can stand for an empty context.
    """
    kept = context.rstrip()
    continuation, prefix = context[len(kept) :] + continuation, list(tokenizer.prefix)
    if kept:
        whole = prefix + tokenizer.encode(kept + continuation)
        before = prefix + tokenizer.encode(kept)
        after = whole[len(before) :]
    else:
        before = [tokenizer.eos if tokenizer.bos is None else tokenizer.bos]
        after = tokenizer.encode(continuation)
    return fitted(before, after, max_tokens, key)


def encode_chat(
    context: str, continuation: str, render: Callable[[str], list[int]], tokenizer: Tokenizer, max_tokens: int, key: str
) -> Request:
    """Return the tokens of a request whose context is the message of a user. The template has set the boundary, so the
    continuation is encoded alone, without white space at its start. render: encodes the message up to the answer. For the other
    arguments see encode_request."""
    return fitted(render(context), tokenizer.encode(continuation.lstrip()), max_tokens, key)


def fitted(before: list[int], after: list[int], max_tokens: int, key: str) -> Request:
    """Return a request that loses its first tokens if the model would read more than max_tokens."""
    if len(after) > max_tokens:
        message = f"a continuation has {len(after)} tokens, but a request has at most {max_tokens}"
        raise ConfigError(key, f"{message}; see max_seq_len and [training] seq_len")
    excess = max(0, len(before) + len(after) - 1 - max_tokens)
    return Request(tuple(before[excess:]), tuple(after))

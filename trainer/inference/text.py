"""Text from tokens, one token at a time."""

from collections.abc import Sequence

from trainer.data.tokenizer.protocol import Tokenizer

_CONTEXT = 8
"""Number of tokens before a text that decide how it begins."""


def without_special_tokens(tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str]) -> str:
    """Return the answer that lm-evaluation-harness sees in new tokens.

    Args:
        tokenizer: Of the model.
        tokens: New tokens. Special ones are left out.
        stop: The text ends before the first of these strings.
    """
    special = set(tokenizer.special_tokens.values())
    text = tokenizer.decode([token for token in tokens if token not in special])
    return text[: min((index for s in stop if (index := text.find(s)) >= 0), default=len(text))]


class TextStream:
    """Incremental decoding. A character that consists of several tokens is returned with the last of these tokens."""

    def __init__(self, tokenizer: Tokenizer, prefix: Sequence[int] = ()):
        """prefix: the preceding tokens, which decide whether the text begins with a space."""
        self.tokenizer = tokenizer
        self.tokens = list(prefix[-_CONTEXT:])
        """The last tokens whose text was returned, and those whose text was not."""
        self.returned = len(self.tokens)
        """Number of the first of these."""

    def put(self, token: int) -> str:
        """Add a token and return the characters that it completes."""
        self.tokens.append(token)
        text = self.rest()
        if text.endswith("\ufffd"):
            return ""
        self.tokens = self.tokens[self.returned :]
        self.returned = len(self.tokens)
        return text

    def rest(self) -> str:
        """Return the characters of tokens that are not complete."""
        before = self.tokenizer.decode(self.tokens[: self.returned]) if self.returned else ""
        return self.tokenizer.decode(self.tokens)[len(before) :]


class StoppedText:
    """A text that ends before the first of some strings. Characters with which one may begin are withheld."""

    def __init__(self, stop: Sequence[str]):
        """stop: strings of at least one character."""
        self.stop = tuple(stop)
        self.withheld = ""
        self.has_stopped = False

    def put(self, text: str) -> str:
        """Add characters and return those that are known to be part of the text."""
        text = self.withheld + text
        found = [index for stop in self.stop if (index := text.find(stop)) >= 0]
        self.has_stopped = bool(found)
        end = min(found) if found else len(text) - self._possible(text)
        self.withheld = "" if found else text[end:]
        return text[:end]

    def _possible(self, text: str) -> int:
        """Return the number of last characters with which a string may begin."""
        longest = max(map(len, self.stop), default=1) - 1
        return next(
            (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self.stop)), 0
        )

"""Byte-pair encoding by tiktoken: patterns that split text before its bytes are merged, and where to cut texts that are too long
for them."""

import itertools
import re
from collections.abc import Iterator, Mapping

import tiktoken

from trainer.base.config import ConfigError
from trainer.base.system.spelling import did_you_mean

# In Llama 3: contractions, words, up to three digits, punctuation, spaces.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "llama3": LLAMA3_PATTERN,
    "llama4": _O200K_PATTERN,
    "qwen2": LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": LLAMA3_PATTERN.replace(r"|\s*[\r\n]+", r"|\s+\z|\s*[\r\n]+"),
    "o200k": _O200K_PATTERN,
}
"""Value of tokenizer.pattern -> regular expression. The package `tokenizers` gives each of them the same meaning as tiktoken."""

_PROBE = "Don't  split1234 \u4e16\u754c\n\r\n \t<|x|>/\u0301\u00e9\u00c5B \U0001f642\u200b\x00\u2028\u00bd _a\n  "
"""Text with characters of every kind. A pattern that does not cover it would lose text."""

# tiktoken's regular expressions overflow on longer texts, and take quadratic time on longer sequences without a boundary. Meta's
# reference tokenizer splits at the same positions, so these limits are part of the encoding.
LONGEST_TEXT = 400_000
LONGEST_RUN = 25_000
_SPACES, _OTHERS = re.compile(r"\s+"), re.compile(r"\S+")


def _long_runs(text: str) -> Iterator[range]:
    """Yield the range of each sequence that is longer than LONGEST_RUN and is all whitespace or has no whitespace.

    Each such sequence contains a position that is a multiple of LONGEST_RUN. The search therefore examines only these positions.
    If it examined every character, it would take a third of the encoding time.
    """
    end = 0
    for position in range(0, len(text), LONGEST_RUN):
        if position < end:
            continue  # this position is in the previous sequence
        is_space = text[position].isspace()
        start = position
        while start > end and text[start - 1].isspace() == is_space:
            start -= 1
        match = (_SPACES if is_space else _OTHERS).match(text, position)
        assert match is not None
        end = match.end()
        if end - start > LONGEST_RUN:
            yield range(start, end)


def short_pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), LONGEST_TEXT):
        piece = text[start : start + LONGEST_TEXT]
        splits = [position for run in _long_runs(piece) for position in run[::LONGEST_RUN][1:]]
        yield from (piece[a:b] for a, b in itertools.pairwise([0, *splits, len(piece)]))


def byte_pair_encoding(
    name: str, pattern: str, ranks: Mapping[bytes, int], special: Mapping[str, int]
) -> tiktoken.Encoding:
    """Return tiktoken's encoding. Raises ConfigError if the pattern is not a regular expression, or does not match all text."""
    setting, names = "tokenizer.pattern", ", ".join(PATTERNS)
    try:
        encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=dict(special))
    except ValueError:
        message = f"is not a valid regular expression, and none of the names {names}{did_you_mean(pattern, PATTERNS)}"
        raise ConfigError(setting, message) from None
    if encoding.decode(encoding.encode(_PROBE, disallowed_special=())) != _PROBE:
        message = f"must be one of {names}, or a regular expression that matches any text"
        raise ConfigError(setting, f"{message}: this one would lose characters{did_you_mean(pattern, PATTERNS)}")
    return encoding

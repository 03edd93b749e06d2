"""Encoding of text with special tokens by the package `tokenizers`, where the text may contain names of special tokens too.

The package recognizes special tokens by their names, wherever these occur. Here, a copy of the tokenizer recognizes placeholders
instead: characters that do not occur in the text. A name in the text is therefore plain text, while the package itself applies
everything that depends on the neighbours of a token: the white space that a token takes (`lstrip`, `rstrip`), tokens that must
be separate words (`single_word`), tokens that are matched in normalized text (`normalized`), and spaces that are prepended.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
"""Properties of an added token that make its recognition depend on the text around it."""
_COMBINATIONS = tuple(itertools.product((False, True), repeat=len(FLAGS)))
# Noncharacters, a plane of private-use characters, and letters of Lisu, which every normalizer keeps.
_BLOCKS = (0xFDD0, *range(0xF0000, 0xFFFD0, len(_COMBINATIONS)), 0xA4D0)
_NEUTRAL = "\ue000"  # a character of no vocabulary, which therefore never merges with adjacent text


@dataclass(frozen=True)
class _Copy:
    tokenizer: Any
    marks: Mapping[tuple[bool, ...], str]
    """Values of FLAGS -> placeholder of special tokens with these flags."""
    mark_ids: frozenset[int]
    original_ids: Mapping[int, int]
    """The copy's id of each added token that is not special -> its id in the original."""


class PlaceholderEncoder:
    """Encoder of texts with special tokens. Special tokens are given by id, so that no text is mistaken for one."""

    def __init__(self, package: ModuleType, tokenizer: Any, special: Mapping[int, Any]):
        """
        Args:
            package: the package `tokenizers`.
            tokenizer: a tokenizers.Tokenizer.
            special: id -> tokenizers.AddedToken of its special tokens. Any other id is that of a special token without flags.
        """
        self._package, self._tokenizer, self._special = package, tokenizer, special
        self._copy = lru_cache(maxsize=4)(self._make_copy)

    def encode(self, parts: Sequence[str | int], before: Sequence[str | int]) -> list[int]:
        """Encode as Tokenizer.encode_parts does. Raises ValueError if the text uses all characters for placeholders."""
        context = before[self._start_of_text(before) :]
        neutral = [*[part for part in context[:1] if isinstance(part, int)], _NEUTRAL]
        # The neutral text is used if a token would extend over both, or if a special token would take white space of `before`.
        for preceding in (context, neutral) if before else ():
            tokens, start = self._encode([*preceding, *parts]), self._encode(preceding)
            if tokens[: len(start)] == start:
                return tokens[len(start) :]
        return self._encode(parts)

    def _start_of_text(self, parts: Sequence[str | int]) -> int:
        """Return the index of the last special token that is recognized beside any text, or 0. The text after it does not depend
        on what precedes it."""
        for i in reversed(range(len(parts))):
            flags = self._special.get(parts[i]) if isinstance(parts[i], int) else None
            if isinstance(parts[i], int) and not (flags and (flags.normalized or flags.single_word)):
                return i
        return 0

    def _encode(self, parts: Sequence[str | int]) -> list[int]:
        """Encode the parts as one text."""
        copy = self._copy(self._unused_block(parts))
        texts = [copy.marks[self._flags(part)] if isinstance(part, int) else part for part in parts]
        encoding = copy.tokenizer.encode("".join(texts), add_special_tokens=False)
        found = [
            i
            for i, (token, text) in enumerate(zip(encoding.ids, encoding.tokens, strict=True))
            if token in copy.mark_ids and any(mark in text for mark in copy.marks.values())
        ]
        special = [part for part in parts if isinstance(part, int)]
        if len(found) < len(special):
            return self._encode(self._with_names(parts, texts, [encoding.offsets[i] for i in found]))
        tokens = [copy.original_ids.get(token, token) for token in encoding.ids]
        for i, token in zip(found, special, strict=True):
            tokens[i] = token
        return tokens

    def _with_names(
        self, parts: Sequence[str | int], texts: Sequence[str], found: Sequence[tuple[int, int]]
    ) -> list[str | int]:
        """Replace the special tokens that the package does not recognize beside their neighbours by their names, which are text.

        Args:
            parts: as in encode.
            texts: the text or the placeholder of each part.
            found: range (start, stop) of each recognized placeholder in the complete text.
        """
        starts = itertools.accumulate(map(len, texts), initial=0)
        return [
            part if isinstance(part, str) or any(a <= start < b for a, b in found) else self._special[part].content
            for part, start in zip(parts, starts, strict=False)
        ]

    def _flags(self, token: int) -> tuple[bool, ...]:
        if token not in self._special:
            return (False,) * len(FLAGS)
        return tuple(getattr(self._special[token], flag) for flag in FLAGS)

    def _unused_block(self, parts: Sequence[str | int]) -> int:
        """Return the first block of characters that the text does not contain and that the normalizer keeps."""
        size, normalizer = len(_COMBINATIONS), self._tokenizer.normalizer
        used = {ord(c) // size * size for part in parts if isinstance(part, str) for c in part if not c.isascii()}
        if normalizer is not None and any(token.normalized for token in self._special.values()):
            used |= {first for first in _BLOCKS[:2] if chr(first) not in normalizer.normalize_str(chr(first))}
            used |= set(_BLOCKS[1:-1]) if _BLOCKS[1] in used else set()
        for first in _BLOCKS:
            if first not in used:
                return first
        raise ValueError("the text uses all characters that could stand for special tokens")

    def _make_copy(self, first: int) -> _Copy:
        """first: code point of the first placeholder."""
        original = self._tokenizer
        copy = self._package.Tokenizer(original.model)  # the vocabulary is shared
        if original.normalizer is not None:
            copy.normalizer = original.normalizer
        if original.pre_tokenizer is not None:
            copy.pre_tokenizer = original.pre_tokenizer
        plain = [t for i, t in sorted(original.get_added_tokens_decoder().items()) if i not in self._special]
        copy.add_tokens(plain)
        ids = {copy.token_to_id(token.content): original.token_to_id(token.content) for token in plain}
        marks = {flags: chr(first + i) for i, flags in enumerate(_COMBINATIONS)}
        copy.add_special_tokens(
            [
                self._package.AddedToken(mark, special=True, **dict(zip(FLAGS, flags, strict=True)))
                for flags, mark in marks.items()
            ]
        )
        return _Copy(copy, marks, frozenset(map(copy.token_to_id, marks.values())), ids)


def depends_on_neighbours(tokenizer_json: Mapping[str, Any], added: Iterable[Any]) -> bool:
    """Return whether the tokens of a text depend on whether special tokens or other text are beside it.

    Args:
        tokenizer_json: Content of a tokenizer.json.
        added: The added tokens, as tokenizers.AddedToken.
    """
    normalizer = tokenizer_json.get("normalizer")
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return True
    if normalizer is not None and any(token.special and token.normalized for token in added):
        return True
    return not all(map(_is_local, (*_components(normalizer), *_components(tokenizer_json.get("pre_tokenizer")))))


_LOCAL = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Split", "Digits", "Punctuation", "Whitespace")


def _components(component: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if component is None:
        return []
    if component.get("type") != "Sequence":
        return [component]
    return [
        c
        for member in component.get("normalizers") or component.get("pretokenizers") or ()
        for c in _components(member)
    ]


def _is_local(component: Mapping[str, Any]) -> bool:
    """Return whether a normalizer or pre-tokenizer adds nothing at the start of a text and removes nothing at its ends."""
    kind = component.get("type")
    if kind == "ByteLevel":
        return not component.get("add_prefix_space")
    if kind == "Metaspace":
        return (
            component.get("prepend_scheme", "always" if component.get("add_prefix_space", True) else "never") == "never"
        )
    if kind == "Replace":
        return len((component.get("pattern") or {}).get("String", "")) == 1
    return kind in _LOCAL

"""Encoding of text with special tokens by the package `tokenizers`, where the text may contain names of special tokens too.

The package recognizes special tokens by their names, wherever these occur. Here, a copy of the tokenizer recognizes placeholders
instead: characters that do not occur in the text. A name in the text is therefore plain text, while the package itself applies
everything that depends on the neighbours of a token: the white space that a token takes (`lstrip`, `rstrip`), tokens that must
be separate words (`single_word`), tokens that are matched in normalized text (`normalized`), and spaces that are prepended.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

_FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
"""Properties of an added token that make its recognition depend on the text around it."""
_SIZE = 2 ** len(_FLAGS)
"""Number of placeholders: one for all special tokens with the same flags."""
# First characters of blocks of placeholders: noncharacters, a plane of private-use characters, and letters of Lisu, which every
# normalizer keeps.
_BLOCKS = (0xFDD0, *range(0xF0000, 0xFFFD0, _SIZE), 0xA4D0)
_NEUTRAL = "\ue000"  # a character of no vocabulary, which therefore never merges with adjacent text


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
        self._blocks = _BLOCKS
        if tokenizer.normalizer is not None and any(token.normalized for token in special.values()):
            # A normalizer may remove characters of the first kinds. One block of the plane is enough.
            kept = [first for first in _BLOCKS[:2] if chr(first) in tokenizer.normalizer.normalize_str(chr(first))]
            self._blocks = (*kept, _BLOCKS[-1])
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
        first = self._unused_block(parts)
        copy, ids, placeholder_ids = self._copy(first)
        texts = [self._placeholder(first, part) if isinstance(part, int) else part for part in parts]
        encoding = copy.encode("".join(texts), add_special_tokens=False)
        found = [
            i
            for i, (token, text) in enumerate(zip(encoding.ids, encoding.tokens, strict=True))
            if token in placeholder_ids and any(first <= ord(character) < first + _SIZE for character in text)
        ]
        special = [part for part in parts if isinstance(part, int)]
        if len(found) < len(special):
            # Special tokens that the package does not recognize beside their neighbours are text: their names.
            recognized = [range(*encoding.offsets[i]) for i in found]
            starts = itertools.accumulate(map(len, texts), initial=0)
            return self._encode(
                [
                    part
                    if isinstance(part, str) or any(start in r for r in recognized)
                    else self._special[part].content
                    for part, start in zip(parts, starts, strict=False)
                ]
            )
        tokens = [ids.get(token, token) for token in encoding.ids]
        for i, token in zip(found, special, strict=True):
            tokens[i] = token
        return tokens

    def _placeholder(self, first: int, token: int) -> str:
        """Return the character of a block that stands for a special token."""
        flags = [token in self._special and getattr(self._special[token], flag) for flag in _FLAGS]
        return chr(first + sum(flag << bit for bit, flag in enumerate(flags)))

    def _unused_block(self, parts: Sequence[str | int]) -> int:
        """Return the first character of the first block that the text does not contain."""
        used = {ord(c) // _SIZE * _SIZE for part in parts if isinstance(part, str) for c in part if not c.isascii()}
        for first in self._blocks:
            if first not in used:
                return first
        raise ValueError("the text uses all characters that could stand for special tokens")

    def _make_copy(self, first: int) -> tuple[Any, dict[int, int], frozenset[int]]:
        """Return a copy of the tokenizer that recognizes a block of placeholders, its id of each other added token -> the id in
        the original, and its ids of the placeholders."""
        original = self._tokenizer
        copy = self._package.Tokenizer(original.model)  # the vocabulary is shared
        if original.normalizer is not None:
            copy.normalizer = original.normalizer
        if original.pre_tokenizer is not None:
            copy.pre_tokenizer = original.pre_tokenizer
        plain = [t for i, t in sorted(original.get_added_tokens_decoder().items()) if i not in self._special]
        copy.add_tokens(plain)
        ids = {copy.token_to_id(token.content): original.token_to_id(token.content) for token in plain}
        placeholders = [chr(first + i) for i in range(_SIZE)]
        for i, placeholder in enumerate(placeholders):
            flags = {flag: bool(i >> bit & 1) for bit, flag in enumerate(_FLAGS)}
            copy.add_special_tokens([self._package.AddedToken(placeholder, special=True, **flags)])
        return copy, ids, frozenset(map(copy.token_to_id, placeholders))


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
    """Return the members of a normalizer or pre-tokenizer, which may be a sequence of sequences."""
    if component is None or component.get("type") != "Sequence":
        return [component] if component else []
    members = component.get("normalizers") or component.get("pretokenizers") or ()
    return [inner for member in members for inner in _components(member)]


def _is_local(component: Mapping[str, Any]) -> bool:
    """Return whether a normalizer or pre-tokenizer adds nothing at the start of a text and removes nothing at its ends."""
    kind = component.get("type")
    if kind == "ByteLevel":
        return not component.get("add_prefix_space")
    if kind == "Metaspace":
        default = "always" if component.get("add_prefix_space", True) else "never"
        return component.get("prepend_scheme", default) == "never"
    if kind == "Replace":
        return len((component.get("pattern") or {}).get("String", "")) == 1
    return kind in _LOCAL

"""Handling of special-token names in text: they are recognized in a template's text and escaped in messages."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from trainer.config import ConfigError

_SPECIAL_LOOKING = r"<[|\uff5c][^\s<>|\uff5c]{1,60}[|\uff5c]>|</?s>|<[be]os>|<(?:start|end)_of_turn>"
"""Pattern of names that are treated as special tokens in every template, such as <|im_start|>, <s> and <start_of_turn>."""

_RESERVED = r"reserved_special_token|^<SPECIAL_\d+>$"
"""Pattern of names of reserved special tokens: Llama 3's and Mistral's."""

_COMPARED = ("role", "type")
"""Message fields that templates compare with constants. No separator is added at their ends, so that they still match."""


def looks_special(name: str) -> bool:
    """Return whether a name is treated as that of a special token in every template."""
    return re.fullmatch(_SPECIAL_LOOKING, name) is not None


def missing_special_tokens(template: str, special_tokens: Mapping[str, int]) -> list[str]:
    """Return the names of special tokens that are in a template but not in the tokenizer, in the order in which they occur."""
    return [name for name in dict.fromkeys(re.findall(_SPECIAL_LOOKING, template)) if name not in special_tokens]


def remap_reserved(special_tokens: Mapping[str, int], reuse_reserved_tokens: Mapping[str, str]) -> dict[str, int]:
    """Return a copy of `special_tokens` in which some reserved tokens have new names. Raises ConfigError for invalid names.

    reuse_reserved_tokens: new name -> reserved token to rename, such as {"<|im_start|>": "<|reserved_special_token_0|>"}.
    """
    key = "tokenizer.reuse_reserved_tokens"
    result = dict(special_tokens)
    for name, reserved in reuse_reserved_tokens.items():
        require_new_name(name, special_tokens, key)
        if reserved not in reserved_names(special_tokens):
            raise ConfigError(key, f"the tokenizer has no reserved token {reserved}")
        if reserved not in result:
            raise ConfigError(key, f"{reserved} is given two new names")
        result[name] = result.pop(reserved)
    return result


def require_new_name(name: str, existing: Collection[str], setting: str) -> None:
    """Raise ConfigError if `name` cannot be used as the name of a new special token."""
    if name in existing:
        raise ConfigError(setting, f"{name} is already a special token")
    if len(name) < 2:
        raise ConfigError(setting, f"{name!r} is too short for the name of a special token")


def reserved_names(special_tokens: Mapping[str, int]) -> list[str]:
    """Return the names of reserved special tokens, sorted by id."""
    names = [name for name in special_tokens if re.search(_RESERVED, name)]
    return sorted(names, key=special_tokens.__getitem__)


class SpecialNames:
    """Recognition of special-token names in text, and escaping of these names in messages.

    To escape a name, a separator is inserted into it. The separator is a character that the conversation does not contain.
    """

    def __init__(self, names: Collection[str], allowed: Collection[str]):
        """allowed: names that are recognized as special tokens in messages too."""
        # Sorted by length, so that a name is found before its own prefix.
        self._names = names = sorted(filter(None, names), key=len, reverse=True)
        self._pattern = re.compile("|".join([*map(re.escape, names), _SPECIAL_LOOKING]))
        self._allowed = frozenset(allowed)
        self._prefixes = {name[:k] for name in names for k in range(1, len(name))}
        self._suffixes = {name[k:] for name in names for k in range(1, len(name))}
        self._longest = max(map(len, names), default=0)

    def escape(self, value: Any, separator: str, at_ends: bool = True) -> Any:
        """Return a copy of a JSON value in which the special-token names in all strings are escaped.

        at_ends: whether to add separators at the ends of strings that could form a name together with the template's text.
        """
        if isinstance(value, Mapping):
            return {
                self.escape(name, separator, False): self.escape(entry, separator, at_ends and name not in _COMPARED)
                for name, entry in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.escape(entry, separator, at_ends) for entry in value]
        if not isinstance(value, str):
            return value
        if not self._allowed:
            return self._escape_text(value, separator, at_ends)
        pieces = re.split("(" + "|".join(map(re.escape, self._allowed)) + ")", value)
        return "".join(p if p in self._allowed else self._escape_text(p, separator, at_ends) for p in pieces)

    def _escape_text(self, text: str, separator: str, at_ends: bool) -> str:
        while self._pattern.search(text):  # repeated, since names can overlap
            text = self._pattern.sub(lambda match: match[0][0] + separator + match[0][1:], text)
        core = text.strip()  # a template may strip the text too
        if not at_ends or not core:
            return text
        lengths = range(1, min(self._longest, len(core)) + 1)
        is_inside = len(core) <= self._longest and any(core in name for name in self._names)
        before = separator if is_inside or any(core[:k] in self._suffixes for k in lengths) else ""
        after = separator if any(core[-k:] in self._prefixes for k in lengths) else ""
        start = len(text) - len(text.lstrip())
        return text[:start] + before + core + after + text[start + len(core) :]

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """Split a text at special-token names. Yield each non-empty piece, and whether it is, or looks like, such a name."""
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() > end:
                yield text[end : match.start()], False
            yield match[0], True
            end = match.end()
        if end < len(text):
            yield text[end:], False

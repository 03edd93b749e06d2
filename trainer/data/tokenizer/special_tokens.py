"""Special tokens by their names in text: found where a template writes them, kept apart where a user does."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from trainer.config import ConfigError

_SPECIAL_LOOKING = r"<[|\uff5c][^\s<>|\uff5c]{1,60}[|\uff5c]>|</?s>|<[be]os>|<(?:start|end)_of_turn>"
"""Names that are never meant as text by a template: <|im_start|> (also with DeepSeek's wide bars), <s>, Gemma's."""

_COMPARED = ("role", "type")
"""Entries of messages that templates compare with words of their own, so that nothing may come to them."""


def missing_special_tokens(template: str, special_tokens: Mapping[str, int]) -> list[str]:
    """Names of special tokens in the text of a template that the tokenizer does not have, in order."""
    return [name for name in dict.fromkeys(re.findall(_SPECIAL_LOOKING, template)) if name not in special_tokens]


def remap_reserved(special_tokens: Mapping[str, int], reuse_reserved_tokens: Mapping[str, str]) -> dict[str, int]:
    """Name -> id with new names on the ids of reserved ones, which are no names any more.

    reuse_reserved_tokens: new name -> the name whose id it gets, as {"<|im_start|>": "<|reserved_special_token_0|>"}.
    """
    key = "tokenizer.reuse_reserved_tokens"
    result = dict(special_tokens)
    for name, reserved in reuse_reserved_tokens.items():
        if name in special_tokens:
            raise ConfigError(key, f"{name} is a special token already")
        if len(name) < 2:
            raise ConfigError(key, f"{name!r} is too short for the name of a special token")
        if reserved not in reserved_names(special_tokens):
            raise ConfigError(key, f"the tokenizer has no reserved token {reserved}")
        if reserved not in result:
            raise ConfigError(key, f"{reserved} is taken over twice")
        result[name] = result.pop(reserved)
    return result


def reserved_names(special_tokens: Mapping[str, int]) -> list[str]:
    """Special tokens that mean nothing yet, by id."""
    return sorted((name for name in special_tokens if "reserved_special_token" in name), key=special_tokens.__getitem__)


class SpecialNames:
    """The names of special tokens, and what looks like one.

    A joint is a character that stands nowhere in a conversation; put into text of a message, it parts what would be a name.
    """

    def __init__(self, names: Collection[str], kept: Collection[str]):
        """kept: names that mean their token in a message too."""
        self._known = known = sorted(
            filter(None, names), key=len, reverse=True
        )  # a longer name before what it begins with
        self._looking = re.compile("|".join([*map(re.escape, known), _SPECIAL_LOOKING]))
        self._kept = frozenset(kept)
        self._beginnings = {name[:k] for name in known for k in range(1, len(name))}
        self._endings = {name[k:] for name in known for k in range(1, len(name))}
        self._longest = max(map(len, known), default=0)

    def parted(self, value: Any, joint: str, borders: bool = True) -> Any:
        """The same value with joints in all of its texts where they are needed.

        borders: also where a text could make a name together with what the template writes beside it.
        """
        if isinstance(value, Mapping):
            return {
                self.parted(name, joint, False): self.parted(entry, joint, borders and name not in _COMPARED)
                for name, entry in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.parted(entry, joint, borders) for entry in value]
        if not isinstance(value, str):
            return value
        if not self._kept:
            return self._parted_text(value, joint, borders)
        parts = re.split("(" + "|".join(map(re.escape, self._kept)) + ")", value)
        return "".join(part if part in self._kept else self._parted_text(part, joint, borders) for part in parts)

    def _parted_text(self, text: str, joint: str, borders: bool) -> str:
        while self._looking.search(text):  # again, for what overlapped
            text = self._looking.sub(lambda found: found[0][0] + joint + found[0][1:], text)
        core = text.strip()  # as the template may
        if not borders or not core:
            return text
        lengths = range(1, min(self._longest, len(core)) + 1)
        inside = len(core) <= self._longest and any(core in name for name in self._known)
        opens = joint if inside or any(core[:k] in self._endings for k in lengths) else ""
        closes = joint if any(core[-k:] in self._beginnings for k in lengths) else ""
        start = len(text) - len(text.lstrip())
        return text[:start] + opens + core + closes + text[start + len(core) :]

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """Pieces of a text, none of them empty, and whether each is a name, or looks like one."""
        at = 0
        for found in self._looking.finditer(text):
            if found.start() > at:
                yield text[at : found.start()], False
            yield found[0], True
            at = found.end()
        if at < len(text):
            yield text[at:], False

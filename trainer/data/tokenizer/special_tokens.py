"""Names of special tokens: those that a template needs, and those of reserved tokens."""

import re
from collections.abc import Collection, Mapping

from trainer.base.config import ConfigError

SPECIAL_LOOKING = r"<[|\uff5c][^\s<>|\uff5c]{1,60}[|\uff5c]>|</?s>|<[be]os>|<(?:start|end)_of_turn>"
"""Pattern of names that are treated as special tokens in every template, such as <|im_start|>, <s> and <start_of_turn>."""

_RESERVED = r"reserved_special_token|^<SPECIAL_\d+>$"
"""Pattern of names of reserved special tokens: Llama 3's and Mistral's."""


def looks_special(name: str) -> bool:
    """Return whether a name is treated as that of a special token in every template."""
    return re.fullmatch(SPECIAL_LOOKING, name) is not None


def missing_special_tokens(template: str, special_tokens: Mapping[str, int]) -> list[str]:
    """Return the names of special tokens that are in a template but not in the tokenizer, in the order in which they occur."""
    return [name for name in dict.fromkeys(re.findall(SPECIAL_LOOKING, template)) if name not in special_tokens]


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

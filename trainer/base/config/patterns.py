"""Patterns of names of modules and parameters, which several settings contain."""

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

from trainer.base.config.errors import ConfigError
from trainer.base.system.spelling import did_you_mean

_OWN_NAMES = {
    **{"q_proj": "*.attention.wq", "k_proj": "*.attention.wk", "v_proj": "*.attention.wv", "o_proj": "*.attention.wo"},
    **{"gate_proj": "*.w1", "up_proj": "*.w3", "down_proj": "*.w2"},
    **{"lm_head": "output", "embed_tokens": "tok_embeddings", "all-linear": "*"},
}
"""Name of a module in most of Hugging Face's models -> pattern of its name in this project."""


def matching(
    key: str,
    patterns: Collection[str],
    names: Collection[str],
    kind: str,
    others: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Return the names that match any of the patterns, in order.

    Args:
        key: The setting that contains the patterns.
        patterns: They match complete names.
        names: Those that the setting may select.
        kind: What they are the names of.
        others: Name that exists, but that the setting may not select -> why not.

    Raises:
        ConfigError: A pattern matches nothing. The message says what was probably meant.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(key, f"{pattern} matches no {kind}{_hint(pattern, names, others)}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _hint(pattern: str, names: Collection[str], others: Mapping[str, str]) -> str:
    if other := next((name for name in others if fnmatchcase(name, pattern)), ""):
        return f"; {other} {others[other]}"
    everything = [*names, *others]
    if module := _own_name(pattern):
        for own in (module, f"{module}.*"):
            if found := [name for name in everything if fnmatchcase(name, own)]:
                why_not = f", which {others[found[0]]}" if found[0] in others else ""
                return f"; {pattern} is called {own} here{why_not}"
    if any(name.endswith(f".{pattern}") for name in everything):
        return f"; write *.{pattern}"
    if any(name.startswith(f"{pattern}.") for name in names):
        return f"; write {pattern}.*"
    return did_you_mean(pattern, names)


def _own_name(pattern: str) -> str:
    """Return a pattern of the name in this project of what a pattern means in Hugging Face's models, or ""."""
    own = _OWN_NAMES.get(pattern.removesuffix(".*").removesuffix(".weight").rpartition(".")[2], "")
    block = re.search(r"\blayers\.\d+\.", pattern)
    return block[0] + own.replace("*.", "*", 1) if block and own.startswith("*.") else own

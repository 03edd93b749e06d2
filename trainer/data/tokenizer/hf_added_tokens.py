"""Added tokens of a tokenizer in Hugging Face's format: those of tokenizer.json, and those that other files add or change."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.base.config import ConfigError
from trainer.base.system.files import read_json_object
from trainer.data.tokenizer.special_tokens import looks_special

_FIELDS = ("content", "lstrip", "rstrip", "normalized", "single_word", "special")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if the file is missing. Raises ConfigError."""
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}
    except ValueError:
        raise ConfigError("tokenizer.path", f"{path} is not a JSON object") from None


def name_of(value: Any) -> str | None:
    """Return the name of a special token. value: its name, or an object with the name as "content"."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else None


def missing_token(what: str, file: str) -> ConfigError:
    """Return the error of a file that names a token that the vocabulary does not have. transformers would give it a new id."""
    message = f"{file} names {what}, which the vocabulary does not have"
    way = "correct the name, remove it, or list the token with its id in added_tokens_decoder of tokenizer_config.json"
    return ConfigError("tokenizer.path", f"{message}; {way}")


def add_configured_tokens(package: ModuleType, tokenizer: Any, beside: Mapping[str, Mapping], folder: Path) -> set[str]:
    """Add the tokens of tokenizer_config.json and added_tokens.json to a tokenizer, as transformers does. Flags in
    tokenizer_config.json replace those in tokenizer.json. Return the names that the files give to special tokens. Raises
    ConfigError if a token would get another id than it states.

    Args:
        package: the package `tokenizers`.
        tokenizer: the tokenizers.Tokenizer of the folder's tokenizer.json, which is changed.
        beside: objects in the JSON files beside it, by file name.
        folder: the tokenizer's folder, for messages.
    """
    config = beside.get("tokenizer_config.json", {})
    replacing = {} if "added_tokens_decoder" in config else beside.get("special_tokens_map.json", {})
    names = {**config, **replacing}
    field = next((name for name in ("extra_special_tokens", "additional_special_tokens") if names.get(name)), "")
    listed = names.get(field, [])
    listed = list(listed.values()) if isinstance(listed, Mapping) else listed
    extra = [name_of(value) for value in listed] if isinstance(listed, list) else []
    special = {*(name_of(names.get(role)) for role in _NAMED), *extra} - {None}
    for token_id, token, file in _configured(package, tokenizer, beside, special, folder):
        existing = tokenizer.token_to_id(token.content)
        tokenizer.add_tokens([token])
        added = tokenizer.token_to_id(token.content)
        if added != token_id:
            reason = f"tokenizer.json gives it {added}" if existing is not None else f"the next free id is {added}"
            message = f"{file} gives {token.content} the id {token_id}, but {reason}; correct one of the two files"
            raise ConfigError("tokenizer.path", message)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    if missing := [name for name in extra if name and tokenizer.token_to_id(name) is None]:
        file = "special_tokens_map.json" if field in replacing else "tokenizer_config.json"
        raise missing_token(f"the special token {missing[0]}", file)
    known = sorted(name for name in special - added if tokenizer.token_to_id(name) is not None)
    tokenizer.add_special_tokens([package.AddedToken(name, special=True, normalized=False) for name in known])
    return special


def _configured(
    package: ModuleType, tokenizer: Any, beside: Mapping[str, Mapping], special: set[str], folder: Path
) -> list[tuple[int, Any, str]]:
    """Return the id, the token and the file of each token that files beside tokenizer.json define, sorted by id."""
    file = "tokenizer_config.json"
    entries = beside.get(file, {}).get("added_tokens_decoder")
    if entries is None:  # the format of older versions of transformers, which has no flags
        present = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        file, ids = "added_tokens.json", beside.get("added_tokens.json", {})
        flags = {name: {"special": name in special, "normalized": name not in special} for name in ids}
        flags |= {name: {f: getattr(present[name], f) for f in _FIELDS} for name in ids if name in present}
        entries = {i: {"content": name, **flags[name]} for name, i in ids.items()}
    try:
        flags = [{name: value for name, value in entry.items() if name in _FIELDS} for entry in entries.values()]
        if not all(values["content"] for values in flags):
            raise ValueError
        tokens = [(int(i), package.AddedToken(**values)) for i, values in zip(entries, flags, strict=True)]
    except (TypeError, ValueError, AttributeError, KeyError):
        raise ConfigError("tokenizer.path", f"{folder / file} does not list added tokens with their ids") from None
    return [(i, token, file) for i, token in sorted(tokens, key=lambda entry: entry[0])]


def protect_special(package: ModuleType, tokenizer: Any, named: Collection[str]) -> None:
    """Make special those added tokens that some folders do not call special, so that any text could contain them: tokens with a
    role such as EOS, and tokens whose names look special, such as <｜User｜>. named: names of the tokens with a role."""
    tokens = [
        token
        for _, token in sorted(tokenizer.get_added_tokens_decoder().items())
        if not token.special and (token.content in named or looks_special(token.content))
    ]
    flags = [{name: getattr(token, name) for name in _FIELDS} | {"special": True} for token in tokens]
    tokenizer.add_special_tokens([package.AddedToken(**values) for values in flags])


def with_added_tokens(content: bytes, tokenizer: Any) -> dict[str, Any]:
    """Return the content of a tokenizer.json with all added tokens of a tokenizer."""
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    entries = [{"id": i} | {name: getattr(token, name) for name in _FIELDS} for i, token in added]
    return json.loads(content) | {"added_tokens": entries}

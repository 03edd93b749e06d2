"""Special tokens and other added tokens: their names, those that the user adds or renames, and those that files of a tokenizer in
Hugging Face's format define."""

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from trainer.base.config import ConfigError
from trainer.data.tokenizer.hf_json import added_tokens, json_bytes
from trainer.data.tokenizer.protocol import Tokenizer

# ---------------------------------------------------------------- names

SPECIAL_LOOKING = r"<[|\uff5c][^\s<>|\uff5c]{1,60}[|\uff5c]>|</?s>|<[be]os>|<(?:start|end)_of_turn>"
"""Pattern of names that are treated as special tokens in every template, such as <|im_start|>, <s> and <start_of_turn>."""

_RESERVED = r"reserved_special_token|^<SPECIAL_\d+>$"
"""Pattern of names of reserved special tokens: Llama 3's and Mistral's."""


def missing_special_tokens(template: str, special_tokens: Mapping[str, int]) -> list[str]:
    """Return the names of special tokens that are in a template but not in the tokenizer, in the order in which they occur."""
    return [name for name in dict.fromkeys(re.findall(SPECIAL_LOOKING, template)) if name not in special_tokens]


def reserved_names(special_tokens: Mapping[str, int]) -> list[str]:
    """Return the names of reserved special tokens, sorted by id."""
    names = [name for name in special_tokens if re.search(_RESERVED, name)]
    return sorted(names, key=special_tokens.__getitem__)


# ---------------------------------------------------------------- tokens of the user


def _require_new_name(name: str, existing: Collection[str], setting: str) -> None:
    """Raise ConfigError if `name` cannot be used as the name of a new special token."""
    if name in existing:
        raise ConfigError(setting, f"{name} is already a special token")
    if len(name) < 2:
        raise ConfigError(setting, f"{name!r} is too short for the name of a special token")


def remap_reserved(special_tokens: Mapping[str, int], reuse_reserved_tokens: Mapping[str, str]) -> dict[str, int]:
    """Return a copy of `special_tokens` in which some reserved tokens have new names. Raises ConfigError for invalid names.

    reuse_reserved_tokens: new name -> reserved token to rename, such as {"<|im_start|>": "<|reserved_special_token_0|>"}.
    """
    key = "tokenizer.reuse_reserved_tokens"
    result = dict(special_tokens)
    for name, reserved in reuse_reserved_tokens.items():
        _require_new_name(name, special_tokens, key)
        if reserved not in reserved_names(special_tokens):
            raise ConfigError(key, f"the tokenizer has no reserved token {reserved}")
        if reserved not in result:
            raise ConfigError(key, f"{reserved} is given two new names")
        result[name] = result.pop(reserved)
    return result


class WithAddedTokens(Tokenizer):
    """A tokenizer with special tokens appended to its vocabulary. Encoding text never produces an appended token."""

    def __init__(self, base: Tokenizer, names: Sequence[str]):
        """Raises ConfigError for names that are already in use or too short."""
        for i, name in enumerate(names):
            _require_new_name(name, {*base.special_tokens, *names[:i]}, "tokenizer.extra_special_tokens")
        self._base = base
        self._added = {name: base.vocab_size + i for i, name in enumerate(names)}
        self.vocab_size = base.vocab_size + len(names)
        self.bos, self.eos, self.prefix, self.files = base.bos, base.eos, base.prefix, base.files
        self.warnings, self.parts_fingerprint = base.warnings, base.parts_fingerprint
        self.added_tokens = base.added_tokens
        self.special_tokens = {**base.special_tokens, **self._added}
        shape = json.dumps([base.fingerprint, list(names)])
        self.fingerprint = f"{base.fingerprint}-{hashlib.sha256(shape.encode()).hexdigest()[:8]}"
        self.encode = base.encode
        self.encode_array = base.encode_array
        self.encode_parts = base.encode_parts

    def decode(self, tokens: Sequence[int]) -> str:
        first, names = self._base.vocab_size, list(self._added)
        pieces = []
        for is_added, group in itertools.groupby(tokens, lambda token: token >= first):
            run = list(group)
            pieces += [names[token - first] for token in run] if is_added else [self._base.decode(run)]
        return "".join(pieces)

    def text_bytes(self) -> np.ndarray:
        return np.concatenate([self._base.text_bytes(), np.zeros(len(self._added), np.int64)])

    def huggingface_files(self) -> dict[str, bytes]:
        files = dict(self._base.huggingface_files())
        added = added_tokens(self._added)
        if "tokenizer.json" in files:
            content = json.loads(files["tokenizer.json"])
            content["added_tokens"] = [*content.get("added_tokens", []), *added]
            files["tokenizer.json"] = json_bytes(content)
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        decoder = config.get("added_tokens_decoder", {})
        if decoder or "tokenizer.json" not in files or "tokenizer.model" in files:
            config["added_tokens_decoder"] = decoder | {str(entry.pop("id")): entry for entry in map(dict, added)}
        files["tokenizer_config.json"] = json_bytes(config)
        return files


# ---------------------------------------------------------------- tokens of Hugging Face's files

_FIELDS = ("content", "lstrip", "rstrip", "normalized", "single_word", "special")
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def name_of(value: Any) -> str | None:
    """Return the name of a special token. value: its name, or an object with the name as "content"."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else None


def missing_token(what: str, file: str) -> ConfigError:
    """Return the error of a file that names a token that the vocabulary does not have. transformers would give it a new id."""
    message = f"{file} names {what}, which the vocabulary does not have"
    way = "correct the name, remove it, or list the token with its id in added_tokens_decoder of tokenizer_config.json"
    return ConfigError("tokenizer.path", f"{message}; {way}")


def configured_tokens(beside: Mapping[str, Mapping], folder: Path) -> tuple[str, dict[int, dict[str, Any]]]:
    """Return the file beside the vocabulary that defines added tokens, and the content and the flags of each token by its id, as
    far as the file states them. Raises ConfigError.

    Args:
        beside: Objects in the JSON files of the folder, by file name.
        folder: For messages.
    """
    file = "tokenizer_config.json"
    entries = beside.get(file, {}).get("added_tokens_decoder")
    try:
        if entries is None:  # the format of older versions of transformers, which has no flags
            file = "added_tokens.json"
            entries = {i: {"content": name} for name, i in beside.get(file, {}).items()}
        tokens = {int(i): {n: value for n, value in entry.items() if n in _FIELDS} for i, entry in entries.items()}
        for token in tokens.values():
            types = {name: type(value) for name, value in token.items()}
            if not token["content"] or types != {name: str if name == "content" else bool for name in token}:
                raise ValueError
    except (TypeError, ValueError, AttributeError, KeyError):
        raise ConfigError("tokenizer.path", f"{folder / file} does not list added tokens with their ids") from None
    return file, dict(sorted(tokens.items()))


class FolderTokens:
    """The added tokens of a tokenizer in Hugging Face's format: those of tokenizer.json, and those that other files add or
    change, as transformers reads them. Their flags decide what is special, and so does a role, such as EOS."""

    def __init__(self, package: ModuleType, tokenizer: Any, beside: Mapping[str, Mapping], folder: Path):
        """Add the tokens to the tokenizer.

        Args:
            package: The package `tokenizers`.
            tokenizer: The tokenizers.Tokenizer of the folder's tokenizer.json, which is changed.
            beside: Objects in the JSON files beside it, by file name.
            folder: For messages.

        Raises:
            ConfigError: A token would get another id than a file states, or a file names an unknown special token.
        """
        self._package, self._tokenizer = package, tokenizer
        config = beside.get("tokenizer_config.json", {})
        replacing = {} if "added_tokens_decoder" in config else beside.get("special_tokens_map.json", {})
        names = {**config, **replacing}
        field = next((name for name in ("extra_special_tokens", "additional_special_tokens") if names.get(name)), "")
        listed = names.get(field, [])
        listed = list(listed.values()) if isinstance(listed, Mapping) else listed
        extra = [name_of(value) for value in listed] if isinstance(listed, list) else []
        self._named = {*(name_of(names.get(role)) for role in _ROLES), *extra} - {None}
        self._add_configured(beside, folder)
        if missing := [name for name in extra if name and tokenizer.token_to_id(name) is None]:
            file = "special_tokens_map.json" if field in replacing else "tokenizer_config.json"
            raise missing_token(f"the special token {missing[0]}", file)
        added = {token.content for token in self.by_id().values()}
        known = sorted(name for name in self._named - added if tokenizer.token_to_id(name) is not None)
        tokenizer.add_special_tokens([package.AddedToken(name, special=True, normalized=False) for name in known])

    def _add_configured(self, beside: Mapping[str, Mapping], folder: Path) -> None:
        tokenizer = self._tokenizer
        file, entries = configured_tokens(beside, folder)
        if file == "added_tokens.json":
            present = {token.content: token for token in self.by_id().values()}
            for entry in entries.values():
                name = entry["content"]
                is_named = name in self._named
                entry |= _flags(present[name]) if name in present else {"special": is_named, "normalized": not is_named}
        for token_id, entry in entries.items():
            name = entry["content"]
            existing = tokenizer.token_to_id(name)
            tokenizer.add_tokens([self._package.AddedToken(**entry)])
            added = tokenizer.token_to_id(name)
            if added != token_id:
                reason = f"tokenizer.json gives it {added}" if existing is not None else f"the next free id is {added}"
                message = f"{file} gives {name} the id {token_id}, but {reason}; correct one of the two files"
                raise ConfigError("tokenizer.path", message)

    def by_id(self) -> dict[int, Any]:
        """Return id -> tokenizers.AddedToken, sorted by id."""
        return dict(sorted(self._tokenizer.get_added_tokens_decoder().items()))

    def written_into(self, tokenizer_json: bytes) -> bytes:
        """Return the content of a tokenizer.json with all added tokens."""
        entries = [{"id": i} | _flags(token) for i, token in self.by_id().items()]
        return json_bytes(json.loads(tokenizer_json) | {"added_tokens": entries})

    def protect_special(self) -> None:
        """Set the flag of the tokens that have a role without it, as transformers does."""
        forgotten = (token for token in self.by_id().values() if not token.special and token.content in self._named)
        tokens = [_flags(token) | {"special": True} for token in forgotten]
        self._tokenizer.add_special_tokens([self._package.AddedToken(**flags) for flags in tokens])


def _flags(token: Any) -> dict[str, Any]:
    return {name: getattr(token, name) for name in _FIELDS}

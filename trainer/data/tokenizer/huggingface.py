"""Tokenizers in Hugging Face's format, run by the package `tokenizers`."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.config import ConfigError
from trainer.base.config.packages import require_package
from trainer.base.config.tokenizer_and_template import TEMPLATE_FILES, TOOL_TEMPLATE, combined_templates
from trainer.data.tokenizer.hf_json import is_byte_level, json_bytes, json_files, json_object
from trainer.data.tokenizer.placeholders import PlaceholderEncoder, depends_on_neighbours
from trainer.data.tokenizer.protocol import Tokenizer, content_fingerprint, piece_bytes
from trainer.data.tokenizer.special_tokens import FolderTokens, missing_token, name_of

# Files in which Hugging Face's formats name EOS, in order of precedence.
_NAMES = ("tokenizer_config.json", "special_tokens_map.json")
_IDS = ("generation_config.json", "config.json")
COMPANION_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    *("tokenizer.model", "vocab.json", "merges.txt"),  # read by llama.cpp, and by the slow tokenizers of transformers 4
)
"""Names of the files that are saved and exported together with a tokenizer.json."""
_JSON_FILES = (*_NAMES, *_IDS, "added_tokens.json", "chat_template.json")
"""Names of the files beside a tokenizer.json that contain JSON objects. One that is damaged is refused before training."""
LLAMA_LIKE = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
"""Classes that pad on the left by default. Versions of transformers before 5 follow their add_bos_token (default: true), and not
the post-processor."""


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer that is defined by a tokenizer.json and by the files that transformers reads beside it."""

    def __init__(self, content: bytes, path: Path, beside: Mapping[str, dict], companions: Mapping[str, bytes]):
        """Build the tokenizer.

        Args:
            content: Of the tokenizer.json.
            path: Its path, for messages.
            beside: Objects in the JSON files beside it, by file name, as far as they exist.
            companions: Contents of the files that are saved with it, by file name.

        Raises:
            ConfigError: The files are damaged, contradict each other, or name no EOS.
        """
        package = require_package("tokenizers", "tokenizer.backend")
        self._beside, self._companions = beside, companions
        self._tokenizer = tokenizer = _parse(package, content, path)
        plain, unchanged = _plain_tokens(tokenizer), repr(tokenizer.get_added_tokens_decoder())
        tokens = FolderTokens(package, tokenizer, beside, path.parent)
        is_complete = repr(tokenizer.get_added_tokens_decoder()) == unchanged
        self._json = content if is_complete else tokens.written_into(content)
        tokens.protect_special()
        ids = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1  # the ids may have gaps
        added = tokens.by_id()
        special = {i: token for i, token in added.items() if token.special}
        self.special_tokens = {token.content: i for i, token in special.items()}
        self.added_tokens = {token.content: i for i, token in added.items() if not token.special}
        self.prefix = _prefix(tokenizer)
        self.bos = self._find_bos(ids)
        self.eos = self._find_eos(ids)
        # The ids may come from a file of the model, which is not saved with the tokenizer.
        ids_file = json_files({"generation_config.json": {"bos_token_id": self.bos, "eos_token_id": self.eos}})
        self.files = {"tokenizer.json": content} | companions | ids_file
        shape = f"{self.bos if self.prefix == (self.bos,) else list(self.prefix)} {self.eos}"
        shape += "" if _plain_tokens(tokenizer) == plain else f" {_plain_tokens(tokenizer)}"
        self.fingerprint = content_fingerprint("huggingface", content + shape.encode())
        stated = self._json_of(_NAMES[0]).get("add_bos_token")
        if stated not in (None, bool(self.prefix)):
            says = f"tokenizer_config.json says add_bos_token = {json.dumps(stated)}"
            does = f"{'adds' if self.prefix else 'does not add'} BOS, which counts"
            self.warnings = (f"{says}, but tokenizer.json {does}",)
        self._parts = None
        if depends_on_neighbours(json.loads(content), added.values()):
            self._parts = PlaceholderEncoder(package, tokenizer, special)
            self.parts_fingerprint = content_fingerprint("placeholders", repr([*added.items()]).encode())

    @classmethod
    def load(cls, path: Path) -> "HuggingFaceTokenizer":
        """Read a tokenizer from its tokenizer.json or from its folder. Raises ConfigError or OSError."""
        path = path / "tokenizer.json" if path.is_dir() else path
        content = path.read_bytes()
        files = {name: path.with_name(name) for name in (*_JSON_FILES, *COMPANION_FILES)}
        present = {name: file for name, file in files.items() if file.exists()}
        beside = {name: json_object(file) for name, file in present.items() if name in _JSON_FILES}
        companions = {name: files[name].read_bytes() for name in COMPANION_FILES if files[name].is_file()}
        default, tool_use = companions.get(TEMPLATE_FILES[0]), path.parent / TOOL_TEMPLATE
        if default is not None and tool_use.is_file():
            with suppress(UnicodeDecodeError):  # what reads the template reports the reason
                both = combined_templates(default.decode(), tool_use.read_text("utf-8"))
                companions[TEMPLATE_FILES[0]] = both.encode()
        return cls(content, path, beside, companions)

    def _json_of(self, file: str) -> dict[str, Any]:
        return self._beside.get(file, {})

    def _find_bos(self, ids: Mapping[str, int]) -> int | None:
        """Return the id of the token that the folder's files call bos_token, or None."""
        for file in _NAMES:
            config = self._json_of(file)
            if "bos_token" in config:
                return _named_token("bos_token", config, file, ids)
        if len(self.prefix) == 1:
            return self.prefix[0]
        if _NAMES[0] in self._beside:
            return None  # what a model's file calls bos_token_id is no token of its tokenizer
        found = (self._json_of(file).get("bos_token_id") for file in _IDS)
        return next((token for token in found if self._is_token(token)), None)

    def _find_eos(self, ids: Mapping[str, int]) -> int:
        """Return the id of the EOS token, as specified by a file in the tokenizer's folder."""
        unknown = ""
        for file in (*_NAMES, *_IDS):
            config = self._json_of(file)
            if (token := _named_token("eos_token", config, file, ids)) is not None:
                return token
            token = config.get("eos_token_id")
            token = token[0] if isinstance(token, list) and token else token
            if self._is_token(token):
                return token
            if token is not None and not unknown:
                unknown = f"; eos_token_id {json.dumps(token):.40} of {file} is not the id of one of the {self.vocab_size} tokens"
        message = f"the tokenizer's folder names no EOS token in any of {', '.join((*_NAMES, *_IDS))}{unknown}"
        way = "name the token that ends a document as eos_token in tokenizer_config.json"
        raise ConfigError("tokenizer.path", f"{message}; {way}")

    def _is_token(self, token: Any) -> bool:
        return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < self.vocab_size

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_parts(self, parts: Sequence[str | int], before: Sequence[str | int] = ()) -> list[int]:
        if self._parts is None:
            return super().encode_parts(parts, before)
        return self._parts.encode(parts, before)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def text_bytes(self) -> np.ndarray:
        byte_level = is_byte_level(json.loads(self.files["tokenizer.json"]))
        special = set(self.special_tokens.values())
        pieces = [self._tokenizer.id_to_token(token) or "" for token in range(self.vocab_size)]
        num_bytes = [len(piece) if byte_level else piece_bytes(piece) for piece in pieces]
        return np.array([0 if token in special else count for token, count in enumerate(num_bytes)])

    def huggingface_files(self) -> dict[str, bytes]:
        files = {"tokenizer.json": self._json} | self._companions
        config, adds_bos = json.loads(files.get("tokenizer_config.json", b"{}")), bool(self.prefix)
        if _stated_add_bos(config) not in (None, adds_bos):
            files["tokenizer_config.json"] = json_bytes(config | {"add_bos_token": adds_bos})
        return files


def _named_token(role: str, config: Mapping[str, Any], file: str, ids: Mapping[str, int]) -> int | None:
    """Return the id of the token that a configuration gives a role such as eos_token, or None if it names none.

    Args:
        file: Name of the configuration's file.
        ids: Token -> id.

    Raises:
        ConfigError: The vocabulary does not have the token.
    """
    name = name_of(config.get(role))
    if not name:
        return None
    if name not in ids:
        raise missing_token(f"{name} as {role}", file)
    return ids[name]


def _stated_add_bos(config: Mapping[str, Any]) -> bool | None:
    """Return whether older versions of transformers prepend BOS because of a tokenizer_config.json, or None if it does not
    matter to them."""
    name = config.get("tokenizer_class")
    if isinstance(name, str) and name.removesuffix("Fast") in LLAMA_LIKE:
        return config.get("add_bos_token", True)
    return config.get("add_bos_token")


def _parse(package: Any, content: bytes, path: Path) -> Any:
    """Return a tokenizers.Tokenizer. Raises ConfigError."""
    try:
        tokenizer = package.Tokenizer.from_str(content.decode())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic of the package's Rust code is not an Exception
        raise ConfigError("tokenizer.path", f"{path} is not a valid tokenizer.json") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # names in text are encoded as plain text
    return tokenizer


def _plain_tokens(tokenizer: Any) -> list[str]:
    """Return the added tokens that are recognized in plain text."""
    added = tokenizer.get_added_tokens_decoder()
    return [f"{i} {added[i]!r}" for i in sorted(added) if not added[i].special]


def _prefix(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that the post-processor prepends to a text."""
    for text in ("a", "0", " ", "."):  # a vocabulary may lack some of them
        encoding = tokenizer.encode(text)
        if any(sequence is not None for sequence in encoding.sequence_ids):
            start = next(i for i, sequence in enumerate(encoding.sequence_ids) if sequence is not None)
            return tuple(encoding.ids[:start])
    return tuple(tokenizer.encode("").ids)

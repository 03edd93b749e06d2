"""Mistral's tekken.json: byte-pair ranks after a block of special tokens."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.config import ConfigError
from trainer.base.system.files import parse_json_object
from trainer.data.tokenizer.byte_pair import LONGEST_RUN, LONGEST_TEXT, byte_pair_encoding, short_pieces
from trainer.data.tokenizer.hf_json import json_files, tokenizer_json
from trainer.data.tokenizer.protocol import Tokenizer, content_fingerprint
from trainer.data.tokenizer.special_tokens import remap_reserved

# Special tokens of the first version, whose files do not list them.
_FIRST_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def _parse(content: bytes) -> tuple[str, dict[bytes, int], list[str]]:
    """Return the pattern, the ranks without special tokens, and the names of the special tokens. Raises KeyError, TypeError or
    ValueError for another content."""
    tekken: dict[str, Any] = parse_json_object(content.decode())
    config = tekken["config"]
    num_special = config["default_num_special_tokens"]
    tokens = tekken["vocab"][: config["default_vocab_size"] - num_special]
    ranks = {base64.b64decode(token["token_bytes"], validate=True): token["rank"] for token in tokens}
    if list(ranks.values()) != list(range(config["default_vocab_size"] - num_special)):
        raise ValueError
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError
    listed = tekken.get("special_tokens")
    if listed is None and int(config["version"].removeprefix("v").partition("m")[0]) > 7:
        raise ValueError
    entries = enumerate(_FIRST_SPECIAL_TOKENS) if listed is None else ((t["rank"], t["token_str"]) for t in listed)
    names = dict(entries)
    special = [names.pop(i, None) or f"<SPECIAL_{i}>" for i in range(num_special)]
    if names or len(set(special)) < num_special or not {"<s>", "</s>"} <= set(special):
        raise ValueError
    return config["pattern"], ranks, special


class TekkenTokenizer(Tokenizer):
    """Byte-pair encoding as in mistral_common: the ids of all special tokens precede those of text."""

    def __init__(self, content: bytes, path: Path, reuse_reserved_tokens: Mapping[str, str] | None = None):
        """Build the tokenizer.

        Args:
            content: Of a tekken.json.
            path: Its path, for messages.
            reuse_reserved_tokens: New name -> reserved token to rename, such as <SPECIAL_20>.

        Raises:
            ConfigError: The content is not that of a tekken.json, or a name cannot be used.
        """
        try:
            self._pattern, ranks, special = _parse(content)
        except (KeyError, TypeError, ValueError, AttributeError, binascii.Error):
            raise ConfigError("tokenizer.path", f"{path} is not a tekken.json") from None
        self.files = {"tekken.json": content}
        self._first = len(special)
        self._ranks = {token: self._first + rank for token, rank in ranks.items()}
        self._encoding = byte_pair_encoding(path.name, self._pattern, ranks, {})
        self.vocab_size = self._first + len(ranks)
        names = {name: token for token, name in enumerate(special)}
        self.bos, self.eos = names["<s>"], names["</s>"]
        self.prefix = (self.bos,)
        self.special_tokens = remap_reserved(names, reuse_reserved_tokens or {})
        self._names = {token: name for name, token in self.special_tokens.items()}
        self.fingerprint = content_fingerprint("tekken", content + f"{LONGEST_TEXT}{LONGEST_RUN}".encode())

    @classmethod
    def load(cls, path: Path, reuse_reserved_tokens: Mapping[str, str] | None = None) -> "TekkenTokenizer":
        return cls(path.read_bytes(), path, reuse_reserved_tokens)

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        pieces = [self._encoding.encode_to_numpy(piece, disallowed_special=()) for piece in short_pieces(text)]
        return np.concatenate([np.empty(0, np.uint32), *pieces]) + np.uint32(self._first)

    def decode(self, tokens: Sequence[int]) -> str:
        texts = []
        for is_special, group in groupby(tokens, lambda token: token < self._first):
            run = list(group)
            texts += (
                map(self._names.__getitem__, run)
                if is_special
                else [self._encoding.decode([t - self._first for t in run])]
            )
        return "".join(texts)

    def text_bytes(self) -> np.ndarray:
        num_bytes = [len(self._encoding.decode_single_token_bytes(rank)) for rank in range(len(self._ranks))]
        return np.array([0] * self._first + num_bytes)

    def huggingface_files(self) -> dict[str, bytes]:
        content = tokenizer_json(self._ranks, self.special_tokens, self._pattern, bos="<s>")
        roles = {
            f"{role}_token": f"<{name}>" for role, name in (("bos", "s"), ("eos", "/s"), ("unk", "unk"), ("pad", "pad"))
        }
        config = {name: token for name, token in roles.items() if token in self.special_tokens}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        return json_files({"tokenizer.json": content, "tokenizer_config.json": config})

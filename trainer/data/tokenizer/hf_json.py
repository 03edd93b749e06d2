"""JSON files of tokenizers in Hugging Face's format, and the conversion of byte-pair ranks to a tokenizer.json."""

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.base.config import ConfigError
from trainer.base.system.files import read_json_object

SPECIAL_TOKEN_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if the file is missing. Raises ConfigError."""
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}
    except ValueError:
        raise ConfigError("tokenizer.path", f"{path} is not a JSON object") from None


def json_bytes(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, indent=1).encode()


def json_files(contents: dict[str, dict[str, Any]]) -> dict[str, bytes]:
    return {name: json_bytes(content) for name, content in contents.items()}


def is_byte_level(content: Mapping[str, Any]) -> bool:
    """Return whether the pieces of a tokenizer.json are bytes, as of GPT-2, so that a character of a piece is one byte."""
    return '"ByteLevel"' in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])


def byte_to_char() -> dict[int, str]:
    """Return byte -> character of GPT-2's byte-level BPE. Printable bytes are unchanged. Others become characters from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in sorted(printable)} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def merges(ranks: Mapping[bytes, int]) -> Iterable[tuple[bytes, bytes]]:
    """Yield the two halves of each merged token, in the order of the tokens' ranks. tiktoken files list only merged tokens, so
    the halves are recovered by applying the merges of lower rank to the token's bytes."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        pieces = [token[i : i + 1] for i in range(len(token))]
        while len(pieces) > 2:
            pair_ranks = [ranks.get(a + b, rank) for a, b in itertools.pairwise(pieces)]
            lowest = min(pair_ranks)
            if lowest >= rank:
                break
            i = pair_ranks.index(lowest)
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        if len(pieces) == 2:
            yield pieces[0], pieces[1]


def added_tokens(special: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the entries of special tokens in a tokenizer.json. special: name -> id."""
    # In the order of their ids: readers number them from the last rank on, whatever "id" states.
    names = sorted(special, key=special.__getitem__)
    return [{"id": special[name], "content": name, **SPECIAL_TOKEN_FLAGS} for name in names]


def prepend_bos(bos: str, token: int) -> dict[str, Any]:
    """Return the post-processor of a tokenizer.json that prepends BOS to every text.

    Args:
        bos: Name of the token.
        token: Its id.
    """
    parts = [
        [{"SpecialToken": {"id": bos, "type_id": i}}, {"Sequence": {"id": "AB"[i], "type_id": i}}] for i in range(2)
    ]
    names = {bos: {"id": bos, "ids": [token], "tokens": [bos]}}
    return {"type": "TemplateProcessing", "single": parts[0], "pair": parts[0] + parts[1], "special_tokens": names}


def tokenizer_json(ranks: Mapping[bytes, int], special: Mapping[str, int], pattern: str, bos: str) -> dict[str, Any]:
    """Return the content of a tokenizer.json.

    Args:
        ranks: Bytes of a token -> id.
        special: Name -> id.
        pattern: Regular expression that splits text before merging.
        bos: Name of the special token that is prepended to every text.
    """
    char_of = byte_to_char()
    # Readers number added tokens from the last rank on, whatever "id" states, unless the vocabulary contains them.
    before_ranks = {name: token for name, token in special.items() if token < max(ranks.values())}

    def to_text(token: bytes) -> str:
        return "".join(char_of[byte] for byte in token)

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(special),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": prepend_bos(bos, special[bos]),
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a word that has a rank is one token, as in tiktoken
            "vocab": before_ranks | {to_text(token): rank for token, rank in ranks.items()},
            "merges": [[to_text(a), to_text(b)] for a, b in merges(ranks)],
        },
    }

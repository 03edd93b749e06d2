"""Byte-pair ranks as the tokenizer.json of Hugging Face's `tokenizers`."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any


def byte_to_char() -> dict[int, str]:
    """Byte-level BPE writes each byte as a printable letter: itself where it is one, else the next free one from 256 on
    (Radford et al. 2019, GPT-2)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in sorted(printable)} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def merges(ranks: Mapping[bytes, int]) -> Iterable[tuple[bytes, bytes]]:
    """The pairs that were joined, in the order of their ranks. A rank file has only what came out: a token is made of the two
    parts that the merges of lower rank leave of its bytes."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            lowest = min(joined)
            if lowest >= rank:
                break
            at = joined.index(lowest)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def tokenizer_json(ranks: Mapping[bytes, int], special: Mapping[str, int], pattern: str, bos: str) -> dict[str, Any]:
    """ranks: token -> its id; special: name -> id; pattern: how text is split first; bos: the special token that opens every
    text."""
    char_of = byte_to_char()

    def written(token: bytes) -> str:
        return "".join(char_of[byte] for byte in token)

    text = {"Sequence": {"id": "A", "type_id": 0}}
    opening = {"SpecialToken": {"id": bos, "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    opening_second = {"SpecialToken": {"id": bos, "type_id": 1}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        # By their numbers: who reads it counts on from the ranks, whatever "id" says.
        "added_tokens": [{"id": special[name], "content": name, **flags} for name in sorted(special, key=special.get)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [opening, text],
            "pair": [opening, text, opening_second, second],
            "special_tokens": {bos: {"id": bos, "ids": [special[bos]], "tokens": [bos]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a whole word that has a rank is that token, as tiktoken has it
            "vocab": {written(token): rank for token, rank in ranks.items()},
            "merges": [[written(a), written(b)] for a, b in merges(ranks)],
        },
    }

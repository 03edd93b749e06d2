"""Tokenizers as llama.cpp reads them from a GGUF file: its two algorithms, byte-level BPE and sentencepiece's BPE, with the
vocabulary and the settings that it needs. What it would encode in another way is refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

from trainer.base.config import ConfigError
from trainer.base.system.files import parse_json_object
from trainer.checkpoint.formats.model_metadata import CHAT_TEMPLATE, GENERATION_CONFIG, ids_of_ends
from trainer.data.tokenizer.byte_pair import LLAMA3_PATTERN, PATTERNS
from trainer.data.tokenizer.hf_json import is_byte_level
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.data.tokenizer.sentencepiece_json import parse
from trainer.data.tokenizer.special_tokens import name_of

_SPACE = "\u2581"
_TEKKEN = PATTERNS["o200k"].replace(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SPLITS: dict[tuple[str, ...], dict[bool, str]] = {
    (LLAMA3_PATTERN,): {True: "llama-bpe", False: "dbrx"},
    (PATTERNS["qwen2"],): {False: "qwen2"},
    (PATTERNS["gpt2"],): {False: "gpt-2"},
    (r"\p{N}", PATTERNS["gpt2"]): {False: "smollm"},
    (PATTERNS["o200k"],): {False: "gpt-4o"},
    (_TEKKEN,): {True: "tekken"},
    _DEEPSEEK_V3: {False: "deepseek-v3"},
}
"""Regular expressions that split text one after the other -> whether a word that is a token is not merged -> llama.cpp's name of
this pre-tokenizer (src/llama-vocab.cpp)."""
_APPROXIMATED = ("gpt-4o", "tekken")
"""Pre-tokenizers whose classes of letters llama.cpp computes in another way."""


class TokenType(IntEnum):
    """Values of llama.cpp."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer as llama.cpp reads it."""

    keys: Mapping[str, Any]
    """Keys of the metadata without "tokenizer."."""
    remarks: tuple[str, ...]
    """Which texts llama.cpp encodes differently."""


def vocabulary(
    files: Mapping[str, bytes], tokenizer: Tokenizer, vocab_size: int, config: Mapping[str, Any]
) -> Vocabulary:
    """Return a tokenizer for llama.cpp. Raises ConfigError if llama.cpp would encode all texts differently.

    Args:
        files: Those of an export in Hugging Face's format.
        tokenizer: The same tokenizer.
        vocab_size: That of the model, with the rows that pad it.
        config: Ids of special tokens, as in config.json.
    """
    content = parse_json_object(files.get("tokenizer.json", b"{}"))
    model = content.get("model") or {}
    if model.get("type") != "BPE":
        raise _refusal(f"is not byte-pair encoding, but {model.get('type', 'no tokenizer.json')}")
    if tokenizer.prefix not in ((), (tokenizer.bos,)):
        raise _refusal(f"begins each text with the tokens {list(tokenizer.prefix)}, not only with BOS")
    if flag := next(
        (name for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(name)), ""
    ):
        raise _refusal(f"has a {flag}")
    own = _byte_level(content) if is_byte_level(content) else _sentencepiece(content, files)
    names, types = _tokens(content, vocab_size)
    keys = {"ggml.tokens": names, "ggml.token_type": types, **own.keys}
    if own.scores is not None:
        # llama.cpp never merges to tokens without a score of their own. These are its converter's values.
        absent = {TokenType.UNUSED: -10_000.0}
        keys["ggml.scores"] = [
            own.scores.get(name, absent.get(type_, -1000.0)) for name, type_ in zip(names, types, strict=True)
        ]
    keys |= _roles(files, tokenizer, config) | _templates(files)
    return Vocabulary(keys=keys, remarks=(*own.remarks, *_remarks(content)))


def _refusal(problem: str) -> ConfigError:
    return ConfigError("", f"the tokenizer cannot be written for llama.cpp: it {problem}")


def _tokens(content: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the name and the type of each row of the embeddings."""
    model, added = content["model"], {entry["id"]: entry for entry in content.get("added_tokens") or ()}
    names = {token: piece for piece, token in model["vocab"].items()}
    types = dict.fromkeys(names, TokenType.NORMAL)
    for token, entry in added.items():
        # llama.cpp searches the names of these tokens in the text before it replaces spaces.
        names[token] = entry["content"] if entry["special"] else entry["content"].replace(_SPACE, " ")
        types[token] = TokenType.CONTROL if entry["special"] else TokenType.USER_DEFINED
    if model.get("byte_fallback"):
        types |= {model["vocab"][name]: TokenType.BYTE for name in _BYTES}
    if model.get("unk_token") is not None:
        types[model["vocab"][model["unk_token"]]] = TokenType.UNKNOWN
    if (last := max(names)) >= vocab_size:
        raise _refusal(f"has the token {last}, but the model only {vocab_size} rows")
    rows = range(vocab_size)
    listed = [names.get(row, f"[PAD{row}]") for row in rows]
    if len({*listed}) < vocab_size:
        twice = next(name for i, name in enumerate(listed) if name in listed[:i])
        raise _refusal(f"has two tokens named {twice}")
    return listed, [int(types.get(row, TokenType.UNUSED)) for row in rows]


def _roles(files: Mapping[str, bytes], tokenizer: Tokenizer, ids_in_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the tokens with a role, and whether texts begin with BOS."""
    config, generation = (
        parse_json_object(files.get(name, b"{}")) for name in ("tokenizer_config.json", GENERATION_CONFIG)
    )
    known = tokenizer.special_tokens
    ids = {"bos": tokenizer.bos, "eos": tokenizer.eos}
    named = {"unknown": "unk_token", "padding": "pad_token"}
    ids |= {role: known.get(name_of(config.get(key)) or "") for role, key in named.items()}
    # llama.cpp ends a text at these too. It has two more roles for them.
    ends = dict.fromkeys([*ids_of_ends(ids_in_config), *ids_of_ends(generation)])
    others = [token for token in ends if token != tokenizer.eos]
    ids |= dict(zip(("eot", "eom"), others, strict=False))  # of more, llama.cpp ends at those that it knows by name
    keys = {f"ggml.{role}_token_id": token for role, token in ids.items() if token is not None}
    return keys | {"ggml.add_bos_token": bool(tokenizer.prefix), "ggml.add_eos_token": False}


def _templates(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the keys of the chat templates."""
    template = parse_json_object(files.get("tokenizer_config.json", b"{}")).get("chat_template")
    if CHAT_TEMPLATE in files:
        template = files[CHAT_TEMPLATE].decode()
    if not isinstance(template, list):
        return {} if template is None else {"chat_template": template}
    named = {entry["name"]: entry["template"] for entry in template}
    keys = {"chat_template" if name == "default" else f"chat_template.{name}": text for name, text in named.items()}
    return keys | {"chat_templates": [name for name in named if name != "default"]}


def _remarks(content: Mapping[str, Any]) -> list[str]:
    """Return which texts with added tokens llama.cpp encodes differently."""
    flags = ("lstrip", "rstrip", "single_word")
    taken = [entry["content"] for entry in content.get("added_tokens") or () if any(entry.get(f) for f in flags)]
    text = "llama.cpp does not take the white space around a special token, or require that it is a word"
    return [f"{text}, unlike the tokenizer for {', '.join(taken[:3])}"] if taken else []


# ---------------------------------------------------------------- the two algorithms


@dataclass(frozen=True, kw_only=True)
class _Algorithm:
    keys: Mapping[str, Any]
    remarks: tuple[str, ...] = ()
    scores: Mapping[str, float] | None = None
    """Name of a token -> score."""


def _parts(component: Mapping[str, Any] | None, members: str) -> list[Mapping[str, Any]]:
    """Return the parts of a normalizer or pre-tokenizer. members: key of those of a sequence."""
    if component is None:
        return []
    return [*component[members]] if component.get("type") == "Sequence" else [component]


def _byte_level(content: Mapping[str, Any]) -> _Algorithm:
    """Return the keys of byte-level BPE. Raises ConfigError."""
    model, normalizers = content["model"], _parts(content.get("normalizer"), "normalizers")
    if other := next((part["type"] for part in normalizers if part["type"] != "NFC"), ""):
        raise _refusal(f"normalizes text with {other}")
    splits = tuple(_split(part) for part in _parts(content.get("pre_tokenizer"), "pretokenizers"))
    splits = tuple(split for split in splits if split)
    by_flag = _SPLITS.get(splits)
    if by_flag is None:
        raise _refusal(
            f"splits text with the regular expression {' and '.join(splits) or '(none)'}, which it does not know"
        )
    ignores, merges = bool(model.get("ignore_merges")), [_pair(merge) for merge in model["merges"]]
    if ignores not in by_flag and not _reaches_all(model["vocab"], merges):
        flag = "takes a word that is a token as it is, which" if ignores else "merges the parts of each word, which"
        raise _refusal(f"{flag} llama.cpp does not with this regular expression")
    name = by_flag.get(ignores) or next(iter(by_flag.values()))
    keys = {"ggml.model": "gpt2", "ggml.pre": name, "ggml.merges": [f"{a} {b}" for a, b in merges]}
    remarks = []
    if normalizers:
        remarks.append("llama.cpp does not normalize text (NFC): it encodes text in another form differently")
    if name in _APPROXIMATED:
        remarks.append("llama.cpp approximates this tokenizer's regular expression: it splits some words differently")
    return _Algorithm(keys=keys, remarks=tuple(remarks))


def _split(part: Mapping[str, Any]) -> str:
    """Return the regular expression with which a pre-tokenizer splits text, or "" if it does not. Raises ConfigError."""
    kind, pattern = part["type"], (part.get("pattern") or {}).get("Regex")
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return PATTERNS["gpt2"] if part.get("use_regex", True) else ""
    if kind == "Digits" and part.get("individual_digits"):
        return r"\p{N}"
    if kind == "Split" and pattern and part.get("behavior") == "Isolated" and not part.get("invert"):
        return pattern
    raise _refusal(f"splits text with {kind} in a way that it does not know")


def _pair(merge: str | list[str]) -> tuple[str, str]:
    """Return the two parts of a merge. Older files write them as one text."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def _reaches_all(vocab: Mapping[str, int], merges: list[tuple[str, str]]) -> bool:
    """Return whether merging the characters of each token's own text gives the token."""
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    return all(_is_reached(piece, ranks) for piece in vocab)


def _is_reached(piece: str, ranks: Mapping[tuple[str, str], int]) -> bool:
    parts = [*piece]
    while len(parts) > 1:
        found = [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not found:
            return False
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return True


_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def _sentencepiece(content: Mapping[str, Any], files: Mapping[str, bytes]) -> _Algorithm:
    """Return the keys of sentencepiece's BPE, which merges the two neighbours whose concatenation has the highest score. Raises
    ConfigError."""
    model = content["model"]
    if not model.get("byte_fallback") or any(name not in model["vocab"] for name in _BYTES):
        raise _refusal("has no tokens for single bytes")
    adds_space, remarks = _space_before_text(content)
    keys = {"ggml.model": "llama", "ggml.pre": "default", "ggml.add_space_prefix": adds_space}
    return _Algorithm(keys=keys, remarks=remarks, scores=_scores(model, files))


def _space_before_text(content: Mapping[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Return whether a space is added before each text, and a remark if llama.cpp adds it elsewhere too. Raises ConfigError if
    the text is changed in another way."""
    adds_space, remarks = False, ()
    parts = (
        *_parts(content.get("normalizer"), "normalizers"),
        *_parts(content.get("pre_tokenizer"), "pretokenizers"),
    )
    for part in parts:
        kind = part["type"]
        if kind == "Metaspace" and part.get("replacement", _SPACE) == _SPACE and not part.get("split"):
            scheme = part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never")
            adds_space = scheme != "never"
            where = " and after each special token" if scheme == "first" else ""
            text = f"llama.cpp adds a space also before a text that begins with one{where}, unlike this tokenizer"
            remarks = (text,) if adds_space else ()
        elif kind == "Prepend" and part["prepend"] == _SPACE:
            adds_space = True
        elif kind != "Replace" or (part["pattern"], part["content"]) != ({"String": " "}, _SPACE):
            raise _refusal(f"changes text with {kind} in a way that it does not know")
    return adds_space, remarks


def _scores(model: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, float]:
    """Return the score of each token: that of tokenizer.model, if it has the same pieces, or one that gives the same order of
    merges. Raises ConfigError if there is no such score."""
    vocab, merges = model["vocab"], [_pair(merge) for merge in model["merges"]]
    if "tokenizer.model" in files:
        pieces = parse(files["tokenizer.model"]).pieces
        if all(vocab.get(piece.piece) == token for token, piece in enumerate(pieces)):
            return {piece.piece: piece.score for piece in pieces}
    results = list(dict.fromkeys(a + b for a, b in merges))
    order = {piece: i for i, piece in enumerate(results)}
    ranks = [order[a + b] for a, b in merges]
    pairs = {*merges}
    is_listed = all(
        (piece[:i], piece[i:]) in pairs
        for piece in results
        for i in range(1, len(piece))
        if piece[:i] in vocab and piece[i:] in vocab
    )
    if ranks != sorted(ranks) or not is_listed:
        raise _refusal("merges pairs in an order that no score of each token gives")
    return {piece: -float(i) for piece, i in order.items()}

"""Conversion of sentencepiece models to the tokenizer.json of Hugging Face's `tokenizers`.

Each version of transformers converts tokenizer.model in its own way: some add the space before a text only if it does not start
with one, ignore the normalization, or load every model as byte-pair encoding. A tokenizer.json gives the same tokens in all.
"""

import base64
from collections.abc import Iterator
from typing import Any

from trainer.data.tokenizer.hf_json import SPECIAL_TOKEN_FLAGS, prepend_bos
from trainer.data.tokenizer.sentencepiece_proto import (
    BPE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
)

_SPACE = "\u2581"


def tokenizer_json(model: SentencePieceModel, bos: int | None) -> dict[str, Any] | None:
    """Return the content of a tokenizer.json, or None if the package has no such tokenizer. bos: token that is prepended to every
    text, if any.

    A piece of the type "user-defined" ends a text, as a special token does in a chat: the space that sentencepiece adds before a
    text is also added after such a piece.
    """
    types = {piece.type for piece in model.pieces}
    is_supported = model.type in (BPE, UNIGRAM) and model.escapes_whitespaces and not model.is_whitespace_suffix
    if not is_supported or UNUSED in types or UNKNOWN not in types:
        return None
    names = model.of_type(CONTROL) | model.of_type(USER_DEFINED)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": names[token], **SPECIAL_TOKEN_FLAGS, "special": token in model.of_type(CONTROL)}
            for token in sorted(names)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [*_normalizers(model)]},
        "pre_tokenizer": None,
        "post_processor": None if bos is None else prepend_bos(model.pieces[bos].text, bos),
        "decoder": {"type": "Sequence", "decoders": [*_decoders(model)]},
        "model": _bpe(model) if model.type == BPE else _unigram(model),
    }


def _normalizers(model: SentencePieceModel) -> Iterator[dict[str, Any]]:
    if model.charsmap:
        yield {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()}
    if model.removes_extra_whitespaces:
        # The package's own Strip also removes line ends.
        yield {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""}
        yield {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    if model.adds_prefix:
        yield {"type": "Prepend", "prepend": _SPACE}
    yield {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}


def _decoders(model: SentencePieceModel) -> Iterator[dict[str, Any]]:
    yield {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    yield {"type": "ByteFallback"}
    yield {"type": "Fuse"}
    if model.adds_prefix:
        yield {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _unigram(model: SentencePieceModel) -> dict[str, Any]:
    (unknown,) = model.of_type(UNKNOWN)
    normal = [piece.score for piece in model.pieces if piece.type == NORMAL]
    # The package would find the names of all pieces in a text, sentencepiece only those of normal ones.
    never = min(normal, default=0.0) - 1000.0
    vocab = [[piece.text, piece.score if piece.type == NORMAL else never] for piece in model.pieces]
    return {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": model.byte_fallback}


def _bpe(model: SentencePieceModel) -> dict[str, Any]:
    (unknown,) = model.of_type(UNKNOWN).values()
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.text: token for token, piece in enumerate(model.pieces)},
        "merges": _merges(model),
    }


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Return all pairs of pieces whose concatenation is a piece, sorted by the score of the latter. sentencepiece has no list of
    pairs: it merges the two neighbours whose concatenation has the highest score."""
    scores = {piece.text: piece.score for piece in model.pieces if piece.type == NORMAL}
    pairs = [
        (score, text[:i], text[i:])
        for text, score in scores.items()
        for i in range(1, len(text))
        if text[:i] in scores and text[i:] in scores
    ]
    return [(left, right) for _, left, right in sorted(pairs, key=lambda pair: -pair[0])]

"""Conversion of sentencepiece models to the tokenizer.json of Hugging Face's `tokenizers`.

Each version of transformers converts tokenizer.model in its own way: some add the space before a text only if it does not start
with one, ignore the normalization, or load every model as byte-pair encoding. A tokenizer.json gives the same tokens in all.
"""

import base64
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.base.config import ConfigError
from trainer.data.tokenizer.hf_json import SPECIAL_TOKEN_FLAGS, prepend_bos

if TYPE_CHECKING:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

_SPACE = "\u2581"


def parse(content: bytes) -> "ModelProto":
    """Parse a model file, which the sentencepiece library has accepted. Raises ConfigError if a piece is not UTF-8, or if
    protobuf cannot load the classes that this library ships: they work only with certain versions of protobuf."""
    try:
        # Imported here, because only runs with a sentencepiece model shall need the protobuf version that fits.
        model_class = importlib.import_module("sentencepiece.sentencepiece_model_pb2").ModelProto
    except Exception as error:
        message = f"sentencepiece needs another version of the package protobuf: {error}"
        raise ConfigError("tokenizer.backend", " ".join(message.split())) from None
    model = model_class.FromString(content)
    wrong = next((token for token, piece in enumerate(model.pieces) if isinstance(piece.piece, bytes)), None)
    if wrong is not None:
        raise ConfigError("tokenizer.path", f"piece {wrong} of this sentencepiece model is not UTF-8 text")
    return model


def names_of_type(model: "ModelProto", type: str) -> dict[int, str]:
    """Return id -> name of the pieces of a type, such as "CONTROL"."""
    number = model.SentencePiece.Type.Value(type)
    return {token: piece.piece for token, piece in enumerate(model.pieces) if piece.type == number}


def tokenizer_json(model: "ModelProto", bos: int | None) -> dict[str, Any] | None:
    """Return the content of a tokenizer.json, or None if the package has no such tokenizer. bos: token that is prepended to every
    text, if any.

    A piece of the type "user-defined" ends a text, as a special token does in a chat: the space that sentencepiece adds before a
    text is also added after such a piece.
    """
    spec, unknown = model.trainer_spec, names_of_type(model, "UNKNOWN")
    is_converted = spec.model_type in (spec.BPE, spec.UNIGRAM) and not spec.treat_whitespace_as_suffix
    if not is_converted or not model.normalizer_spec.escape_whitespaces:
        return None
    if not unknown or names_of_type(model, "UNUSED"):
        return None
    control = names_of_type(model, "CONTROL")
    names = control | names_of_type(model, "USER_DEFINED")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": names[token], **SPECIAL_TOKEN_FLAGS, "special": token in control}
            for token in sorted(names)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [*_normalizers(model)]},
        "pre_tokenizer": None,
        "post_processor": None if bos is None else prepend_bos(model.pieces[bos].piece, bos),
        "decoder": {"type": "Sequence", "decoders": [*_decoders(model)]},
        "model": _bpe(model, unknown) if spec.model_type == spec.BPE else _unigram(model, unknown),
    }


def _normalizers(model: "ModelProto") -> Iterator[dict[str, Any]]:
    normalizer = model.normalizer_spec
    if charsmap := normalizer.precompiled_charsmap:
        yield {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
    if normalizer.remove_extra_whitespaces:
        # The package's own Strip also removes line ends.
        yield {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""}
        yield {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    if normalizer.add_dummy_prefix:
        yield {"type": "Prepend", "prepend": _SPACE}
    yield {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}


def _decoders(model: "ModelProto") -> Iterator[dict[str, Any]]:
    yield {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    yield {"type": "ByteFallback"}
    yield {"type": "Fuse"}
    if model.normalizer_spec.add_dummy_prefix:
        yield {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _unigram(model: "ModelProto", unknown: dict[int, str]) -> dict[str, Any]:
    (unknown_id,) = unknown
    normal = [piece.score for piece in model.pieces if piece.type == piece.NORMAL]
    # The package would find the names of all pieces in a text, sentencepiece only those of normal ones.
    never = min(normal, default=0.0) - 1000.0
    vocab = [[piece.piece, piece.score if piece.type == piece.NORMAL else never] for piece in model.pieces]
    return {"type": "Unigram", "unk_id": unknown_id, "vocab": vocab, "byte_fallback": model.trainer_spec.byte_fallback}


def _bpe(model: "ModelProto", unknown: dict[int, str]) -> dict[str, Any]:
    (unknown_name,) = unknown.values()
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown_name,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.trainer_spec.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.piece: token for token, piece in enumerate(model.pieces)},
        "merges": _merges(model),
    }


def _merges(model: "ModelProto") -> list[tuple[str, str]]:
    """Return all pairs of pieces whose concatenation is a piece, sorted by the score of the latter. sentencepiece has no list of
    pairs: it merges the two neighbours whose concatenation has the highest score."""
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == piece.NORMAL}
    pairs = [
        (score, text[:i], text[i:])
        for text, score in scores.items()
        for i in range(1, len(text))
        if text[:i] in scores and text[i:] in scores
    ]
    return [(left, right) for _, left, right in sorted(pairs, key=lambda pair: -pair[0])]

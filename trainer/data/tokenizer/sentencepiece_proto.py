"""Parser of sentencepiece model files. The sentencepiece library does not expose the types of the pieces and the normalization.

The classes that protobuf generates from sentencepiece_model.proto are not used, because a process can register only one version
of them, and transformers registers its own.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

# field numbers in sentencepiece_model.proto
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _WHITESPACE_AS_SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_CHARSMAP, _DUMMY_PREFIX, _EXTRA_WHITESPACES, _ESCAPE_WHITESPACES = 2, 3, 4, 5

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of pieces."""
UNIGRAM, BPE = 1, 2
"""Types of models."""


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    type: int


@dataclass(frozen=True)
class SentencePieceModel:
    """Content of a sentencepiece model file."""

    pieces: tuple[Piece, ...]
    """By id."""
    type: int
    byte_fallback: bool
    """Whether a character that no piece contains becomes one token for each of its bytes."""
    charsmap: bytes
    """Compiled rules that replace characters, or b"" for none."""
    adds_prefix: bool
    """Whether a space is added before the text."""
    removes_extra_whitespaces: bool
    """Whether spaces at the ends are removed, and each run of spaces becomes one."""
    escapes_whitespaces: bool
    """Whether spaces become U+2581."""
    is_whitespace_suffix: bool
    """Whether pieces end with the space between words instead of starting with it."""

    def of_type(self, type: int) -> dict[int, str]:
        """Return id -> text of the pieces of a type."""
        return {token: piece.text for token, piece in enumerate(self.pieces) if piece.type == type}


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return the varint at a position, and the position after it. A varint stores 7 bits of an integer per byte."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield (field number, value) for each field of a protocol buffer message."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        wire_type = tag & 7
        if wire_type == 0:
            value, position = _varint(data, position)
        else:
            length, position = _varint(data, position) if wire_type == 2 else ({1: 8, 5: 4}[wire_type], position)
            value, position = data[position : position + length], position + length
        yield tag >> 3, value


def _piece(data: memoryview) -> Piece:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", fields.get(_SCORE, bytes(4)))
    return Piece(bytes(fields.get(_PIECE, b"")).decode(), score, fields.get(_TYPE, NORMAL))


def parse(model: bytes) -> SentencePieceModel:
    """Parse a valid sentencepiece model file. model: its content."""
    messages = list(_fields(memoryview(model)))
    trainer = {field: value for part, data in messages if part == _TRAINER for field, value in _fields(data)}
    normalizer = {field: value for part, data in messages if part == _NORMALIZER for field, value in _fields(data)}
    return SentencePieceModel(
        pieces=tuple(_piece(data) for part, data in messages if part == _PIECES),
        type=trainer.get(_MODEL_TYPE, UNIGRAM),
        byte_fallback=bool(trainer.get(_BYTE_FALLBACK, False)),
        charsmap=bytes(normalizer.get(_CHARSMAP, b"")),
        adds_prefix=bool(normalizer.get(_DUMMY_PREFIX, True)),
        removes_extra_whitespaces=bool(normalizer.get(_EXTRA_WHITESPACES, True)),
        escapes_whitespaces=bool(normalizer.get(_ESCAPE_WHITESPACES, True)),
        is_whitespace_suffix=bool(trainer.get(_WHITESPACE_AS_SUFFIX, False)),
    )

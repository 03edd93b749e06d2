"""Parser that finds the user-defined pieces in a sentencepiece model file. The sentencepiece library does not expose them."""

from collections.abc import Iterator

_PIECES, _PIECE, _TYPE = 1, 1, 3  # field numbers in sentencepiece_model.proto
_USER_DEFINED = 4


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


def user_defined(model: bytes) -> dict[int, str]:
    """Return id -> name of the user-defined pieces. model: content of a valid sentencepiece model file."""
    names = {}
    pieces = (value for field, value in _fields(memoryview(model)) if field == _PIECES)
    for token, piece in enumerate(pieces):
        fields = dict(_fields(piece))
        if fields.get(_TYPE) == _USER_DEFINED:
            names[token] = bytes(fields[_PIECE]).decode()
    return names

"""The pieces of a sentencepiece model file, for what its library does not tell of them."""

from collections.abc import Iterator

_PIECES, _PIECE, _TYPE = 1, 1, 3  # numbers of the fields of sentencepiece_model.proto
_USER_DEFINED = 4


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits to the byte, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(number, value) of a message of protocol buffers."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
        else:
            length, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value, at = data[at : at + length], at + length
        yield tag >> 3, value


def user_defined(model: bytes) -> dict[int, str]:
    """id -> name of the pieces that are one token wherever a text has them. model: one that the library has read."""
    found = {}
    pieces = (value for number, value in _fields(memoryview(model)) if number == _PIECES)
    for token, piece in enumerate(pieces):
        fields = dict(_fields(piece))
        if fields.get(_TYPE) == _USER_DEFINED:
            found[token] = bytes(fields[_PIECE]).decode()
    return found

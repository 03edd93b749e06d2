"""The elements of a JSON array in a file, read one after the other in bounded memory.

json.JSONDecoder.raw_decode cannot replace this scanner: it finds the end of a value only if the value is valid and completely in
memory, while here the elements after one that is malformed, not UTF-8 or too long are read.
"""

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

_CHUNK_BYTES = 2**20
_BETWEEN_ELEMENTS = re.compile(rb'["\[\]{},]')
_IN_ELEMENT = re.compile(rb'["\[\]{}]')
"""The characters outside strings at which a string, an element or the array can begin or end."""
_SPACE = b" \t\r\n"


class BrokenArray(Exception):
    """The reason why a file is not one complete array."""


@dataclass
class Element:
    """An element of an array."""

    line: int
    """Number of the line in which it begins, counted from 1."""
    content: bytearray = field(default_factory=bytearray)
    """JSON text, possibly with white space after it. Its end is missing if it is too long."""
    is_too_long: bool = False


def is_array(head: bytes) -> bool:
    """Return whether the content of a file that begins with `head` is an array."""
    return head.removeprefix(codecs.BOM_UTF8).lstrip(_SPACE).startswith(b"[")


def read_array(file: BinaryIO, max_bytes: int) -> Iterator[Element]:
    """Yield the elements of the array in a file. Their content may be malformed.

    Args:
        file: Its content begins with an array, see `is_array`.
        max_bytes: Maximum length of an element.

    Raises:
        BrokenArray: The end of an element or of the array cannot be found, or more text follows.
    """
    element, count, line, has_ended = Element(1), 0, 1, False
    for piece, border in _pieces(file):
        if has_ended:
            if rest := (piece + border).lstrip(_SPACE):
                hint = "; a document of JSON lines must be an object" if rest.startswith(b"[") else ""
                raise BrokenArray(f"more text follows the array, which ends in line {line}{hint}")
            continue
        text = piece if element.content else piece.lstrip(_SPACE)
        if not element.content:
            element.line = line + piece.count(b"\n", 0, len(piece) - len(text))
        line += piece.count(b"\n")
        space_left = max_bytes - len(element.content)
        element.content += text[:space_left]
        element.is_too_long |= bool(text[space_left:].strip(_SPACE))
        if border == b"}":
            raise BrokenArray(f"element {count + 1}, in line {element.line}, is followed by }} instead of ]")
        has_ended = border == b"]"
        if border == b"," or (has_ended and element.content):  # a comma after the last element is accepted
            count += 1
            yield element
        if border:
            element = Element(line)
    if not has_ended:
        raise BrokenArray(f"the array has no end: element {count + 1}, in line {element.line}, is incomplete")


def _pieces(file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """Yield the content of a file in pieces, each with the character after it if this begins or ends the array or separates its
    elements, else with b""."""
    depth, in_string = 0, False
    for chunk in _chunks(file):
        start = position = 0
        while True:
            if in_string:
                position = _end_of_string(chunk, position)
                in_string = not position
            pattern = _IN_ELEMENT if depth > 1 else _BETWEEN_ELEMENTS
            match = None if in_string else pattern.search(chunk, position)
            if match is None:
                break
            token, position = match[0], match.end()
            in_string = token == b'"'
            if not in_string:
                opens = token in b"[{"
                if depth + opens == 1:
                    yield chunk[start : match.start()], token
                    start = position
                depth += opens - (token in b"]}")
        yield chunk[start:], b""


def _end_of_string(chunk: bytes, position: int) -> int:
    """Return the position after the next quote that is not escaped, or 0 if there is none."""
    while quote := chunk.find(b'"', position) + 1:
        before = chunk[position : quote - 1]
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
            return quote
        position = quote
    return 0


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of a file without its BOM. No chunk ends within an escape sequence."""
    chunk = file.read(_CHUNK_BYTES).removeprefix(codecs.BOM_UTF8)
    while chunk:
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:
            chunk += file.read(1)
        yield chunk
        chunk = file.read(_CHUNK_BYTES)

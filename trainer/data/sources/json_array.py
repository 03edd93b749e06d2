"""The elements of a JSON array in a file, read one after the other in bounded memory."""

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

_CHUNK_BYTES = 2**20
_BETWEEN_ELEMENTS = re.compile(rb'["\[\]{},]')
_IN_ELEMENT = re.compile(rb'["\[\]{}]')
"""The characters outside strings at which a string, an element or the array can begin or end."""
_SPACE = b" \t\r\n"


class BrokenArray(Exception):
    """The reason why a file is not one complete array."""


@dataclass(frozen=True)
class Element:
    content: bytes
    """JSON text without surrounding white space. Its end is missing if it is too long."""
    is_too_long: bool
    line: int
    """Number of the line in which the element begins, counted from 1."""


class _Collector:
    """Collector of the bytes of one element after the other."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._content = bytearray()
        self._num_bytes = self._newlines = 0  # of the element, including white space at its end
        self.length = 0
        """Number of bytes of the element up to the last one that is not white space."""
        self.line = 1
        """Number of the line in which the element begins."""

    def add(self, content: bytes) -> None:
        if not self.length:
            stripped = content.lstrip(_SPACE)
            self.line += content.count(b"\n", 0, len(content) - len(stripped))
            content = stripped
        self._content += content[: max(self._max_bytes - len(self._content), 0)]
        if solid := content.rstrip(_SPACE):
            self.length = self._num_bytes + len(solid)
        self._num_bytes += len(content)
        self._newlines += content.count(b"\n")

    def take(self) -> Element:
        element = Element(bytes(self._content[: self.length]), self.length > self._max_bytes, self.line)
        self.line += self._newlines
        self._content.clear()
        self._num_bytes = self._newlines = self.length = 0
        return element


def is_array(head: bytes) -> bool:
    """Return whether the content of a file that begins with `head` is an array."""
    return head.removeprefix(codecs.BOM_UTF8).lstrip(_SPACE).startswith(b"[")


def read_array(file: BinaryIO, max_bytes: int) -> Iterator[Element]:  # noqa: C901 - one scanner, whose state is local
    """Yield the elements of the array in a file. Their content may be malformed. Raises BrokenArray if the end of an element or
    of the array cannot be found, or if more text follows. max_bytes: maximum length of an element."""
    element, count, depth, in_string, has_ended = _Collector(max_bytes), 0, 0, False, False
    for chunk in _chunks(file):
        start = position = 0
        while not has_ended:
            if in_string:
                position = _end_of_string(chunk, position)
                in_string = not position
                if in_string:
                    break
            match = (_IN_ELEMENT if depth > 1 else _BETWEEN_ELEMENTS).search(chunk, position)
            if match is None:
                break
            token, position = match[0], match.end()
            if token == b'"':
                in_string = True
            elif token in (b"[", b"{"):
                depth += 1
                if depth == 1:
                    element.add(chunk[start : match.start()])  # white space, for the number of the line
                    start = position
            elif depth == 1 and token != b"}":
                element.add(chunk[start : match.start()])
                start = position
                has_ended = token == b"]"
                if element.length or not has_ended:  # a comma after the last element is accepted
                    count += 1
                    yield element.take()
            elif token != b",":
                depth -= 1
                if not depth:
                    raise BrokenArray(f"element {count + 1}, in line {element.line}, is followed by }} instead of ]")
        if not has_ended:
            element.add(chunk[start:])
        elif chunk[start:].strip(_SPACE):
            is_list = chunk[start:].lstrip(_SPACE).startswith(b"[")
            hint = "; a document of JSON lines must be an object" if is_list else ""
            raise BrokenArray(f"more text follows the array, which ends in line {element.line}{hint}")
    if not has_ended:
        raise BrokenArray(f"the array has no end: element {count + 1}, in line {element.line}, is incomplete")


def _end_of_string(chunk: bytes, position: int) -> int:
    """Return the position after the next quote that is not escaped, or 0 if there is none."""
    while quote := chunk.find(b'"', position) + 1:
        first = quote - 1
        while first > position and chunk[first - 1] == ord("\\"):
            first -= 1
        if (quote - 1 - first) % 2 == 0:
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

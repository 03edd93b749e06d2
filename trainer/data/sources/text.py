"""Documents from text files and JSON lines, plain or compressed."""

import codecs
import json
import math
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainer.config import DataConfig
from trainer.data.sources.files import matching, with_compressed
from trainer.data.sources.source import BadDocument, Document, InvalidDocument, Source, Span, too_long
from trainer.data.sources.streams import BrokenStream, is_compressed, open_stream

T = TypeVar("T")

SHIPPED_CHATS = Path(__file__).parents[1] / "chat" / "chats.jsonl"
"""Short conversations, made by scripts/dev/make_chats.py."""

_BLOCK = 2**20


@dataclass(frozen=True)
class TextFiles:
    """A file is one document."""

    max_bytes: int

    def __call__(self, span: Span, take: Callable[[str], T]) -> Iterator[T | BadDocument]:
        try:
            with open_stream(span.path) as file:
                content = file.read(self.max_bytes + 1)
            if len(content) > self.max_bytes:
                raise InvalidDocument(too_long(self.max_bytes))
            content = content.removeprefix(codecs.BOM_UTF8)
            if not content:
                raise InvalidDocument("empty")
            yield take(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            yield BadDocument(span.path, line, f"not UTF-8 text (byte {error.start} of the file)")
        except (InvalidDocument, BrokenStream) as reason:
            yield BadDocument(span.path, 0, str(reason))


class _Newlines:
    """Counts lines, for those who ask for the number of one; going on from the last answer."""

    def __init__(self) -> None:
        self._path, self._offset, self._count = "", 0, 0

    def before(self, path: str, offset: int) -> int:
        """How many there are in the first `offset` bytes of the file."""
        if path != self._path or offset < self._offset:
            self._path, self._offset, self._count = path, 0, 0
        with open(path, "rb") as file:
            file.seek(self._offset)
            while self._offset < offset and (block := file.read(min(_BLOCK, offset - self._offset))):
                self._count += block.count(b"\n")
                self._offset += len(block)
        return self._count


class JsonLines:
    """A line is one record; blank lines are none."""

    def __init__(self, pick: Callable[[Any], Document], max_bytes: int):
        """pick: record -> the document in it; raises InvalidDocument."""
        self._pick = pick
        self._max_bytes = max_bytes
        self._newlines = _Newlines()

    def __call__(self, span: Span, take: Callable[[Document], T]) -> Iterator[T | BadDocument]:
        with open_stream(span.path) as file:
            begin = _begin_at_line(file, span.start)
            first = begin
            number = 0  # of the line, counted from where this span began

            def problem(reason: str) -> BadDocument:
                return BadDocument(span.path, self._newlines_before(span.path, first) + number, reason)

            stop = math.inf if is_compressed(span.path) else span.stop
            try:
                while begin < stop and (line := file.readline(self._max_bytes + 1)):
                    number += 1
                    length = len(line)
                    if length > self._max_bytes and not line.endswith(b"\n"):
                        length += _rest_of_line(file)
                        yield problem(too_long(self._max_bytes))
                    elif not (line := line.removeprefix(codecs.BOM_UTF8) if begin == 0 else line).isspace() and line:
                        try:
                            yield take(self._pick(_record(line)))
                        except InvalidDocument as reason:
                            yield problem(str(reason))
                    begin += length
            except BrokenStream as reason:
                number += 1
                yield problem(str(reason))

    def _newlines_before(self, path: str, offset: int) -> int:
        return self._newlines.before(path, offset) if offset else 0


def _begin_at_line(file: Any, start: int) -> int:
    """Go to the first line that begins at `start` or later, and say where that is."""
    if start:
        file.seek(start - 1)
        start += _rest_of_line(file) - 1
    return start


def _rest_of_line(file: Any) -> int:
    """Read to the end of the line; returns the bytes."""
    length = 0
    while piece := file.readline(_BLOCK):
        length += len(piece)
        if piece.endswith(b"\n"):
            break
    return length


def _record(line: bytes) -> Any:
    try:
        # Not json.loads(line): it takes bytes with zeros among them for UTF-16.
        return json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidDocument(f"not UTF-8 text (byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        raise InvalidDocument(f"not valid JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, thousands of brackets
        raise InvalidDocument("not valid JSON") from None


_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}


@dataclass(frozen=True)
class TextField:
    """The text in one field of a record."""

    name: str

    def __call__(self, record: Any) -> str:
        if not isinstance(record, dict):
            raise InvalidDocument(f"expected an object, found {_KINDS.get(type(record), 'null')}")
        if self.name not in record:
            raise InvalidDocument(f"no field {self.name!r}")
        text = record[self.name]
        if not isinstance(text, str):
            raise InvalidDocument(f"field {self.name!r} holds {_KINDS.get(type(text), 'null')}, not text")
        if not text:
            raise InvalidDocument("empty")
        # JSON can name half of a surrogate pair, which is no character and which no tokenizer takes.
        if not text.isascii() and not _is_unicode(text):
            raise InvalidDocument("holds half of a surrogate pair")
        return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def python_stdlib(config: DataConfig) -> Source:
    """Real text that every machine has: the standard library's own source. What an installation of packages adds is left
    out, so that the corpus stays the same."""
    root = Path(sysconfig.get_path("stdlib"))
    foreign = {"site-packages", "dist-packages", "__pycache__"}
    files = (p for p in root.rglob("*.py") if not foreign.intersection(p.relative_to(root).parts))
    return Source(str(root), tuple(sorted(map(str, files))), False, TextFiles(config.max_document_bytes))


def text(config: DataConfig) -> Source:
    root, files = matching(config.path, with_compressed((".txt", ".md")))
    return Source(root, files, False, TextFiles(config.max_document_bytes))


def jsonl(config: DataConfig) -> Source:
    root, files = matching(config.path, with_compressed((".jsonl", ".json")))
    return Source(root, files, True, JsonLines(TextField(config.text_field), config.max_document_bytes))


def _whole(record: Any) -> Any:
    return record


def records(config: DataConfig) -> Source:
    root, files = matching(config.path or str(SHIPPED_CHATS), with_compressed((".jsonl", ".json")))
    return Source(root, files, True, JsonLines(_whole, config.max_document_bytes))

"""Sources of documents in text files and JSON lines files, which may be compressed."""

import codecs
import json
import math
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainer.config import DataConfig
from trainer.data.sources.files import find_files, with_compressed
from trainer.data.sources.source import BadDocument, Document, InvalidDocument, Source, Span, too_long
from trainer.data.sources.streams import BrokenStream, is_compressed, open_stream
from trainer.data.tokenizer.protocol import has_lone_surrogate

T = TypeVar("T")

_CHATS = Path(__file__).parents[1] / "chat"
SHIPPED = {"chat": _CHATS / "chats.jsonl", "preference": _CHATS / "preferences.jsonl"}
"""Type of dataset -> file with short conversations about this project, which is read if the path is empty."""

_CHUNK_BYTES = 2**20


def _read_text(max_bytes: int, span: Span, transform: Callable[[str], T]) -> Iterator[T | BadDocument]:
    """Read a text file as one document."""
    try:
        with open_stream(span.path) as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise InvalidDocument(too_long(max_bytes))
        content = content.removeprefix(codecs.BOM_UTF8)
        if not content:
            raise InvalidDocument("the document is empty")
        yield transform(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        yield BadDocument(span.path, line, f"the file is not UTF-8 text (byte {error.start})")
    except (InvalidDocument, BrokenStream) as reason:
        yield BadDocument(span.path, 0, str(reason))


class JsonLines:
    """Reader of JSON lines: each line is one record. Blank lines are ignored."""

    def __init__(self, extract: Callable[[Any], Document], max_bytes: int):
        """extract: function that returns a record's document or raises InvalidDocument."""
        self._extract = extract
        self._max_bytes = max_bytes
        self._counted = ("", 0, 0)  # file, number of its bytes, number of newlines in them

    def _count_newlines(self, path: str, stop: int) -> int:
        """Return the number of newlines in the first `stop` bytes of a file. Reuse the previous call's count if possible."""
        counted_path, start, count = self._counted
        if path != counted_path or stop < start:
            start = count = 0
        with open(path, "rb") as file:
            file.seek(start)
            while chunk := file.read(min(_CHUNK_BYTES, stop - file.tell())):
                count += chunk.count(b"\n")
        self._counted = (path, stop, count)
        return count

    def __call__(self, span: Span, transform: Callable[[Document], T]) -> Iterator[T | BadDocument]:
        with open_stream(span.path) as file:
            first = offset = _seek_line(file, span.start)
            lines_read = 0  # number of lines read in this span

            def bad_document(reason: str) -> BadDocument:
                lines_before = self._count_newlines(span.path, first) if first else 0
                return BadDocument(span.path, lines_before + lines_read, reason)

            stop = math.inf if is_compressed(span.path) else span.stop
            try:
                while offset < stop and (line := file.readline(self._max_bytes + 1)):
                    lines_read += 1
                    num_bytes = len(line)
                    if num_bytes > self._max_bytes and not line.endswith(b"\n"):
                        num_bytes += _skip_line(file)
                        yield bad_document(too_long(self._max_bytes))
                    elif not (line := line.removeprefix(codecs.BOM_UTF8) if offset == 0 else line).isspace() and line:
                        try:
                            yield transform(self._extract(_parse(line)))
                        except InvalidDocument as reason:
                            yield bad_document(str(reason))
                    offset += num_bytes
            except BrokenStream as reason:
                lines_read += 1
                yield bad_document(str(reason))


def _seek_line(file: Any, start: int) -> int:
    """Seek to the first line that begins at byte `start` or later, and return its offset."""
    if start:
        file.seek(start - 1)
        start += _skip_line(file) - 1
    return start


def _skip_line(file: Any) -> int:
    """Read to the end of the line and return the number of bytes read."""
    num_bytes = 0
    while chunk := file.readline(_CHUNK_BYTES):
        num_bytes += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return num_bytes


def _parse(line: bytes) -> Any:
    try:
        # json.loads(line) without decoding would interpret bytes that contain zeros as UTF-16.
        return json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidDocument(f"the line is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise InvalidDocument(f"the line is not valid JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError):  # an integer with thousands of digits, thousands of nested brackets
        raise InvalidDocument("the line is not valid JSON") from None


_TYPE_NAMES = {
    dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number",
}  # fmt: skip


def _text_field(name: str, record: Any) -> str:
    """Return the text in one field of a record."""
    if not isinstance(record, dict):
        raise InvalidDocument(f"expected an object, found {_TYPE_NAMES.get(type(record), 'null')}")
    if name not in record:
        raise InvalidDocument(f"the record has no field {name!r}")
    text = record[name]
    if not isinstance(text, str):
        raise InvalidDocument(f"field {name!r} is {_TYPE_NAMES.get(type(text), 'null')}, not a string")
    if not text:
        raise InvalidDocument("the document is empty")
    if not text.isascii() and has_lone_surrogate(text):
        raise InvalidDocument("the document contains a lone surrogate")
    return text


def python_stdlib(config: DataConfig) -> Source:
    """Return the Python standard library's files as a Source. Installed packages are excluded: they may differ between nodes."""
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "__pycache__"}
    files = (p for p in root.rglob("*.py") if not excluded.intersection(p.relative_to(root).parts))
    return Source(str(root), tuple(sorted(map(str, files))), False, partial(_read_text, config.max_document_bytes))


def text(config: DataConfig) -> Source:
    root, files = find_files(config.path, with_compressed((".txt", ".md")))
    return Source(root, files, False, partial(_read_text, config.max_document_bytes))


def jsonl(config: DataConfig) -> Source:
    root, files = find_files(config.path, with_compressed((".jsonl", ".json")))
    return Source(root, files, True, JsonLines(partial(_text_field, config.text_field), config.max_document_bytes))


def _entire_record(record: Any) -> Any:
    return record


def records(config: DataConfig) -> Source:
    root, files = find_files(config.path or str(SHIPPED[config.dataset]), with_compressed((".jsonl", ".json")))
    return Source(root, files, True, JsonLines(_entire_record, config.max_document_bytes))

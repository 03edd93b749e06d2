"""Reader of records in JSON files, which may be compressed."""

import codecs
import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from trainer.base.config import ConfigError, DataConfig
from trainer.base.config.schema.data import MESSAGE_LISTS
from trainer.base.system.spelling import counted
from trainer.data.json_text import InvalidJson, parse_json
from trainer.data.sources.contents import HEAD_BYTES, endings_of, recognise
from trainer.data.sources.json_array import BrokenArray, is_array, read_array
from trainer.data.sources.source import BadDocument, Document, InvalidDocument, Span, too_long
from trainer.data.sources.streams import BrokenStream, ends_in, is_compressed, open_stream
from trainer.data.sources.text_field import extractor

T = TypeVar("T")

_CHUNK_BYTES = 2**20
_FIELD_WITH_LIST = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:\s*\[\s*[\[{]')
"""A field of an object that holds a list of objects or lists."""
_LIST = "field {!r} holds {}; the file must hold this list only"


class JsonRecords:
    """Reader of records in JSON: one per line (blank lines are ignored), or the elements of one array."""

    def __init__(self, config: DataConfig, field: str):
        """See text_field.extractor."""
        self._extract = extractor(field)
        self._formats = "JSON" if field else "JSON, Parquet, Arrow or CSV"
        # A record has at least one of these fields.
        self._fields = (
            {field}
            if field
            else {*config.columns.values(), "messages", "conversations", "prompt", "chosen", "instruction", "question"}
        )
        self._dataset, self._max_bytes = config.dataset, config.max_document_bytes
        self._counted = ("", 0, 0)  # file, number of its bytes, number of newlines in them

    def __call__(self, span: Span, transform: Callable[[Document], T]) -> Iterator[T | BadDocument]:
        head = _read_head(span.path)
        kind = recognise(head, span.path)
        is_other = kind is not None and kind.reader != "jsonl"
        if not is_other and not is_array(head):
            yield from self._read_lines(span, transform)
        elif span.start:
            return  # the first span contains the entire file
        elif is_other:
            yield BadDocument(span.path, 0, kind.instead_of("JSON", self._dataset), ends_file=True)
        else:
            yield from self._read_array(span.path, transform)

    def _read_array(self, path: str, transform: Callable[[Document], T]) -> Iterator[T | BadDocument]:
        try:
            with open_stream(path) as file:
                for number, element in enumerate(read_array(file, self._max_bytes), start=1):
                    try:
                        if element.is_too_long:
                            raise InvalidDocument(too_long(self._max_bytes))
                        yield self._convert(parse_json(element.content, "element"), transform)
                    except (InvalidJson, InvalidDocument) as reason:
                        yield BadDocument(path, element.line, f"element {number}: {reason}")
        except (BrokenArray, BrokenStream) as reason:
            # Any number of documents may be missing, so this is not one bad document.
            raise ConfigError("data.path", f"{path} is not one complete JSON array: {reason}") from None

    def _read_lines(self, span: Span, transform: Callable[[Document], T]) -> Iterator[T | BadDocument]:
        with open_stream(span.path) as file:
            first = offset = _seek_line(file, span.start)
            lines_read = 0  # number of lines read in this span

            def bad_document(reason: str, ends_file: bool = False) -> BadDocument:
                lines_before = self._count_newlines(span.path, first) if first else 0
                return BadDocument(span.path, lines_before + lines_read, reason, ends_file)

            stop = math.inf if is_compressed(span.path) else span.stop
            try:
                while offset < stop and (line := file.readline(self._max_bytes + 1)):
                    lines_read += 1
                    num_bytes = len(line)
                    if num_bytes > self._max_bytes and not line.endswith(b"\n"):
                        num_bytes += _skip_line(file)
                        yield bad_document(too_long(self._max_bytes) + ("" if offset else self._list_hint(span.path)))
                    elif not (line := line.removeprefix(codecs.BOM_UTF8) if offset == 0 else line).isspace() and line:
                        try:
                            yield self._convert(parse_json(line.rstrip(b"\r\n"), "line"), transform)
                        except (InvalidJson, InvalidDocument) as reason:
                            yield bad_document(f"{reason}{'' if offset else self._hint(span.path, line, reason)}")
                    offset += num_bytes
            except BrokenStream as reason:
                lines_read += 1
                yield bad_document(str(reason), ends_file=True)

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

    def _convert(self, record: Any, transform: Callable[[Document], T]) -> T:
        try:
            return transform(self._extract(record))
        except InvalidDocument:
            for name, value in record.items() if isinstance(record, dict) else ():
                is_list = isinstance(value, list) and name not in MESSAGE_LISTS
                if is_list and any(isinstance(v, dict) and self._fields & v.keys() for v in value):
                    raise InvalidDocument(_LIST.format(name, f"a list of {counted(len(value), 'record')}")) from None
            raise

    def _hint(self, path: str, line: bytes, reason: Exception) -> str:
        """Return what the fault of a file's first line says about the file, as the continuation of a message."""
        if isinstance(reason, InvalidJson) and not reason.is_one_value:
            return f"; a file must hold one complete object per line, or one array{self._list_hint(path)}"
        if not line.startswith(b"{") and not ends_in(path, endings_of("jsonl")):
            return f"; a {self._dataset} dataset reads {self._formats}"
        return ""

    def _list_hint(self, path: str) -> str:
        """Return a hint about the first list in the object at the start of a file, if it is no part of a document, or ""."""
        text = _read_head(path).decode("utf-8-sig", "ignore")
        fields = _FIELD_WITH_LIST.finditer(text) if text.lstrip().startswith("{") else ()
        # Inside the outermost object, one brace is open.
        depths = ((field[1], text.count("{", 0, field.start()) - text.count("}", 0, field.start())) for field in fields)
        name = next((name for name, depth in depths if depth == 1), "")
        is_list = name and name not in {*self._fields, *MESSAGE_LISTS}
        return f"; {_LIST.format(name, 'a list of records')}" if is_list else ""


def _read_head(path: str) -> bytes:
    """Return at least the first HEAD_BYTES of a file, or fewer without the white space before them. Damaged data has none: its
    reader reports it."""
    head = b""
    with contextlib.suppress(BrokenStream), open_stream(path) as file:
        head = file.read(HEAD_BYTES)
        while head.isspace():
            head = file.read(HEAD_BYTES)
    return head


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

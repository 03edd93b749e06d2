"""Reader of records in JSON files, which may be compressed."""

import codecs
import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from trainer.base.config import ConfigError, DataConfig
from trainer.base.config.schema.data import MESSAGE_LISTS
from trainer.base.system.spelling import counted
from trainer.data.sources.contents import HEAD_BYTES, recognize, recognize_table
from trainer.data.sources.files import with_compressed
from trainer.data.sources.json_array import BrokenArray, is_array, read_array
from trainer.data.sources.source import BadDocument, Document, InvalidDocument, Span, too_long
from trainer.data.sources.streams import BrokenStream, ends_in, is_compressed, open_stream
from trainer.data.sources.text_field import extractor

T = TypeVar("T")

JSON_ENDINGS = with_compressed((".jsonl", ".json"))
_CHUNK_BYTES = 2**20


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
        self._head = ("", b"")  # file, its first bytes

    def __call__(self, span: Span, transform: Callable[[Document], T]) -> Iterator[T | BadDocument]:
        head = self._read_head(span.path)
        kind = recognize(head, span.path) or recognize_table(span.path)
        if not kind and not is_array(head):
            yield from self._read_lines(span, transform)
        elif span.start:
            return  # the first span contains the entire file
        elif kind:
            reason = f"this is {kind.name}, not JSON; {kind.advice(self._dataset)}"
            yield BadDocument(span.path, 0, reason, ends_file=True)
        else:
            yield from self._read_array(span.path, transform)

    def _read_head(self, path: str) -> bytes:
        """Return the first bytes of a file, up to the first one that is not white space or HEAD_BYTES."""
        if self._head[0] != path:
            head = b""
            with contextlib.suppress(BrokenStream), open_stream(path) as file:  # a reader reports damaged data
                head = file.read(HEAD_BYTES)
                while head.isspace():
                    head = file.read(HEAD_BYTES)
            self._head = (path, head)
        return self._head[1]

    def _read_array(self, path: str, transform: Callable[[Document], T]) -> Iterator[T | BadDocument]:
        try:
            with open_stream(path) as file:
                for number, element in enumerate(read_array(file, self._max_bytes), start=1):
                    try:
                        if element.is_too_long:
                            raise InvalidDocument(too_long(self._max_bytes))
                        yield self._convert(_parse(element.content, "element"), transform)
                    except InvalidDocument as reason:
                        yield BadDocument(path, element.line, f"element {number}: {reason}")
        except (BrokenArray, BrokenStream) as reason:
            # Any number of documents may be missing, so this is not one bad document.
            raise ConfigError("data.path", f"{path} is not one complete JSON array: {reason}") from None

    def _convert(self, record: Any, transform: Callable[[Document], T]) -> T:
        try:
            return transform(self._extract(record))
        except InvalidDocument:
            for name, value in record.items() if isinstance(record, dict) else ():
                if isinstance(value, list) and any(isinstance(v, dict) and self._fields & v.keys() for v in value):
                    raise InvalidDocument(_LIST.format(name, f"a list of {counted(len(value), 'record')}")) from None
            raise

    def _list_hint(self, path: str) -> str:
        """Return a hint about the first field of a file's first object, if it holds a list that is no part of a document."""
        name = _first_list(self._read_head(path))
        return (
            ""
            if not name or name in self._fields or name in MESSAGE_LISTS
            else "; " + _LIST.format(name, "a list of records")
        )

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

    def _read_lines(self, span: Span, transform: Callable[[Document], T]) -> Iterator[T | BadDocument]:
        with open_stream(span.path) as file:
            first = offset = _seek_line(file, span.start)
            lines_read = 0  # number of lines read in this span

            def bad_document(reason: object, ends_file: bool = False) -> BadDocument:
                lines_before = self._count_newlines(span.path, first) if first else 0
                return BadDocument(span.path, lines_before + lines_read, str(reason), ends_file)

            stop = math.inf if is_compressed(span.path) else span.stop
            try:
                while offset < stop and (line := file.readline(self._max_bytes + 1)):
                    lines_read += 1
                    num_bytes = len(line)
                    if num_bytes > self._max_bytes and not line.endswith(b"\n"):
                        num_bytes += _skip_line(file)
                        yield bad_document(f"{too_long(self._max_bytes)}{'' if offset else self._list_hint(span.path)}")
                    elif not (line := line.removeprefix(codecs.BOM_UTF8) if offset == 0 else line).isspace() and line:
                        try:
                            yield self._convert(_parse(line.rstrip(b"\r\n"), "line"), transform)
                        except InvalidDocument as reason:
                            hint = ""
                            if offset == 0 and isinstance(reason, _NotOneValue):
                                hint = f"{_SPLIT}{self._list_hint(span.path)}"
                            elif offset == 0 and not line.startswith(b"{") and not ends_in(span.path, JSON_ENDINGS):
                                hint = f"; a {self._dataset} dataset reads {self._formats}"
                            yield bad_document(f"{reason}{hint}")
                    offset += num_bytes
            except BrokenStream as reason:
                lines_read += 1
                yield bad_document(reason, ends_file=True)


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


def _first_list(head: bytes) -> str:
    """Return the name of the first field that holds a list of objects or lists, in the object at the start of a file, or ""."""
    text = head.decode("utf-8-sig", "ignore").lstrip()
    position = 1
    while text.startswith("{") and (name := _NAME.match(text, position)):
        if re.compile(r"\[\s*[\[{]").match(text, name.end()):
            return name[1]
        try:
            _, stop = json.JSONDecoder().raw_decode(text, name.end())
            position = text.index(",", stop) + 1
        except (ValueError, RecursionError):  # the value continues after `head`
            break
    return ""


_NAME = re.compile(r'\s*"((?:[^"\\]|\\.)*)"\s*:\s*')
_LIST = "field {!r} holds {}; the file must hold this list only"
_SPLIT = "; a file must hold one complete object per line, or one array"


class _NotOneValue(InvalidDocument):
    """The JSON text ends inside a value, or goes on after it."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises InvalidDocument if two of its fields have the same name, because one of them would be lost."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        name = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise InvalidDocument(f"an object has two fields named {name!r}")
    return fields


def _parse(content: bytes, unit: str) -> Any:
    """Parse a JSON value. unit: what the content is, for messages."""
    try:
        # json.loads(content) without decoding would interpret bytes that contain zeros as UTF-16.
        return json.loads(content.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise InvalidDocument(f"the {unit} is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if unit == "line" else f"character {error.pos + 1}"
        is_incomplete = error.pos >= len(error.doc.rstrip())
        exception = _NotOneValue if is_incomplete or error.msg == "Extra data" else InvalidDocument
        hint = "; Python's notation is not JSON" if error.doc.startswith(("{'", "[{'")) else ""
        raise exception(f"the {unit} is not valid JSON: {error.msg} ({place}){hint}") from None
    except (ValueError, RecursionError):  # an integer with thousands of digits, thousands of nested brackets
        raise InvalidDocument(f"the {unit} is not valid JSON") from None

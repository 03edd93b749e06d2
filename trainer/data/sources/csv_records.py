"""Reader of tables of comma-separated or tab-separated values, which may be compressed. The first row names the columns."""

import csv
import io
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from trainer.base.config import ConfigError, DataConfig
from trainer.base.config.schema.data import DOCUMENT_COLUMNS
from trainer.base.system.spelling import counted, listed
from trainer.data.json_text import has_lone_surrogate
from trainer.data.sources.contents import HEAD_BYTES, recognise
from trainer.data.sources.source import BadDocument, Document, InvalidDocument, Span, too_long
from trainer.data.sources.streams import BrokenStream, open_stream
from trainer.data.sources.text_field import extractor, no_column_error

T = TypeVar("T")

_DELIMITERS = ",;\t"
_FLAGS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1, "true": True, "false": False}
"""Values of the columns weight and train."""


_LONGEST_NAME = 60
"""Maximum number of characters of a cell that may be the name of a column."""


def _is_value(cell: str) -> bool:
    """Return whether a cell of the first row is a sentence or a text rather than the name of a column."""
    return cell.rstrip().endswith((".", "?", "!")) or len(cell) > _LONGEST_NAME or "\n" in cell


class CsvRecords:
    """Reader of records. A file cannot be split, because a quoted value may contain line ends."""

    def __init__(self, config: DataConfig, field: str):
        """See text_field.extractor."""
        self._extract = extractor(field)
        self._field = field
        self._known = {field} if field else {*DOCUMENT_COLUMNS, *config.columns.values()}
        self._line = 1  # number of the line in which the next row begins
        self._dataset, self._max_bytes = config.dataset, config.max_document_bytes

    def __call__(self, span: Span, transform: Callable[[Document], T]) -> Iterator[T | BadDocument]:
        if span.start:
            return  # the first span contains the entire file
        line = 0
        try:
            with open_stream(span.path) as file:
                kind = recognise(file.peek(HEAD_BYTES)[:HEAD_BYTES], span.path)
                if kind is not None and kind.reader != "csv":
                    reason = kind.instead_of("a table of values", self._dataset)
                    yield BadDocument(span.path, 0, reason, ends_file=True)
                    return
                # Bytes that are not UTF-8 become lone surrogates, so that only their own row is bad.
                lines = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
                rows = self._rows(lines, span.path)
                _, names = next(rows, (0, []))
                names = self._checked(names, span.path)
                hint = (
                    ""
                    if self._known & {*names}
                    else "; the first row must name the columns, with , ; or a tab between them"
                )
                for line, row in rows:
                    try:
                        yield transform(self._extract(self._record(names, row)))
                    except InvalidDocument as reason:
                        yield BadDocument(span.path, line, f"{reason}{hint}")
                        hint = ""
        except csv.Error as error:
            reason = f"the table cannot be read from here on: {error}"
            yield BadDocument(span.path, self._line, reason, ends_file=True)
        except BrokenStream as reason:
            yield BadDocument(span.path, line + 1, str(reason), ends_file=True)

    def _rows(self, lines: io.TextIOWrapper, path: str) -> Iterator[tuple[int, list[str]]]:
        """Yield the number of the first line and the values of each row that is not blank."""
        header = lines.readline(self._max_bytes)
        delimiter = max(_DELIMITERS, key=header.count) if any(d in header for d in _DELIMITERS) else ","
        csv.field_size_limit(self._max_bytes)

        def limited() -> Iterator[str]:
            line = header
            while line:
                if len(line) >= self._max_bytes:
                    raise csv.Error(too_long(self._max_bytes))
                yield line
                line = lines.readline(self._max_bytes)

        reader = csv.reader(limited(), delimiter=delimiter, strict=True)
        self._line = 1
        for row in reader:
            if row:
                yield self._line, row
            self._line = reader.line_num + 1

    def _checked(self, names: list[str], path: str) -> list[str]:
        """Return the names of the columns. Raises ConfigError for columns that cannot be told apart, or without the text."""
        names = [
            name or f"column {i}" for i, name in enumerate(names, start=1)
        ]  # pandas writes an index without a name
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if twice is not None:
            raise ConfigError("data.path", f"{path}: its first row names two columns {twice!r}")
        if names and not self._known & {*names} and any(map(_is_value, names)):
            message = f"{path}: its first row ({listed(names)}) does not name the columns"
            raise ConfigError("data.path", f"{message}; add a first row with their names, such as {self._header()}")
        if self._field and names and self._field not in names:
            raise no_column_error(path, self._field, names, "its first row, which must name the columns")
        return names

    def _header(self) -> str:
        """Return an example of a first row."""
        chat = {"chat": "question,answer", "preference": "prompt,chosen,rejected"}
        return self._field or chat[self._dataset]

    def _record(self, names: list[str], row: list[str]) -> dict[str, Any]:
        if len(row) != len(names):
            raise InvalidDocument(
                f"the row has {counted(len(row), 'value')}, but the first row names {counted(len(names), 'column')}"
            )
        if any(has_lone_surrogate(value) for value in row if not value.isascii()):
            raise InvalidDocument("the row is not UTF-8 text")
        if sum(map(len, row)) > self._max_bytes:
            raise InvalidDocument(too_long(self._max_bytes))
        record = dict(zip(names, row, strict=True))
        return record if self._field else {name: self._cell(name, value) for name, value in record.items()}

    def _cell(self, name: str, value: str) -> Any:
        """Return the value of a cell: a flag, or a text, which may be the JSON text of messages."""
        return _FLAGS.get(value.strip().lower(), value) if name in ("weight", "train") else value

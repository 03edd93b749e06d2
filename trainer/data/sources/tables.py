"""Reader of tables in Parquet and Arrow files. Each row is a document, or the text in one of its columns is."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.base.config import ConfigError, DataConfig
from trainer.base.config.packages import require_package
from trainer.base.system.spelling import first_line
from trainer.data.sources.contents import ARROW_FILE, HEAD_BYTES, recognise
from trainer.data.sources.source import BadDocument, Document, InvalidDocument, Span, too_long
from trainer.data.sources.text_field import no_column_error

T = TypeVar("T")

_BATCH_ROWS = 256
"""Number of rows that are decoded at a time."""


@dataclass(frozen=True)
class Tables:
    """Reader of tables. A span contains the row groups that begin in it."""

    dataset: str
    """Type of the dataset."""
    format: str
    """Name of the file format in messages, with an article, such as "a parquet file"."""
    reader: str
    """Type of dataset that reads texts from such files."""
    row_groups: Callable[[Span, "Tables"], Iterator[tuple[int, int, Iterable]]]
    """Function that yields, for each row group, its byte offset, its number of rows, and an iterable of its record batches.
    Row groups that begin after the span may be omitted."""
    column: str
    """Column with the text of each document, or "" if a document is an entire row."""
    max_bytes: int

    @property
    def columns(self) -> list[str] | None:
        """Columns to read. None: all."""
        return [self.column] if self.column else None

    def __call__(self, span: Span, transform: Callable[[Document], T]) -> Iterator[T | BadDocument]:
        arrow = require_package("pyarrow", "data.dataset")
        row = start = 0  # a fault of the entire file is reported by its first span
        try:
            for start, num_rows, batches in self.row_groups(span, self):
                if not span.start <= start < span.stop:
                    row += num_rows
                    continue
                for value in self._values(batches):
                    row += 1
                    try:
                        yield transform(self._text(value) if self.column else self._record(value))
                    except InvalidDocument as reason:
                        yield BadDocument(span.path, row, str(reason))
        except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise  # this is a file system error
            if start >= span.start:  # otherwise an earlier span reports the error
                reason = f"this is not {self.format}, or it is damaged ({first_line(error)[:200].rstrip('.')})"
                yield BadDocument(span.path, row, self._other_format(span.path) or reason, ends_file=True)

    def _values(self, batches: Iterable) -> Iterator[Any]:
        """Yield the value of the text column in each row, or each row as a batch of its own."""
        for batch in batches:
            if self.column:
                yield from batch.column(self.column)
            else:
                yield from (batch.slice(i, 1) for i in range(batch.num_rows))

    def _other_format(self, path: str) -> str:
        """Return the reason why a file cannot be read if it is known to be of another kind, or ""."""
        with open(path, "rb") as file:
            kind = recognise(file.read(HEAD_BYTES), path)
        is_other = kind is not None and kind.reader != self.reader
        return kind.instead_of(self.format, self.dataset) if is_other else ""

    def require_text(self, path: str, schema: Any) -> None:
        """Raise ConfigError unless the table has the column `self.column` and the column holds text."""
        arrow = require_package("pyarrow", "data.dataset")
        if not self.column:
            return
        index = schema.get_field_index(self.column)
        if index < 0:
            raise no_column_error(path, self.column, schema.names)
        dtype = schema.field(index).type
        # A dictionary stores each distinct text once, and an index in each row.
        values = dtype.value_type if arrow.types.is_dictionary(dtype) else dtype
        if values not in (arrow.string(), arrow.large_string(), arrow.string_view()):
            raise ConfigError("data.text_field", f"column {self.column!r} of {path} holds {dtype}, not text")

    def _text(self, value: Any) -> str:
        if not value.is_valid:
            raise InvalidDocument(f"column {self.column!r} is null")
        content = (value.value if hasattr(value, "index") else value).as_buffer()
        if content.size > self.max_bytes:
            raise InvalidDocument(too_long(self.max_bytes))
        if not content.size:
            raise InvalidDocument("the document is empty")
        try:
            return str(content, "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidDocument(f"the value is not UTF-8 text (byte {error.start})") from None

    def _record(self, row: Any) -> dict[str, Any]:
        """Return the fields of one row. row: a batch of one row."""
        if row.nbytes > self.max_bytes:
            raise InvalidDocument(too_long(self.max_bytes))
        record = {}
        for name, column in zip(row.schema.names, row.columns, strict=True):
            if name in record:
                raise InvalidDocument(f"the table has two columns named {name!r}")
            try:
                record[name] = _plain(column[0].as_py())
            except UnicodeDecodeError as error:
                raise InvalidDocument(f"column {name!r} is not UTF-8 text (byte {error.start})") from None
        return {name: value for name, value in record.items() if value is not None}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it. In tables, each row has all fields of all rows, so those that are null are absent."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        if value and all(isinstance(entry, tuple) for entry in value):  # a map
            return {str(name): _plain(inner) for name, inner in value}
        return [_plain(inner) for inner in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value.hex()
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _parquet_row_groups(span: Span, table: Tables) -> Iterator[tuple[int, int, Iterable]]:
    parquet = require_package("pyarrow.parquet", "data.dataset")
    # Without a buffer, pyarrow would read a full column chunk at once, however large.
    with parquet.ParquetFile(span.path, buffer_size=2**20, pre_buffer=False) as file:
        table.require_text(span.path, file.schema_arrow)
        for i in range(file.num_row_groups):
            group = file.metadata.row_group(i)
            columns = map(group.column, range(group.num_columns))
            offsets = (o for c in columns for o in (c.dictionary_page_offset, c.data_page_offset) if o is not None)
            batches = file.iter_batches(_BATCH_ROWS, [i], columns=table.columns, use_threads=False)
            yield min(offsets, default=0), group.num_rows, batches


def _arrow_batches(span: Span, table: Tables) -> Iterator[tuple[int, int, Iterable]]:
    arrow = require_package("pyarrow", "data.dataset")
    with open(span.path, "rb") as file:
        is_file = file.read(len(ARROW_FILE)) == ARROW_FILE
    with arrow.memory_map(span.path) as file:
        if is_file:
            yield from _batches_of_file(span, table, arrow.ipc.open_file(file))
            return
        with arrow.ipc.open_stream(file) as stream:
            table.require_text(span.path, stream.schema)
            start = 0  # the first batch belongs to the first span
            for batch in stream:  # mapped: of an unused batch, only the header is read
                if start >= span.stop:
                    return
                yield start, batch.num_rows, _validated(batch, table.columns)
                start = file.tell()


def _batches_of_file(span: Span, table: Tables, file: Any) -> Iterator[tuple[int, int, Iterable]]:
    """Yield the batches of an Arrow file, which does not tell their offsets. They count as equally long."""
    table.require_text(span.path, file.schema)
    size = os.path.getsize(span.path)
    for i in range(file.num_record_batches):
        start = i * size // file.num_record_batches
        if start >= span.stop:
            return
        batch = file.get_batch(i)
        yield start, batch.num_rows, _validated(batch, table.columns)


def _validated(batch: Any, names: list[str] | None) -> Iterator:
    """Validate and yield a batch. Raises ArrowInvalid for offsets outside the mapped file. Arrow itself does not check them."""
    for column in batch.columns if names is None else map(batch.column, names):
        # Viewed as bytes, so that invalid UTF-8 is reported for its own row only.
        dtype = _as_bytes(column.type)
        (column if dtype == column.type else column.view(dtype)).validate(full=True)
    yield batch


def _as_bytes(dtype: Any) -> Any:
    """Return a type of Arrow, with bytes in the place of text."""
    arrow = require_package("pyarrow", "data.dataset")
    as_bytes = {
        arrow.string(): arrow.binary(),
        arrow.large_string(): arrow.large_binary(),
        arrow.string_view(): arrow.binary_view(),
    }
    if arrow.types.is_struct(dtype):
        return arrow.struct([field.with_type(_as_bytes(field.type)) for field in dtype])
    for is_list, make in ((arrow.types.is_list, arrow.list_), (arrow.types.is_large_list, arrow.large_list)):
        if is_list(dtype):
            return make(dtype.value_field.with_type(_as_bytes(dtype.value_type)))
    return as_bytes.get(dtype, dtype)


def parquet_tables(config: DataConfig, field: str) -> Tables:
    """Return a reader of Parquet files. field: see text_field.extractor."""
    max_bytes = config.max_document_bytes
    return Tables(config.dataset, "a parquet file", "parquet", _parquet_row_groups, field, max_bytes)


def arrow_tables(config: DataConfig, field: str) -> Tables:
    """Return a reader of Arrow streams and files. field: see text_field.extractor."""
    return Tables(config.dataset, "an Arrow table", "huggingface", _arrow_batches, field, config.max_document_bytes)

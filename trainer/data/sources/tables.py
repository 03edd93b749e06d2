"""Documents of a text column: parquet files, and the Arrow files of Hugging Face's datasets."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.config import ConfigError, DataConfig
from trainer.config.packages import require_package
from trainer.data.sources.files import find_files
from trainer.data.sources.source import BadDocument, InvalidDocument, Source, Span, too_long
from trainer.system.files import folder_error, read_json_object

T = TypeVar("T")

_BATCH_ROWS = 256
"""Number of rows that are decoded at a time."""


@dataclass(frozen=True)
class _Column:
    name: str
    max_bytes: int

    def require_text(self, path: str, schema: Any) -> None:
        """Raise ConfigError unless the table has this column and it holds text."""
        arrow = require_package("pyarrow", "data.dataset")
        index = schema.get_field_index(self.name)
        if index < 0:
            names = ", ".join(schema.names) or "none"
            raise ConfigError("data.text_field", f"{path} has no column {self.name!r}; its columns: {names}")
        dtype = schema.field(index).type
        # A dictionary stores each distinct text once, and an index in each row.
        values = dtype.value_type if arrow.types.is_dictionary(dtype) else dtype
        if values not in (arrow.string(), arrow.large_string(), arrow.string_view()):
            raise ConfigError("data.text_field", f"column {self.name!r} of {path} holds {dtype}, not text")

    def read(self, path: str, batch: Any, rows_before: int, transform: Callable[[str], T]) -> Iterator[T | BadDocument]:
        for row, value in enumerate(batch.column(self.name), start=rows_before + 1):
            try:
                yield transform(self._text(value))
            except InvalidDocument as reason:
                yield BadDocument(path, row, str(reason))

    def _text(self, value: Any) -> str:
        if not value.is_valid:
            raise InvalidDocument(f"null in column {self.name!r}")
        content = (value.value if hasattr(value, "index") else value).as_buffer()
        if content.size > self.max_bytes:
            raise InvalidDocument(too_long(self.max_bytes))
        if not content.size:
            raise InvalidDocument("empty")
        try:
            return str(content, "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidDocument(f"not UTF-8 text (byte {error.start} of the value)") from None


@dataclass(frozen=True)
class ParquetFiles:
    """Reader of parquet files: each row is a document. A row group belongs to the span in which it begins."""

    column: _Column

    def __call__(self, span: Span, transform: Callable[[str], T]) -> Iterator[T | BadDocument]:
        arrow, parquet = require_package("pyarrow", "data.dataset"), require_package("pyarrow.parquet", "data.dataset")
        row = start = 0  # a fault of the entire file is reported by its first span
        try:
            # Without a buffer, pyarrow would read a full column chunk at once, however large.
            file = parquet.ParquetFile(span.path, buffer_size=2**20, pre_buffer=False)
            with file:
                self.column.require_text(span.path, file.schema_arrow)
                for group in range(file.num_row_groups):
                    metadata = file.metadata.row_group(group)
                    if span.start <= (group_start := _first_byte(metadata)) < span.stop:
                        start = group_start
                        batches = file.iter_batches(_BATCH_ROWS, [group], columns=[self.column.name], use_threads=False)
                        for batch in batches:
                            yield from self.column.read(span.path, batch, row, transform)
                            row += batch.num_rows
                    else:
                        row += metadata.num_rows
        except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise  # this is a file system error
            if start >= span.start:
                yield BadDocument(span.path, row, f"not a parquet file, or damaged ({_first_line(error)})")


def _first_byte(group: Any) -> int:
    """Return the offset of a row group in its file."""
    columns = map(group.column, range(group.num_columns))
    offsets = (o for c in columns for o in (c.dictionary_page_offset, c.data_page_offset) if o is not None)
    return min(offsets, default=0)


@dataclass(frozen=True)
class ArrowFiles:
    """Reader of Arrow files: each row is a document. A record batch belongs to the span in which it begins."""

    column: _Column

    def __call__(self, span: Span, transform: Callable[[str], T]) -> Iterator[T | BadDocument]:
        arrow = require_package("pyarrow", "data.dataset")
        row = start = 0  # the first batch belongs to the first span
        try:
            with arrow.memory_map(span.path) as file, arrow.ipc.open_stream(file) as stream:
                self.column.require_text(span.path, stream.schema)
                while start < span.stop:
                    try:
                        batch = stream.read_next_batch()  # mapped: of an unused batch, only the header is read
                    except StopIteration:
                        return
                    if start >= span.start:
                        _validate(batch.column(self.column.name))
                        yield from self.column.read(span.path, batch, row, transform)
                    row += batch.num_rows
                    start = file.tell()
        except (arrow.ArrowInvalid, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            if start >= span.start:  # otherwise the previous span reports the error
                yield BadDocument(span.path, row, f"not an Arrow stream, or damaged ({_first_line(error)})")


def _validate(column: Any) -> None:
    """Raise ArrowInvalid for offsets outside the mapped file. Arrow itself does not check what it maps."""
    arrow = require_package("pyarrow", "data.dataset")
    as_bytes = {
        arrow.string(): arrow.binary(),
        arrow.large_string(): arrow.large_binary(),
        arrow.string_view(): arrow.binary_view(),
    }
    # Viewed as bytes, so that invalid UTF-8 is reported for its own row only.
    dtype = as_bytes.get(column.type)
    (column if dtype is None else column.view(dtype)).validate(full=True)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")[:200]


def _column(config: DataConfig) -> _Column:
    require_package("pyarrow", "data.dataset")  # raises before any worker starts
    return _Column(config.text_field, config.max_document_bytes)


def parquet(config: DataConfig) -> Source:
    column = _column(config)
    root, files = find_files(config.path, (".parquet",))
    return Source(root, files, True, ParquetFiles(column))


def huggingface(config: DataConfig) -> Source:
    column = _column(config)
    if os.path.isdir(config.path):
        files = _saved_files(config)
    elif config.path.startswith(("/", ".")):
        raise ConfigError("data.path", folder_error(config.path))
    else:
        files = _cached_files(config)
    return Source(os.path.commonpath([os.path.dirname(f) for f in files]), tuple(files), True, ArrowFiles(column))


def _saved_files(config: DataConfig) -> list[str]:
    """Return the Arrow files of a folder written by save_to_disk."""
    folder = config.path
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        splits = _json(os.path.join(folder, "dataset_dict.json")).get("splits", [])
        if config.split not in splits:
            raise ConfigError("data.split", f"not a split of {folder}; available: {', '.join(map(str, splits))}")
        folder = os.path.join(folder, config.split)
    state = os.path.join(folder, "state.json")
    if not os.path.isfile(state):
        raise ConfigError("data.path", f"{folder} was not written by datasets' save_to_disk: it has no state.json")
    try:
        names = [entry["filename"] for entry in _json(state)["_data_files"]]
        if not names or any(os.path.basename(name) != name for name in names):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ConfigError("data.path", f"{state} does not list the dataset's files") from None
    files = [os.path.join(folder, name) for name in names]
    missing = next((file for file in files if not os.path.isfile(file)), None)
    if missing is not None:
        raise ConfigError("data.path", f"{missing} is missing")
    return files


def _json(path: str) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except ValueError:
        raise ConfigError("data.path", f"{path} is not a JSON object") from None


def _cached_files(config: DataConfig) -> list[str]:
    """Return the Arrow files in which the package datasets caches a dataset that it finds by name."""
    datasets = require_package("datasets", "data.dataset")
    try:
        dataset = datasets.load_dataset(config.path, config.subset or None, split=config.split)
        files = [entry["filename"] for entry in dataset.cache_files]
        has_row_selection = getattr(dataset, "_indices", None) is not None
    except Exception as error:  # the package raises exceptions of many types
        message = f"not a folder, and the package datasets cannot load it: {_first_line(error)}"
        raise ConfigError("data.path", message) from None
    if has_row_selection or any(character in config.split for character in "[]+"):
        message = 'slices such as "train[:10%]" and combined splits are not supported: name one full split'
        raise ConfigError("data.split", message)
    if not files:
        message = "the package datasets holds it only in memory: write it with save_to_disk and name that folder"
        raise ConfigError("data.path", message)
    return files

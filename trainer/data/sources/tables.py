"""Documents from a text column in parquet files, or in Arrow files that Hugging Face's package `datasets` has written."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.config import ConfigError, DataConfig
from trainer.config.fields import did_you_mean
from trainer.config.packages import require_package
from trainer.data.sources.contents import HEAD_BYTES, recognize, recognize_json
from trainer.data.sources.files import describe_folder, find_files
from trainer.data.sources.source import BadDocument, InvalidDocument, Source, Span, too_long
from trainer.system.files import folder_error, read_json_object

T = TypeVar("T")

_BATCH_ROWS = 256
"""Number of rows that are decoded at a time."""


@dataclass(frozen=True)
class Tables:
    """Reader of tables. Each row is a document. A span contains the row groups that begin in it."""

    dataset: str
    """Type of the dataset."""
    format: str
    """Name of the file format in messages, with an article, such as "a parquet file"."""
    row_groups: Callable[[Span, "Tables"], Iterator[tuple[int, int, Iterable]]]
    """Function that yields, for each row group, its byte offset, its number of rows, and an iterable of its record batches.
    Row groups that begin after the span may be omitted."""
    column: str
    max_bytes: int

    def __call__(self, span: Span, transform: Callable[[str], T]) -> Iterator[T | BadDocument]:
        arrow = require_package("pyarrow", "data.dataset")
        row = start = 0  # a fault of the entire file is reported by its first span
        try:
            for start, num_rows, batches in self.row_groups(span, self):
                if not span.start <= start < span.stop:
                    row += num_rows
                    continue
                for value in itertools.chain.from_iterable(batch.column(self.column) for batch in batches):
                    row += 1
                    try:
                        yield transform(self._text(value))
                    except InvalidDocument as reason:
                        yield BadDocument(span.path, row, str(reason))
        except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise  # this is a file system error
            if start >= span.start:  # otherwise an earlier span reports the error
                reason = self._other_format(span.path) or f"{self.format}, or it is damaged ({_first_line(error)})"
                yield BadDocument(span.path, row, f"this is not {reason}", ends_file=True)

    def _other_format(self, path: str) -> str:
        """Return what a file is that was not recognized as a table, or "" if it is unknown or a damaged table."""
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
        kind = recognize(head) or recognize_json(head)
        if kind is None or kind.reader == self.dataset:
            return ""
        return f"{self.format}, but {kind.name}; {kind.advice(self.dataset)}"

    def require_text(self, path: str, schema: Any) -> None:
        """Raise ConfigError unless the table has the column `self.column` and the column holds text."""
        arrow = require_package("pyarrow", "data.dataset")
        index = schema.get_field_index(self.column)
        if index < 0:
            names = ", ".join(schema.names) or "none"
            raise ConfigError("data.text_field", f"{path} has no column {self.column!r}; its columns: {names}")
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


def _parquet_row_groups(span: Span, table: Tables) -> Iterator[tuple[int, int, Iterable]]:
    parquet = require_package("pyarrow.parquet", "data.dataset")
    # Without a buffer, pyarrow would read a full column chunk at once, however large.
    with parquet.ParquetFile(span.path, buffer_size=2**20, pre_buffer=False) as file:
        table.require_text(span.path, file.schema_arrow)
        for i in range(file.num_row_groups):
            group = file.metadata.row_group(i)
            columns = map(group.column, range(group.num_columns))
            offsets = (o for c in columns for o in (c.dictionary_page_offset, c.data_page_offset) if o is not None)
            batches = file.iter_batches(_BATCH_ROWS, [i], columns=[table.column], use_threads=False)
            yield min(offsets, default=0), group.num_rows, batches


def _arrow_batches(span: Span, table: Tables) -> Iterator[tuple[int, int, Iterable]]:
    arrow = require_package("pyarrow", "data.dataset")
    with arrow.memory_map(span.path) as file, arrow.ipc.open_stream(file) as stream:
        table.require_text(span.path, stream.schema)
        start = 0  # the first batch belongs to the first span
        for batch in stream:  # mapped: of an unused batch, only the header is read
            if start >= span.stop:
                return
            yield start, batch.num_rows, _validated(batch, table.column)
            start = file.tell()


def _validated(batch: Any, name: str) -> Iterator:
    """Validate and yield a batch. Raises ArrowInvalid for offsets outside the mapped file. Arrow itself does not check them."""
    arrow = require_package("pyarrow", "data.dataset")
    as_bytes = {
        arrow.string(): arrow.binary(),
        arrow.large_string(): arrow.large_binary(),
        arrow.string_view(): arrow.binary_view(),
    }
    column = batch.column(name)
    # Viewed as bytes, so that invalid UTF-8 is reported for its own row only.
    dtype = as_bytes.get(column.type)
    (column if dtype is None else column.view(dtype)).validate(full=True)
    yield batch


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")[:200]


def parquet(config: DataConfig) -> Source:
    require_package("pyarrow", "data.dataset")  # raises before any worker starts
    root, files = find_files(config.path, (".parquet",), config.dataset)
    read = Tables(config.dataset, "a parquet file", _parquet_row_groups, config.text_field, config.max_document_bytes)
    return Source(root, files, True, read)


def huggingface(config: DataConfig) -> Source:
    require_package("pyarrow", "data.dataset")
    if os.path.isdir(config.path):
        files = _saved_files(config)
    elif config.path.startswith(("/", ".")):
        raise ConfigError("data.path", folder_error(config.path))
    else:
        files = _cached_files(config)
    read = Tables(config.dataset, "an Arrow stream", _arrow_batches, config.text_field, config.max_document_bytes)
    return Source(os.path.commonpath([os.path.dirname(f) for f in files]), tuple(files), True, read)


def _saved_files(config: DataConfig) -> list[str]:
    """Return the paths of the Arrow files in a folder that was written by save_to_disk."""
    folder = config.path
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        splits = _json(os.path.join(folder, "dataset_dict.json")).get("splits", [])
        if config.split not in splits:
            names = list(map(str, splits))
            hint = did_you_mean(config.split, names)
            raise ConfigError("data.split", f"{folder} has no such split; available: {', '.join(names)}{hint}")
        folder = os.path.join(folder, config.split)
    state = os.path.join(folder, "state.json")
    if not os.path.isfile(state):
        held = describe_folder(folder, "huggingface")
        raise ConfigError("data.path", f"{folder} has no state.json, so it was not written by save_to_disk{held}")
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
    """Load a dataset by name with the package `datasets`, and return the paths of its cached Arrow files."""
    datasets = require_package("datasets", "data.dataset")
    try:
        dataset = datasets.load_dataset(config.path, config.subset or None, split=config.split)
        files = [entry["filename"] for entry in dataset.cache_files]
        has_row_selection = getattr(dataset, "_indices", None) is not None
    except Exception as error:  # the package raises exceptions of many types
        message = f"this path is not a folder, and the package datasets cannot load it: {_first_line(error)}"
        raise ConfigError("data.path", message) from None
    if has_row_selection or any(character in config.split for character in "[]+"):
        message = 'slices such as "train[:10%]" and combined splits are not supported: name one full split'
        raise ConfigError("data.split", message)
    if not files:
        message = "this dataset is only in memory; write it with save_to_disk and name that folder"
        raise ConfigError("data.path", message)
    return files

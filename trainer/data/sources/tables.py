"""Documents from a text column: parquet files, and the Arrow files of Hugging Face's datasets."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.config import ConfigError, DataConfig
from trainer.config.packages import require_package
from trainer.data.sources.files import matching
from trainer.data.sources.source import BadDocument, InvalidDocument, Source, Span, too_long
from trainer.system.files import folder_error

T = TypeVar("T")

_ROWS = 256
"""That are unpacked at a time."""


@dataclass(frozen=True)
class _Column:
    name: str
    max_bytes: int

    def require_text(self, path: str, schema: Any) -> None:
        """Raises ConfigError where the table has no such column of text."""
        arrow = require_package("pyarrow", "data.dataset")
        index = schema.get_field_index(self.name)
        if index < 0:
            names = ", ".join(schema.names) or "none"
            raise ConfigError("data.text_field", f"{path} has no column {self.name!r}; its columns: {names}")
        kind = schema.field(index).type
        # A dictionary keeps each text once and the rows as numbers of it.
        values = kind.value_type if arrow.types.is_dictionary(kind) else kind
        if values not in (arrow.string(), arrow.large_string(), arrow.string_view()):
            raise ConfigError("data.text_field", f"column {self.name!r} of {path} holds {kind}, not text")

    def read(self, path: str, batch: Any, rows_before: int, take: Callable[[str], T]) -> Iterator[T | BadDocument]:
        for row, value in enumerate(batch.column(self.name), start=rows_before + 1):
            try:
                yield take(self._text(value))
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
    """A row is a document; a group of rows belongs to the span in which it begins."""

    column: _Column

    def __call__(self, span: Span, take: Callable[[str], T]) -> Iterator[T | BadDocument]:
        arrow, parquet = require_package("pyarrow", "data.dataset"), require_package("pyarrow.parquet", "data.dataset")
        row = begin = 0  # what is wrong with the whole file belongs to where it begins
        try:
            # A buffer: else a whole column of a group is read at once, however large.
            file = parquet.ParquetFile(span.path, buffer_size=2**20, pre_buffer=False)
            with file:
                self.column.require_text(span.path, file.schema_arrow)
                for group in range(file.num_row_groups):
                    about = file.metadata.row_group(group)
                    if span.start <= (group_begin := _begin(about)) < span.stop:
                        begin = group_begin
                        batches = file.iter_batches(_ROWS, [group], columns=[self.column.name], use_threads=False)
                        for batch in batches:
                            yield from self.column.read(span.path, batch, row, take)
                            row += batch.num_rows
                    else:
                        row += about.num_rows
        except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise  # of the file system
            if begin >= span.start:
                yield BadDocument(span.path, row, f"not a parquet file, or damaged ({_first_line(error)})")


def _begin(group: Any) -> int:
    """First byte of a group of rows in its file."""
    columns = map(group.column, range(group.num_columns))
    offsets = (o for c in columns for o in (c.dictionary_page_offset, c.data_page_offset) if o is not None)
    return min(offsets, default=0)


@dataclass(frozen=True)
class ArrowFiles:
    """A row is a document; a batch of rows belongs to the span in which it begins."""

    column: _Column

    def __call__(self, span: Span, take: Callable[[str], T]) -> Iterator[T | BadDocument]:
        arrow = require_package("pyarrow", "data.dataset")
        row = begin = 0  # the first batch belongs to where the file begins
        try:
            with arrow.memory_map(span.path) as file, arrow.ipc.open_stream(file) as stream:
                self.column.require_text(span.path, stream.schema)
                while begin < span.stop:
                    try:
                        batch = stream.read_next_batch()  # mapped: of one that is passed over only the header is read
                    except StopIteration:
                        return
                    if begin >= span.start:
                        _require_sound(batch.column(self.column.name))
                        yield from self.column.read(span.path, batch, row, take)
                    row += batch.num_rows
                    begin = file.tell()
        except (arrow.ArrowInvalid, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            if begin >= span.start:  # else the span before has told it
                yield BadDocument(span.path, row, f"not an Arrow stream, or damaged ({_first_line(error)})")


def _require_sound(column: Any) -> None:
    """Raises ArrowInvalid where damage leads out of the mapped file: Arrow itself looks at nothing that it maps."""
    arrow = require_package("pyarrow", "data.dataset")
    as_bytes = {
        arrow.string(): arrow.binary(),
        arrow.large_string(): arrow.large_binary(),
        arrow.string_view(): arrow.binary_view(),
    }
    # As bytes, so that bad UTF-8 in a row is the problem of that row alone.
    kind = as_bytes.get(column.type)
    (column if kind is None else column.view(kind)).validate(full=True)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")[:200]


def _column(config: DataConfig) -> _Column:
    require_package("pyarrow", "data.dataset")  # told before any process starts
    return _Column(config.text_field, config.max_document_bytes)


def parquet(config: DataConfig) -> Source:
    column = _column(config)
    root, files = matching(config.path, (".parquet",))
    return Source(root, files, True, ParquetFiles(column))


def huggingface(config: DataConfig) -> Source:
    column = _column(config)
    if os.path.isdir(config.path):
        files = _saved(config)
    elif config.path.startswith(("/", ".")):
        raise ConfigError("data.path", folder_error(config.path))
    else:
        files = _by_name(config)
    return Source(os.path.commonpath([os.path.dirname(f) for f in files]), tuple(files), True, ArrowFiles(column))


def _saved(config: DataConfig) -> list[str]:
    """The Arrow files of a folder that datasets.save_to_disk wrote."""
    folder = config.path
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        splits = _json(os.path.join(folder, "dataset_dict.json")).get("splits", [])
        if config.split not in splits:
            raise ConfigError("data.split", f"{folder} has the splits {', '.join(map(str, splits))}")
        folder = os.path.join(folder, config.split)
    state = os.path.join(folder, "state.json")
    if not os.path.isfile(state):
        raise ConfigError(
            "data.path", f"{folder} is no dataset that save_to_disk of datasets wrote: it has no state.json"
        )
    try:
        names = [entry["filename"] for entry in _json(state)["_data_files"]]
        if not names or any(os.path.basename(name) != name for name in names):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ConfigError("data.path", f"{state} names no files of the dataset") from None
    files = [os.path.join(folder, name) for name in names]
    missing = next((file for file in files if not os.path.isfile(file)), None)
    if missing is not None:
        raise ConfigError("data.path", f"{missing} is missing")
    return files


def _json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ConfigError("data.path", f"{path} is no JSON object")
    return content


def _by_name(config: DataConfig) -> list[str]:
    """The Arrow files into which the package datasets puts a dataset that it knows, or finds, by name."""
    datasets = require_package("datasets", "data.dataset")
    try:
        found = datasets.load_dataset(config.path, config.subset or None, split=config.split)
        files = [entry["filename"] for entry in found.cache_files]
        chosen = getattr(found, "_indices", None) is not None
    except Exception as error:  # of any kind, as its many parts raise them
        why = f"no folder, and the package datasets does not find it: {_first_line(error)}"
        raise ConfigError("data.path", why) from None
    if chosen or any(letter in config.split for letter in "[]+"):
        raise ConfigError("data.split", "names a part of a split, or several; its files hold all of it")
    if not files:
        raise ConfigError(
            "data.path", "the package datasets keeps it in memory only; save_to_disk it, and name the folder"
        )
    return files

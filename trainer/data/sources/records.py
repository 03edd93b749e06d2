"""Sources of records: texts, conversations and preference pairs, in every file format that holds records."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from trainer.base.config import ConfigError, DataConfig
from trainer.base.config.hub import is_dataset_name
from trainer.base.config.packages import require_package
from trainer.base.system.files import folder_error
from trainer.data.sources.contents import HEAD_BYTES, endings_of, recognise
from trainer.data.sources.csv_records import CsvRecords
from trainer.data.sources.datasets_library import cached_files, is_saved, saved_files
from trainer.data.sources.files import find_files
from trainer.data.sources.json_records import JsonRecords
from trainer.data.sources.source import BadDocument, Document, Reader, Source, Span
from trainer.data.sources.streams import ends_in
from trainer.data.sources.tables import arrow_tables, parquet_tables

T = TypeVar("T")

_CHATS = Path(__file__).parents[1] / "chat"
SHIPPED = {"chat": _CHATS / "chats.jsonl", "preference": _CHATS / "preferences.jsonl"}
"""Type of dataset -> file with short conversations about this project, which is read if the path is empty."""

_TABLES = ("parquet", "huggingface")
"""Types of datasets whose files the package pyarrow reads."""
READERS: dict[str, Callable[[DataConfig, str], Reader]] = {
    "jsonl": JsonRecords,
    "parquet": parquet_tables,
    "huggingface": arrow_tables,
    "csv": CsvRecords,
}
"""Type of dataset of texts -> function (configuration, field) -> reader of its files. field: see text_field.extractor. If a
folder of conversations holds files of several formats, those of the first one are read."""


def texts(config: DataConfig) -> Source:
    """Return a source of the texts in data.text_field of records in the format of the dataset."""
    if config.dataset in _TABLES:
        require_package("pyarrow", "data.dataset")  # raises before any worker starts
    return _source(config, (config.dataset,), config.text_field)


def records(config: DataConfig) -> Source:
    """Return a source of conversations or preference pairs in files of any format."""
    return _source(config, tuple(READERS), "")


def _source(config: DataConfig, formats: tuple[str, ...], field: str) -> Source:
    root, files = _files(config, formats)
    if any(ends_in(file, endings_of(table)) for table in _TABLES for file in files):
        require_package("pyarrow", "data.dataset")
    readers = {name: READERS[name](config, field) for name in formats}
    return Source(root, files, True, ByFormat(readers) if len(readers) > 1 else readers[formats[0]])


def _files(config: DataConfig, formats: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the root folder and the sorted files of a dataset."""
    path = config.path or str(SHIPPED.get(config.dataset, ""))
    from_library = None
    if formats == ("huggingface",):
        if os.path.isdir(path):
            from_library = saved_files
        elif not ends_in(path, endings_of("huggingface")):
            if path.startswith(("/", ".")):
                raise ConfigError("data.path", folder_error(path))
            from_library = cached_files
    elif "huggingface" in formats:
        from_library = saved_files if is_saved(path) else cached_files if is_dataset_name(path) else None
    if from_library is None:
        _require_no_split(config)
        return find_files(path, config.dataset, formats)
    files = from_library(config)
    return os.path.commonpath([os.path.dirname(file) for file in files]), tuple(files)


def _require_no_split(config: DataConfig) -> None:
    """Raise ConfigError if a part of a dataset is selected, but the dataset consists of plain files."""
    for name in ("split", "subset"):
        if getattr(config, name) != getattr(DataConfig(), name):
            message = "has an effect only if data.path is a folder written by save_to_disk or the name of a dataset"
            raise ConfigError(f"data.{name}", f"{message}; select files with a pattern, such as data/test-*.parquet")


class ByFormat:
    """Reader of files of several formats. The content of a file determines its format, and otherwise its name."""

    def __init__(self, readers: Mapping[str, Reader]):
        """readers: key of READERS -> reader."""
        self._readers = readers

    def __call__(self, span: Span, transform: Callable[[Document], T]) -> Iterator[T | BadDocument]:
        return self._readers[_format_of(span.path)](span, transform)


def _format_of(path: str) -> str:
    """Return the key of READERS for a file. Files of an unknown kind count as JSON, whose reader names the kind."""
    with open(path, "rb") as file:
        kind = recognise(file.read(HEAD_BYTES), path)
    if kind is not None and kind.reader in READERS:
        return kind.reader
    return next((name for name in READERS if ends_in(path, endings_of(name))), "jsonl")

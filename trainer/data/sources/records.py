"""Sources of records: texts, conversations and preference pairs, in every file format that holds records."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainer.base.config import ConfigError, DataConfig
from trainer.base.config.packages import require_package
from trainer.base.system.files import folder_error
from trainer.base.system.paths import is_dataset_name
from trainer.data.sources.contents import HEAD_BYTES, recognize
from trainer.data.sources.csv_records import CSV_ENDINGS, CsvRecords
from trainer.data.sources.datasets_library import cached_files, is_saved, saved_files
from trainer.data.sources.files import find_files
from trainer.data.sources.json_array import is_array
from trainer.data.sources.json_records import JSON_ENDINGS, JsonRecords
from trainer.data.sources.source import BadDocument, Document, Reader, Source, Span
from trainer.data.sources.streams import ends_in
from trainer.data.sources.tables import arrow_tables, parquet_tables

T = TypeVar("T")

_CHATS = Path(__file__).parents[1] / "chat"
SHIPPED = {"chat": _CHATS / "chats.jsonl", "preference": _CHATS / "preferences.jsonl"}
"""Type of dataset -> file with short conversations about this project, which is read if the path is empty."""


@dataclass(frozen=True)
class Format:
    endings: tuple[str, ...]
    """Endings of the names of such files."""
    reader: Callable[[DataConfig, str], Reader]
    """Function (configuration, field) -> reader. field: see text_field.extractor."""


FORMATS = {
    "JSON": Format(JSON_ENDINGS, JsonRecords),
    "Parquet": Format((".parquet",), parquet_tables),
    "Arrow": Format((".arrow", ".feather"), arrow_tables),
    "CSV": Format(CSV_ENDINGS, CsvRecords),
}
"""File formats of records. If a folder holds files of several formats, those of the first one are read."""


def texts(config: DataConfig, format: str) -> Source:
    """Return a source of the texts in data.text_field of records in one format."""
    if format in ("Parquet", "Arrow"):
        require_package("pyarrow", "data.dataset")  # raises before any worker starts
    return _source(config, (format,), config.text_field)


def records(config: DataConfig) -> Source:
    """Return a source of conversations or preference pairs in files of any format."""
    return _source(config, tuple(FORMATS), "")


def _source(config: DataConfig, formats: tuple[str, ...], field: str) -> Source:
    root, files = _files(config, formats)
    if any(ends_in(file, FORMATS["Parquet"].endings + FORMATS["Arrow"].endings) for file in files):
        require_package("pyarrow", "data.dataset")
    readers = {name: FORMATS[name].reader(config, field) for name in formats}
    return Source(root, files, True, ByFormat(readers) if len(readers) > 1 else readers[formats[0]])


def _files(config: DataConfig, formats: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the root folder and the sorted files of a dataset."""
    path = config.path or str(SHIPPED.get(config.dataset, ""))
    groups = [FORMATS[name].endings for name in formats]
    from_library = None
    if formats == ("Arrow",):
        if os.path.isdir(path):
            from_library = saved_files
        elif not ends_in(path, groups[0]):
            if path.startswith(("/", ".")):
                raise ConfigError("data.path", folder_error(path))
            from_library = cached_files
    elif "Arrow" in formats:
        from_library = saved_files if is_saved(path) else cached_files if is_dataset_name(path) else None
    if from_library is None:
        _require_no_split(config)
        return find_files(path, config.dataset, *groups)
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
        """readers: name of a format -> its reader."""
        self._readers = readers

    def __call__(self, span: Span, transform: Callable[[Document], T]) -> Iterator[T | BadDocument]:
        return self._readers[format_of(span.path)](span, transform)


def format_of(path: str) -> str:
    """Return the name of a file's format. Files of an unknown kind count as JSON, whose reader names the kind."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    kind = recognize(head)
    for name, reader in (("Parquet", "parquet"), ("Arrow", "huggingface")):
        if kind is not None and kind.reader == reader:
            return name
    if kind is None and not is_array(head) and not head.lstrip().startswith(b"{"):
        return next((name for name, format in FORMATS.items() if ends_in(path, format.endings)), "JSON")
    return "CSV" if ends_in(path, FORMATS["CSV"].endings) else "JSON"

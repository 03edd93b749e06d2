"""The interface between readers of files and the preparation of token stores."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from trainer.data.sources.streams import is_compressed

T = TypeVar("T")

Document = str | np.ndarray | dict[str, Any]
"""Text, tokens, or the fields of a record. All documents of a source have the same type."""


@dataclass(frozen=True)
class Span:
    """Byte range [start, stop) of a file. It contains the documents that begin in it. Spans can be read independently."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class BadDocument:
    """A document that could not be read."""

    file: str
    line: int
    """Number of the line, table row or indexed document, counted from 1. 0 means the entire file or an unknown number."""
    reason: str
    ends_file: bool = False
    """Whether the rest of the file, which may hold any number of documents, could not be read either."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}" if self.line else f"{self.file}: {self.reason}"


class InvalidDocument(Exception):
    """The reason why a record does not hold a usable document."""


class Reader(Protocol):
    def __call__(self, span: Span, transform: Callable[[Any], T]) -> Iterator[T | BadDocument]:
        """Yield transform(document) for each document of a span, in order. `transform` never receives an empty text or array.

        An InvalidDocument raised by `transform` is yielded as a BadDocument. Raises ConfigError for a fault that affects
        more than one document, such as a missing column.
        """


@dataclass(frozen=True)
class Source:
    """The files of a dataset. A Source can be pickled, so that it can be sent to worker processes."""

    root: str
    """Common folder of the files. The fingerprint contains file names relative to this folder."""
    files: tuple[str, ...]
    """Paths of the files, sorted so that all nodes use the same order. Strings need less memory than Path objects."""
    splittable: bool
    """Whether uncompressed files can be split into several spans."""
    read: Reader
    auxiliary_files: tuple[str, ...] = ()
    """Paths of files that contain no documents but are needed to read the documents, such as an index."""

    def spans(self, path: str, num_bytes: int, chunk_bytes: int) -> Iterator[Span]:
        """Split a file of num_bytes into spans of at most chunk_bytes, or into a single span if it cannot be split."""
        if not self.splittable or is_compressed(path):
            chunk_bytes = max(num_bytes, 1)
        for start in range(0, max(num_bytes, 1), chunk_bytes):  # an empty file has one span, so that it is counted
            yield Span(path, start, min(start + chunk_bytes, num_bytes))

    def documents(self, transform: Callable[[Any], Any] = lambda document: document) -> Iterator[Any]:
        """Yield transform(document) for each document, or a BadDocument. See Reader."""
        for path in self.files:
            yield from self.read(Span(path, 0, os.path.getsize(path)), transform)


def too_long(max_bytes: int) -> str:
    return f"the document is longer than data.max_document_bytes = {max_bytes}"

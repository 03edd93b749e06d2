"""What a source of documents is."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from trainer.data.sources.streams import is_compressed

T = TypeVar("T")

Document = str | np.ndarray | dict[str, Any]
"""Text, tokens as they are, or the fields of a record; one kind for all of a source."""


@dataclass(frozen=True)
class Span:
    """A piece of a file that can be read without the rest: bytes [start, stop). A document belongs to the span in which it
    begins."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class BadDocument:
    """A document that could not be read."""

    file: str
    line: int
    """Line of a text, row of a table, document of an index, counted from 1; 0: the file as a whole."""
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}" if self.line else f"{self.file}: {self.reason}"


class InvalidDocument(Exception):
    """A record that holds no document, or a document of which nothing can be made: the reason."""


class Reader(Protocol):
    def __call__(self, span: Span, take: Callable[[Any], T]) -> Iterator[T | BadDocument]:
        """What take makes of the documents of a span, in order; none of them is empty. Where take raises InvalidDocument, that is the
        document's problem. Raises ConfigError for what no other document can make good."""


@dataclass(frozen=True)
class Source:
    """It travels to worker processes."""

    root: str
    """What the names of the files are relative to."""
    files: tuple[str, ...]
    """In an order that does not depend on the machine. Not Path: there may be millions."""
    splittable: bool
    """Whether a span may be less than a file."""
    read: Reader
    auxiliary_files: tuple[str, ...] = ()
    """Files that belong to the content, but are not read by themselves."""

    def spans(self, path: str, size: int, step: int) -> Iterator[Span]:
        """The file, of size bytes, in pieces of at most step bytes, or in one where it cannot be cut."""
        if not self.splittable or is_compressed(path):
            step = max(size, 1)
        for start in range(0, max(size, 1), step):  # an empty file too, so that it is counted
            yield Span(path, start, min(start + step, size))

    def documents(self) -> Iterator[Document | BadDocument]:
        """Of all files."""
        for path in self.files:
            yield from self.read(Span(path, 0, os.path.getsize(path)), lambda document: document)


def too_long(max_bytes: int) -> str:
    return f"longer than data.max_document_bytes = {max_bytes}"

"""Sources of documents that are text files, which may be compressed."""

import codecs
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from trainer.base.config import DataConfig
from trainer.data.sources.contents import LFS_POINTER, UTF_16, recognise
from trainer.data.sources.files import find_files
from trainer.data.sources.source import BadDocument, InvalidDocument, Source, Span, too_long
from trainer.data.sources.streams import BrokenStream, open_stream

T = TypeVar("T")


def _read_text(max_bytes: int, span: Span, transform: Callable[[str], T]) -> Iterator[T | BadDocument]:
    """Read a text file as one document."""
    try:
        with open_stream(span.path) as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise InvalidDocument(too_long(max_bytes))
        content = content.removeprefix(codecs.BOM_UTF8)
        if not content:
            raise InvalidDocument("the document is empty")
        kind = recognise(content, span.path)
        if kind in (LFS_POINTER, UTF_16):  # which may be UTF-8 too
            raise InvalidDocument(f"this is {kind.name}; {kind.advice('text')}")
        yield transform(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        if kind and kind.reader not in ("jsonl", "csv"):  # which are text
            yield BadDocument(span.path, 0, kind.instead_of("UTF-8 text", "text"))
        else:
            line = content.count(b"\n", 0, error.start) + 1
            yield BadDocument(span.path, line, f"the file is not UTF-8 text (byte {error.start})")
    except (InvalidDocument, BrokenStream) as reason:
        yield BadDocument(span.path, 0, str(reason))


def python_stdlib(config: DataConfig) -> Source:
    """Return the Python standard library's files as a Source. Installed packages are excluded, because they may differ between
    nodes, and so are empty files and links, which differ between distributions."""
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "__pycache__"}
    files = (p for p in root.rglob("*.py") if not excluded.intersection(p.relative_to(root).parts))
    files = (p for p in files if p.stat().st_size and not p.is_symlink())
    return Source(str(root), tuple(sorted(map(str, files))), False, partial(_read_text, config.max_document_bytes))


def text(config: DataConfig) -> Source:
    root, files = find_files(config.path, config.dataset)
    return Source(root, files, False, partial(_read_text, config.max_document_bytes))

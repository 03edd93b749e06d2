"""Readers of documents. A source is a list of files and a way to read a piece of one; nothing here knows of tokens."""

import glob
import itertools
import json
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.config import ConfigError, DataConfig


@dataclass(frozen=True)
class Span:
    """A piece of a file that can be read without the rest: bytes [start, stop)."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class Problem:
    """A document that could not be read."""

    where: str
    reason: str


@dataclass(frozen=True)
class Source:
    """files: in an order that does not depend on the machine. root: what their names are relative to."""

    root: Path
    files: tuple[Path, ...]
    splittable: bool
    """Whether a span may be less than a file."""
    read: Callable[[Span], Iterator[str | Problem]]
    """Documents of a span, in order."""


def _read_text(span: Span) -> Iterator[str | Problem]:
    """A file is one document."""
    try:
        yield span.path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        yield Problem(str(span.path), f"not UTF-8 text (byte {error.start})")


class _JsonLines:
    """A line is one document; a line belongs to the span in which it begins."""

    def __init__(self, field: str):
        self.field = field

    def __call__(self, span: Span) -> Iterator[str | Problem]:
        with span.path.open("rb") as file:
            if span.start:
                file.seek(span.start - 1)
                file.readline()
            while (begin := file.tell()) < span.stop and (line := file.readline()):
                if line.strip():
                    yield self._document(line, f"{span.path} (byte {begin})")

    def _document(self, line: bytes, where: str) -> str | Problem:
        try:
            document = json.loads(line)
        except UnicodeDecodeError:
            return Problem(where, "not UTF-8 text")
        except (ValueError, RecursionError):
            return Problem(where, "not valid JSON")
        text = document.get(self.field) if isinstance(document, dict) else None
        if not isinstance(text, str):
            return Problem(where, f"no text in field {self.field!r}")
        # JSON can name half of a surrogate pair, which is no character and which no tokenizer takes.
        return text if text.isascii() or _is_unicode(text) else Problem(where, "holds half of a surrogate pair")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _matching(path: str, suffixes: tuple[str, ...]) -> tuple[Path, tuple[Path, ...]]:
    """Root and files of a file, a folder (searched through for the suffixes) or a glob pattern."""
    named = Path(path)
    if named.is_dir():
        root, files = named, (p for p in named.rglob("*") if p.suffix in suffixes)
    elif named.is_file():
        root, files = named.parent, iter([named])
    else:
        # The folders before the first wildcard.
        fixed = itertools.takewhile(lambda part: not glob.has_magic(part), named.parts[:-1])
        root, files = Path(*fixed), (Path(p) for p in glob.glob(path, recursive=True))
    found = tuple(sorted((p for p in files if p.is_file()), key=lambda p: p.as_posix()))
    if not found:
        raise ConfigError("data.path", f"holds no file ending in {' or '.join(suffixes)}")
    return root, found


def _python_stdlib(config: DataConfig) -> Source:
    """Real text that every machine has: the standard library's own source. What an installation of packages adds is left
    out, so that the corpus stays the same."""
    root = Path(sysconfig.get_path("stdlib"))
    foreign = {"site-packages", "dist-packages", "__pycache__"}
    files = (p for p in root.rglob("*.py") if not foreign.intersection(p.relative_to(root).parts))
    return Source(root, tuple(sorted(files, key=lambda p: p.as_posix())), splittable=False, read=_read_text)


def _text(config: DataConfig) -> Source:
    root, files = _matching(config.path, (".txt", ".md"))
    return Source(root, files, splittable=False, read=_read_text)


def _jsonl(config: DataConfig) -> Source:
    root, files = _matching(config.path, (".jsonl", ".json"))
    return Source(root, files, splittable=True, read=_JsonLines(config.text_field))


DATASETS: dict[str, Callable[[DataConfig], Source]] = {
    "python_stdlib": _python_stdlib,
    "text": _text,
    "jsonl": _jsonl,
}


def open_source(config: DataConfig) -> Source:
    """Raises ConfigError where there is nothing to read."""
    return DATASETS[config.dataset](config)

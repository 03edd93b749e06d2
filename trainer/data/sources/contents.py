"""What a file of data is, which type of dataset reads it, and what to do if none does: one table, `FILES`.

A file's first bytes decide, and for a table of values, which is plain text, the ending of its name. In a folder, endings decide.
"""

import codecs
import os
from collections.abc import Callable
from dataclasses import dataclass

from trainer.base.config.recognition import is_lfs_pointer
from trainer.base.config.schema.data import CHAT_DATASETS, COMPRESSED, READER_OF_ENDING

HEAD_BYTES = 512
"""Number of bytes from which a file is recognised."""


def _starts(*beginnings: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(beginnings)


def _never(head: bytes) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A row of the table."""

    name: str
    """Name with an article, such as "a Parquet table"."""
    sign: Callable[[bytes], bool] = _never
    """Whether the content that begins with these bytes is of this kind."""
    endings: tuple[str, ...] = ()
    """Endings of the names of such files."""
    needs_ending: bool = False
    """Whether the ending must show the kind too, because the content is also that of other files."""
    way_out: str = "convert such files to JSON lines, for example with to_json of the package datasets"
    """What the user can do if no type of dataset reads them."""

    @property
    def reader(self) -> str:
        """Type of dataset that reads such files, or ""."""
        return READER_OF_ENDING.get(self.endings[0], "") if self.endings else ""

    def advice(self, dataset: str) -> str:
        """Return what the user of this type of dataset can do."""
        if dataset in CHAT_DATASETS and self.reader in ("parquet", "huggingface"):
            return "decompress such files"  # plain files are read
        # Text and tokens hold no conversations.
        is_advice = self.reader and not (dataset in CHAT_DATASETS and self.reader in ("text", "tokens"))
        return f'dataset = "{self.reader}" reads such files' if is_advice else self.way_out

    def instead_of(self, expected: str, dataset: str) -> str:
        """Return the reason why the reader of a dataset cannot read a file of this kind. expected: what it reads."""
        return f"this is {self.name}, not {expected}; {self.advice(dataset)}"


def _is_utf16(head: bytes) -> bool:
    """Return whether a text is UTF-16, also without its mark: every second byte of Latin letters is zero, the others are not."""
    halves = head[:HEAD_BYTES:2], head[1:HEAD_BYTES:2]
    is_latin = any(a.count(0) > 0.8 * len(a) and 0 not in b for a, b in (halves, halves[::-1]) if a and b)
    return is_latin or head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def _is_archive(head: bytes) -> bool:
    return head.startswith((_ZIP, b"7z\xbc\xaf\x27\x1c", b"Rar!")) or head[257:262] == b"ustar"


def _is_html(head: bytes) -> bool:
    return head[:HEAD_BYTES].lstrip()[:9].lower().startswith((b"<!doctype", b"<html"))


def _is_json(head: bytes) -> bool:
    return head[:HEAD_BYTES].removeprefix(codecs.BOM_UTF8).lstrip().startswith((b"{", b"["))


ARROW_FILE = b"ARROW1"
"""First bytes of an Arrow file. An Arrow stream begins with the length of a message."""
_ZIP = b"PK\x03\x04"
_TO_UTF8 = "convert such files to UTF-8"
LFS_POINTER = Kind(
    name="a Git LFS pointer instead of the file", sign=is_lfs_pointer, way_out="download such files with: git lfs pull"
)
UTF_16 = Kind(name="UTF-16 text", sign=_is_utf16, way_out=_TO_UTF8)

# fmt: off
FILES = (
    # The first row that is found decides.
    Kind(name="a Parquet table", sign=_starts(b"PAR1"), endings=(".parquet",)),
    Kind(name="an Arrow table", sign=_starts(ARROW_FILE, b"\xff\xff\xff\xff"), endings=(".arrow", ".feather")),
    Kind(name="a spreadsheet", sign=_starts(_ZIP), endings=(".xlsx", ".xls", ".ods"), needs_ending=True,
         way_out="save such files as CSV"),
    Kind(name="an archive", sign=_is_archive, endings=(".zip", ".tar", ".tgz", ".tar.gz", ".tar.zst", ".7z", ".rar"),
         way_out="unpack such files"),
    Kind(name="compressed data", sign=_starts(b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ\0"),
         endings=(".bz2", ".xz", ".lz4"), way_out="decompress such files, or let their names end in .gz or .zst"),
    Kind(name="an SQLite database", sign=_starts(b"SQLite format 3\0")),
    Kind(name="a PDF document", sign=_starts(b"%PDF-"), way_out="convert such files to text"),
    Kind(name="an HTML page", sign=_is_html, way_out="download the file itself"),
    LFS_POINTER,
    Kind(name="UTF-32 text", sign=_starts(codecs.BOM_UTF32_LE), way_out=_TO_UTF8),
    UTF_16,
    Kind(name="a file of tokens", endings=(".bin",)),
    Kind(name="a NumPy array", sign=_starts(b"\x93NUMPY"), endings=(".npy",)),
    Kind(name="a table of comma-separated values", sign=_starts(b""), endings=(".csv",), needs_ending=True),
    Kind(name="a table of tab-separated values", sign=_starts(b""), endings=(".tsv",), needs_ending=True),
    Kind(name="JSON", sign=_is_json, endings=(".jsonl", ".json")),
    Kind(name="JSON", endings=(".ndjson",), way_out="let the names of such files end in .jsonl"),
    Kind(name="text", endings=(".txt", ".md")),
)
# fmt: on


def _compressions(reader: str) -> tuple[str, ...]:
    return ("", *COMPRESSED) if reader in ("text", "jsonl", "csv") else ("",)


_OF_ENDING = {e + compressed: kind for kind in FILES for compressed in _compressions(kind.reader) for e in kind.endings}


def recognise(head: bytes, path: str) -> Kind | None:
    """Return the kind of a file, or None if it is text of an unknown kind, or unknown.

    Args:
        head: At least the first HEAD_BYTES, decompressed.
        path: Path of the file.
    """
    by_ending = kind_of_ending(ending_of(path))
    return next((kind for kind in FILES if kind.sign(head) and (by_ending is kind or not kind.needs_ending)), None)


def kind_of_ending(ending: str) -> Kind | None:
    return _OF_ENDING.get(ending)


def endings_of(reader: str) -> tuple[str, ...]:
    """Return the endings of the files that a type of dataset reads in a folder. Those of compressed files come last."""
    endings = [ending for kind in FILES if kind.reader == reader for ending in kind.endings]
    return tuple(ending + compressed for compressed in _compressions(reader) for ending in endings)


def ending_of(path: str) -> str:
    """Return the ending of a file's name: the longest in the table, or everything from the last dot on."""
    name = os.path.basename(path).lower()
    known = max((ending for ending in _OF_ENDING if name.endswith(ending)), key=len, default="")
    return known or os.path.splitext(name)[1]

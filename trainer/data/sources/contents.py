"""Recognition of files that another type of dataset reads, or that must be converted first. Only messages depend on it."""

import os
from collections import Counter
from dataclasses import dataclass

from trainer.base.config.recognition import is_lfs_pointer

HEAD_BYTES = 512
"""Number of bytes from which a file is recognized."""

_CONVERSATIONS = ("chat", "preference")


@dataclass(frozen=True)
class Kind:
    name: str
    """Name with an article, such as "a Parquet table"."""
    reader: str = ""
    """Type of dataset that reads such files."""
    remedy: str = ""
    """Action that makes such a file readable, if no type of dataset reads it."""

    def advice(self, dataset: str) -> str:
        """Return what the user can do, given the type of the dataset."""
        if dataset in _CONVERSATIONS and self.reader in _TABLE_READERS:
            return "decompress such files"  # plain files are read
        if self.reader and not (dataset in _CONVERSATIONS and self.reader in _TEXT_READERS):
            return f'dataset = "{self.reader}" reads such files'
        if self.remedy:
            return self.remedy
        return "convert such files to JSON lines, for example with to_json of the package datasets"


_TABLE_READERS = ("parquet", "huggingface")
_TEXT_READERS = ("text", "tokens")
"""Types of datasets whose files cannot hold conversations, so that they are no advice for them."""
ARROW_FILE = b"ARROW1"
"""First bytes of an Arrow file. An Arrow stream begins with the length of a message."""
_PARQUET = Kind("a Parquet table", "parquet")
_ARROW = Kind("an Arrow table", "huggingface")
_ARCHIVE = Kind("an archive", remedy="unpack such files")
_COMPRESSED = Kind("compressed data", remedy="decompress such files, or let their names end in .gz or .zst")
_CSV = Kind("a table of comma-separated values", "csv")
_TSV = Kind("a table of tab-separated values", "csv")
_SHEET = Kind("a spreadsheet", remedy="save such files as CSV")
_JSON = Kind("JSON", "jsonl")
_NUMPY = Kind("a NumPy array", "tokens")
UTF_16 = Kind("UTF-16 text", remedy="convert such files to UTF-8")
LFS_POINTER = Kind("a Git LFS pointer instead of the file", remedy="download such files with: git lfs pull")

_MAGIC = {
    b"PAR1": _PARQUET,
    ARROW_FILE: _ARROW,
    b"\xff\xff\xff\xff": _ARROW,  # the first message of an Arrow stream
    b"PK\x03\x04": _ARCHIVE,
    b"7z\xbc\xaf\x27\x1c": _ARCHIVE,
    b"Rar!": _ARCHIVE,
    b"\x1f\x8b\x08": _COMPRESSED,
    b"\x28\xb5\x2f\xfd": _COMPRESSED,
    b"BZh": _COMPRESSED,
    b"\xfd7zXZ\0": _COMPRESSED,
    b"SQLite format 3\0": Kind("an SQLite database"),
    b"\x93NUMPY": _NUMPY,
    b"%PDF-": Kind("a PDF document", remedy="convert such files to text"),
    b"\xff\xfe\0\0": Kind("UTF-32 text", remedy="convert such files to UTF-8"),
    b"\xff\xfe": UTF_16,
    b"\xfe\xff": UTF_16,
}
_ENDINGS = {
    ".parquet": _PARQUET,
    ".arrow": _ARROW,
    ".feather": _ARROW,
    ".csv": _CSV,
    ".tsv": _TSV,
    ".xlsx": _SHEET,
    ".xls": _SHEET,
    ".ods": _SHEET,
    ".zip": _ARCHIVE,
    ".tar": _ARCHIVE,
    ".tgz": _ARCHIVE,
    ".tar.gz": _ARCHIVE,
    ".tar.zst": _ARCHIVE,
    ".7z": _ARCHIVE,
    ".rar": _ARCHIVE,
    ".bz2": _COMPRESSED,
    ".xz": _COMPRESSED,
    ".lz4": _COMPRESSED,
    ".jsonl": _JSON,
    ".json": _JSON,
    ".ndjson": Kind("JSON", remedy="let the names of such files end in .jsonl"),
    ".txt": Kind("text", "text"),
    ".md": Kind("text", "text"),
    ".bin": Kind("a file of tokens", "tokens"),
    ".npy": _NUMPY,
}


def recognize(head: bytes, path: str = "") -> Kind | None:
    """Return the kind of a file that is neither plain text nor JSON.

    Args:
        head: At least the first HEAD_BYTES, decompressed.
        path: Path of the file, which tells spreadsheets from other archives.
    """
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return _SHEET if kind is _ARCHIVE and _ENDINGS.get(ending_of(path)) is _SHEET else kind
    if is_lfs_pointer(head):
        return LFS_POINTER
    if _is_utf16(head[:HEAD_BYTES]):
        return UTF_16
    if head[257:262] == b"ustar":
        return _ARCHIVE
    if head[:HEAD_BYTES].lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        return Kind("an HTML page", remedy="download the file itself")
    return None


def _is_utf16(head: bytes) -> bool:
    """Return whether a text is UTF-16 without its mark: every second byte of Latin letters is zero, and the others are not."""
    halves = head[::2], head[1::2]
    return any(a.count(0) > 0.8 * len(a) and 0 not in b for a, b in (halves, halves[::-1]) if a and b)


def recognize_table(path: str) -> Kind | None:
    """Return the kind of a table that is plain text, which only its name shows."""
    kind = _ENDINGS.get(ending_of(path))
    return kind if kind in (_CSV, _TSV) else None


def recognize_json(head: bytes) -> Kind | None:
    return _JSON if head.lstrip()[:1] in (b"{", b"[") else None


def ending_of(path: str) -> str:
    """Return the ending of a file's name: the longest in _ENDINGS, or everything from the last dot on."""
    name = os.path.basename(path).lower()
    known = max((ending for ending in _ENDINGS if name.endswith(ending)), key=len, default="")
    return known or os.path.splitext(name)[1]


def list_endings(endings: Counter[str]) -> str:
    """Return how many files have the most frequent endings, such as "3 .csv, 1 .parquet"."""
    shown = [f"{count} {ending or 'without an ending'}" for ending, count in endings.most_common(4)]
    return ", ".join([*shown, "..."] if len(endings) > 4 else shown)


def advice_for(endings: Counter[str], dataset: str) -> str:
    """Return what the user can do with files that a dataset does not read, given their most frequent known ending, or "".

    Text files beside files of another kind describe those.
    """
    kinds = [_ENDINGS[ending] for ending, _ in endings.most_common() if ending in _ENDINGS]
    kind = next((kind for kind in kinds if kind.reader != "text"), kinds[0] if kinds else None)
    return kind.advice(dataset) if kind else ""

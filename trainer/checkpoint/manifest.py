"""Manifest of a folder: size and content hash of every file. It is written last, so a folder without a manifest is unfinished."""

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.base.config import ConfigError
from trainer.base.system.files import (
    TooLarge,
    digest,
    digest_of,
    drop_page_cache,
    is_plain_filename,
    read_limited,
    sync,
)
from trainer.base.system.paths import unreadable
from trainer.base.system.run_files import MANIFEST

VERSION = 2
"""Version of the checkpoint format. It covers all file formats and the tensor names."""
_LARGEST = 64 * 2**20
"""Maximum size of a manifest in bytes. A larger file is rejected without reading it."""


class CorruptError(Exception):
    """Damage to a file. The message is one line that names the file and describes the damage."""


@contextmanager
def damage_as_config_error(folder: Path) -> Iterator[None]:
    """Context manager that turns a CorruptError into a ConfigError that names the folder."""
    try:
        yield
    except CorruptError as damage:
        raise ConfigError("", f"{folder}: {damage}") from None


@dataclass(frozen=True)
class File:
    size: int
    digest: str
    """xxh3_128 hash of the content. It detects damage, but not forgery, because a forger can change the manifest too."""


@dataclass(frozen=True)
class Manifest:
    files: Mapping[str, File]
    metadata: Mapping[str, Any]
    """Information for users: step, tokens, versions."""


def verify_written(path: Path, written: File) -> File:
    """Sync a written file and read it back. Raises OSError if the content differs."""
    sync(path)
    drop_page_cache(path)  # otherwise the content would be read from memory, not from the disk
    if path.stat().st_size != written.size or digest_of(path) != written.digest:
        raise OSError(errno.EIO, "read-back verification failed", str(path))
    return written


def write_file(path: Path, content: bytes) -> File:
    """Write a file, sync it and read it back. Raises OSError."""
    path.write_bytes(content)
    return verify_written(path, File(len(content), digest(content)))


def write(folder: Path, manifest: Manifest) -> None:
    write_file(folder / MANIFEST, _text(asdict(manifest)).encode())


def _text(content: Any) -> str:
    """Return the canonical JSON text of a manifest. A file with any other text is damaged, even if only white space differs."""
    body = json.dumps(content, indent=1, sort_keys=True)
    document = {"version": VERSION, "digest": digest(body.encode()), "content": content}
    return json.dumps(document, indent=1, sort_keys=True)


def read(folder: Path) -> Manifest:
    """Read a manifest. Check the names and sizes of the folder's files, but not their content. Hidden files are allowed,
    because some file systems create them. Raises CorruptError."""
    text = read_text(folder / MANIFEST, _LARGEST)
    try:
        document = json.loads(text)
        if document["version"] != VERSION:
            raise CorruptError(f"{MANIFEST} has format version {document['version']!r:.20}, expected {VERSION}")
        content = document["content"]
        if text != _text(content):
            raise ValueError
        files = {str(name): File(int(f["size"]), str(f["digest"])) for name, f in content["files"].items()}
        manifest = Manifest(files, dict(content["metadata"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptError(f"{MANIFEST} is not a valid manifest") from None
    for name, file in files.items():
        path = folder / require_plain_filename(name, MANIFEST)
        if path.is_symlink():
            raise CorruptError(f"{name} is a symbolic link")
        if not path.is_file():
            raise CorruptError(f"{name} is missing")
        if path.stat().st_size != file.size:
            raise CorruptError(f"{name} has {path.stat().st_size} bytes, expected {file.size}")
    unlisted = {p.name for p in folder.iterdir() if not p.name.startswith(".")} - {*files, MANIFEST}
    if unlisted:
        raise CorruptError(f"{min(unlisted)} is not in the manifest")
    return manifest


def require_plain_filename(name: Any, by: str) -> str:
    """Return the name. Raises CorruptError if it is not a plain file name. by: path of the file that contains the name."""
    if not is_plain_filename(name):
        raise CorruptError(f"{by} names {name!r:.100}, which is not a plain file name")
    return name


def read_text(path: Path, largest: int) -> str:
    """Return the text of a file. Raises CorruptError if it cannot be read, is not UTF-8, or exceeds `largest` bytes."""
    try:
        return read_bytes(path, largest).decode()
    except UnicodeDecodeError:
        raise CorruptError(f"{path.name} is not UTF-8 text") from None


def read_bytes(path: Path, largest: int) -> bytes:
    """Return the content of a file. Raises CorruptError if it cannot be read or has more than `largest` bytes."""
    try:
        return read_limited(path, largest)
    except OSError as error:
        raise CorruptError(f"{path.name} cannot be read ({error.strerror})") from None
    except TooLarge as problem:
        raise CorruptError(f"{path.name} {problem}") from None


def find_damage(folder: Path, share: tuple[int, int] = (0, 1)) -> str:
    """Return a line that describes the first damage found, or "". share: (i, n) restricts the comparison of hashes to every
    n-th file, starting with file i."""
    try:
        manifest = read(folder)
        for name in sorted(manifest.files)[share[0] :: share[1]]:
            if digest_of(folder / name) != manifest.files[name].digest:
                raise CorruptError(f"{name} does not match its hash")
    except CorruptError as damage:
        return str(damage)
    except OSError as error:
        return unreadable(error)
    return ""

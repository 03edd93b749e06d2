"""What a folder must hold, file by file and by content. The manifest is written last, so a folder without one was never
finished."""

import errno
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.system.files import digest, digest_of, drop_page_cache, sync

NAME = "manifest.json"
VERSION = 2
"""Format of a checkpoint: of all its files, and of the names of its tensors."""
_LARGEST = 64 * 2**20
"""Bytes. A file that claims to be larger is none of ours, and is not read."""
_BLOCK = 2**22


class CorruptError(Exception):
    """One line: the file at fault, and what is wrong with it."""


@dataclass(frozen=True)
class File:
    size: int
    digest: str
    """xxh3_128 of the content: it tells damage, not forgery. Who can write a file can write its manifest too."""


@dataclass(frozen=True)
class Manifest:
    files: Mapping[str, File]
    metadata: Mapping[str, Any]
    """For people: step, tokens, versions."""


def verify_written(path: Path, written: File) -> File:
    """Sync a file that was written, and read it back. Raises OSError where it is something else."""
    sync(path)
    drop_page_cache(path)  # so that it comes from the disk
    if path.stat().st_size != written.size or digest_of(path) != written.digest:
        raise OSError(errno.EIO, "what was written reads back as something else", str(path))
    return written


def write_file(path: Path, content: bytes) -> File:
    """Raises OSError."""
    path.write_bytes(content)
    return verify_written(path, File(len(content), digest(content)))


def write(folder: Path, manifest: Manifest) -> None:
    write_file(folder / NAME, _text(asdict(manifest)).encode())


def _text(content: Any) -> str:
    """The one way to write a content: any other text, even another space, is damage."""
    body = json.dumps(content, indent=1, sort_keys=True)
    document = {"version": VERSION, "digest": digest(body.encode()), "content": content}
    return json.dumps(document, indent=1, sort_keys=True)


def read(folder: Path) -> Manifest:
    """The manifest of a folder that holds exactly its files, in their sizes; their content is not looked at. Names that
    begin with a dot are the file system's. Raises CorruptError."""
    text = read_text(folder / NAME, _LARGEST)
    try:
        document = json.loads(text)
        if document["version"] != VERSION:
            raise CorruptError(f"{NAME} has format version {document['version']!r:.20}, expected {VERSION}")
        content = document["content"]
        if text != _text(content):
            raise ValueError
        files = {str(name): File(int(f["size"]), str(f["digest"])) for name, f in content["files"].items()}
        manifest = Manifest(files, dict(content["metadata"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptError(f"{NAME} is not what was written") from None
    for name, file in files.items():
        _require_file(folder, require_plain_filename(name, NAME), file.size)
    others = {p.name for p in folder.iterdir() if not p.name.startswith(".")} - {*files, NAME}
    if others:
        raise CorruptError(f"{min(others)} does not belong to it")
    return manifest


def require_plain_filename(name: Any, by: str) -> str:
    """The name, which a file in the folder can have, and which leads nowhere else. Raises CorruptError. by: what names it."""
    plain = isinstance(name, str) and name.isprintable() and not name.startswith(".") and "\\" not in name
    if not plain or not name or Path(name).name != name:
        raise CorruptError(f"{by} names {name!r}, which is no name of a file in it")
    return name


def _require_file(folder: Path, name: str, size: int) -> None:
    path = folder / name
    if path.is_symlink():
        raise CorruptError(f"{name} is a link, which may lead anywhere")
    if not path.is_file():
        raise CorruptError(f"{name} is missing")
    if path.stat().st_size != size:
        raise CorruptError(f"{name} has {path.stat().st_size} bytes of {size}")


def read_text(path: Path, largest: int) -> str:
    """largest: bytes. Raises CorruptError for what cannot be read as text, or is larger."""
    try:
        return read_bytes(path, largest).decode()
    except UnicodeDecodeError:
        raise CorruptError(f"{path.name} is no text") from None


def read_bytes(path: Path, largest: int) -> bytes:
    """Raises CorruptError for what cannot be read, or is larger than that."""
    try:
        with path.open("rb") as file:
            # Looked at first: memory for all of it would be taken before it is read.
            content = file.read(largest + 1) if path.stat().st_size <= largest else None
    except OSError as error:
        raise CorruptError(f"{path.name} cannot be read ({error.strerror})") from None
    if content is None or len(content) > largest:
        raise CorruptError(f"{path.name} has more than {largest} bytes, more than any of its kind")
    return content


def find_damage(folder: Path, share: tuple[int, int] = (0, 1)) -> str:
    """What is wrong with the folder, in one line, or "". share: (i, n): of the contents, look at every n-th file from the
    i-th on only."""
    try:
        manifest = read(folder)
        for name in sorted(manifest.files)[share[0] :: share[1]]:
            if digest_of(folder / name) != manifest.files[name].digest:
                raise CorruptError(f"{name} has another content than was written")
    except CorruptError as damage:
        return str(damage)
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    return ""

"""Atomic and durable writes, content digests, file locks."""

import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import xxhash

from trainer.base.system.spelling import similar_path

_CHUNK_BYTES = 2**22
LARGEST_JSON = 2**28
"""Maximum number of bytes of a JSON file, which is parsed in memory."""
_SUFFIX = ".tmp-" + 8 * "[0-9a-f]"  # glob pattern of the suffix of temporary names


def folder_error(path: str | Path) -> str:
    """Return the reason why the path is not a folder, with a similar path that exists, or "" if it is a folder."""
    if os.path.isdir(path):
        return ""
    if os.path.islink(path) and not os.path.exists(path):
        return f"is a broken link to {os.readlink(path)}"
    return "is a file, not a folder" if os.path.exists(path) else f"no such folder{similar_path(path)}"


def file_error(path: str | Path) -> str:
    """Return the reason why the path cannot be written as a file, or "" if it is a file or does not exist. Opening a named pipe
    would wait for another process."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return ""
    kinds = {stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder"}
    return "" if stat.S_ISREG(mode) else f"is a {kinds.get(stat.S_IFMT(mode), 'device')}, not a file"


def require_regular(path: Path) -> None:
    """Raise OSError if the path can be neither read nor written as a file. A folder passes, because opening it is an OSError."""
    problem = file_error(path)
    if problem and not path.is_dir():
        raise OSError(errno.EINVAL, f"it {problem}", str(path))


def is_moved(file: BinaryIO) -> bool:
    """Return whether an open file has no longer the name with which it was opened."""
    try:
        return not os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except OSError:
        return True


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_page_cache(path: Path) -> None:
    """Make the next read of the file come from the disk, if the operating system supports it."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def temporary_path(path: Path) -> Path:
    """Return a new path for the unfinished content of `path`. It is NAME.tmp-xxxxxxxx in the same folder."""
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")


def is_temporary(path: Path) -> bool:
    """Return whether `path` was named by `temporary_path`. If so, its content is unfinished."""
    return path.match(f"*{_SUFFIX}")


@contextmanager
def atomic_path(path: Path, durable: bool = True) -> Iterator[Path]:
    """Context manager with a path for a new file. The file replaces `path` when the block ends, or is removed if an error occurs.
    durable: whether to sync the file and its folder."""
    temporary = temporary_path(path)
    try:
        yield temporary
        if durable:
            sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


@contextmanager
def atomic_file(path: Path, durable: bool = True) -> Iterator[TextIO]:
    """Context manager that opens a new file, see atomic_path."""
    with atomic_path(path, durable) as temporary, temporary.open("w") as file:
        yield file


def atomic_write(path: Path, text: str, durable: bool = True) -> None:
    """Replace the content of a file atomically. durable: whether to sync the file and its folder."""
    with atomic_file(path, durable) as file:
        file.write(text)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Context manager that creates a new folder. When the block ends, the new folder is synced and replaces `path`. If an error
    occurs, the new folder is removed.

    Unfinished folders of killed processes are removed first, so the caller must be the only writer of `path`.
    """
    for leftover in path.parent.glob(glob.escape(path.name) + _SUFFIX):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = temporary_path(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for inner in (*temporary.iterdir(), temporary):
            sync(inner)
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(path.parent)


def describe(error: OSError) -> str:
    """Return the message of a file system error, with the file if it is known."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)


def digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def short_digest(full: str) -> str:
    """Return the beginning of a digest, for a message."""
    return full[:16]


def digest_of(path: Path) -> str:
    return hash_of_file(path, xxhash.xxh3_128())


def hash_of_file(path: Path, hasher: Any) -> str:
    """Return the hexadecimal hash of a file's content. hasher: a new one of hashlib or xxhash."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def stamp(path: Path) -> list[int]:
    """Return the size and the modification time (ns) of a file, by which a change is noticed."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def sha256_of(path: Path) -> str:
    return hash_of_file(path, hashlib.sha256())


class HashingFile:
    """New file that is hashed while it is written sequentially."""

    def __init__(self, path: Path):
        self.size = 0
        """Number of bytes written so far."""
        self._file = path.open("wb")
        self._hasher = xxhash.xxh3_128()

    def write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._hasher.update(content)
        self.size += len(content) if isinstance(content, bytes) else content.nbytes

    def close(self) -> dict[str, Any]:
        """Close the file and return the size and digest of its content."""
        self._file.close()
        return {"size": self.size, "digest": self._hasher.hexdigest()}


def is_plain_filename(name: Any) -> bool:
    """Return whether a value that was read is a name of a file in its folder, which is neither hidden nor leads elsewhere."""
    plain = isinstance(name, str) and name.isprintable() and not name.startswith(".") and "\\" not in name
    return plain and name != "" and Path(name).name == name


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """Parse JSON text. Raises ValueError if the text is not a JSON object."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


class TooLarge(ValueError):
    """A file has more bytes than its reader accepts."""


def read_limited(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file. Raises OSError if it cannot be read as a file, and TooLarge."""
    require_regular(path)
    with path.open("rb") as file:
        # The size is checked first, because read() allocates memory for the complete file.
        content = file.read(max_bytes + 1) if path.stat().st_size <= max_bytes else None
    if content is None or len(content) > max_bytes:
        raise TooLarge(f"is larger than the limit of {max_bytes} bytes")
    return content


def read_json_object(path: str | Path, max_bytes: int = LARGEST_JSON) -> dict[str, Any]:
    """Read a JSON file. Raises OSError if this fails, and ValueError if the content is not a JSON object or has more bytes."""
    return parse_json_object(read_limited(Path(path), max_bytes))


def read_json_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a file, one per line. Ignore all other lines: a killed process leaves an incomplete last line.
    Raises OSError if the file cannot be read."""
    with Path(path).open("rb") as file:
        for line in file:
            with suppress(ValueError):
                yield parse_json_object(line)


def try_lock(path: Path, timeout_s: float) -> TextIO | str:
    """Lock a file. The lock is held until the returned file is closed or this process ends for any reason. If another process
    still holds the lock after timeout_s, return a description of that process. Raises OSError if the file cannot be opened."""
    end = time.monotonic() + timeout_s
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # the previous holder may have removed the file
                file.truncate(0)
                file.write(
                    f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
                )
                file.flush()
                return file
        if time.monotonic() >= end:
            file.seek(0)
            return file.read().strip() or "another process"
        file.close()
        time.sleep(0.1)


def lock_holder(path: Path) -> str:
    """Return a description of the process that holds the lock of a file, or "". The file does not change."""
    with suppress(FileNotFoundError), path.open("r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "another process"
    return ""


def existing_part(path: Path) -> Path:
    """Return the path, or the closest folder above it that exists."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def creation_error(folder: Path) -> str:
    """Return the reason why a folder, with what it will contain, cannot be written, or "". Nothing is created."""
    place = next(p for p in (folder, *folder.absolute().parents) if os.path.lexists(p))
    if problem := folder_error(place):
        return f"{place} {problem}"
    return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written"


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Context manager that waits for the lock of a file, and removes the file at its end. A process that waits for the removed
    file notices this and opens the next one (`try_lock`). Only a killed process leaves the file."""
    file = try_lock(path, math.inf)
    assert not isinstance(file, str)
    with file:
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()

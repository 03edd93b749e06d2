"""The fingerprint of a corpus: a hash of the names and contents of its files."""

import hashlib
import heapq
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from trainer.base.config import ConfigError
from trainer.base.system import console
from trainer.base.system.files import digest_of, temporary_path
from trainer.base.system.paths import unreadable
from trainer.data.sources import Source

_RECENT_S = 2.0
"""A file that changed within this time before it was hashed may change again without a new change time, because file systems
round times. Its digest is not cached. The coarsest file systems in use round to 2 s."""


def fingerprint(source: Source, shape: list, caches: Path) -> tuple[str, str]:
    """Return a hash of `shape` and of the names and contents of the files, and the reason why new digests could not be cached,
    or "". Raises ConfigError for an unreadable file.

    A file is not read if the cache has an entry for its name with its current device, inode, size, modification time and change
    time. A program can set the modification time of a file, but not its change time. The entries are sorted by file name and are
    streamed, so that the digests of millions of files are never in memory at the same time.

    Args:
        source: the corpus.
        shape: other values that determine the store.
        caches: folder of the caches of digests.
    """
    hasher = hashlib.sha256(json.dumps(shape).encode())
    cache = _cache_path(source.root, caches)
    cached = _read_cache(cache)
    entry = next(cached, None)
    with console.progress(None, "B", "hashing the corpus") as bar, _NewCache(cache) as new_cache:
        for path in heapq.merge(source.files, source.auxiliary_files):
            name, identity = os.path.relpath(path, source.root), _identity(path)
            while entry is not None and entry[0] < name:
                entry = next(cached, None)
            if entry is not None and entry[:-1] == [name, *identity]:
                digest = entry[-1]
                new_cache.add(entry, is_new=False)
            else:
                digest = _digest(path)
                # The digest of a file that changed while it was hashed belongs to neither of its contents.
                if _identity(path) == identity and time.time() - identity[-1] / 1e9 > _RECENT_S:
                    new_cache.add([name, *identity, digest], is_new=True)
            hasher.update(json.dumps([name, digest]).encode())
            bar.update(identity[2])
    return hasher.hexdigest()[:16], new_cache.problem


def _cache_path(root: str, caches: Path) -> Path:
    """Return the path of the cache for the files below a folder. Nodes that share the caches may mount the folder as different
    devices, so each device has its own cache."""
    real = os.path.realpath(root)
    key = json.dumps([real, os.stat(real).st_dev]).encode()
    return caches / f"digests-{hashlib.sha256(key).hexdigest()[:16]}.jsonl"


def _identity(path: str) -> list[int]:
    """Return device, inode, size, modification time and change time of a file (in ns). Links are followed."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise ConfigError("data.path", unreadable(error, path)) from None
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read_cache(cache: Path) -> Iterator[list]:
    """Yield [name, device, inode, size, modification time, change time, digest] of each file, up to the first damaged line."""
    try:
        with cache.open() as lines:
            for line in lines:
                name, *identity, digest = json.loads(line)
                if not isinstance(name, str) or len(identity) != 5 or not isinstance(digest, str):
                    return
                yield [name, *identity, digest]
    except (OSError, ValueError, TypeError):
        return


class _NewCache:
    """Context manager of the cache that replaces the old one when the block ends, if it has new entries. A folder that is
    read-only or full is no error, because a complete store in it can be used."""

    def __init__(self, path: Path):
        self._path, self._temporary = path, temporary_path(path)
        self._file: TextIO | None = None
        self._has_new, self._error = False, ""

    @property
    def problem(self) -> str:
        """The reason why new entries are lost, or ""."""
        return self._error if self._has_new else ""

    def __enter__(self) -> "_NewCache":
        with self._without_errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("w")
        return self

    def add(self, entry: list, is_new: bool) -> None:
        self._has_new |= is_new
        if self._file is not None and not self._error:
            with self._without_errors():
                self._file.write(json.dumps(entry) + "\n")

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        if self._file is None:
            return
        with self._without_errors():
            self._file.close()  # raises OSError if the rest of its buffer cannot be written
        with self._without_errors():
            if error is None and self._has_new and not self._error:
                self._temporary.replace(self._path)
            self._temporary.unlink(missing_ok=True)

    @contextmanager
    def _without_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = str(error.strerror)


def _digest(path: str) -> str:
    try:
        return digest_of(Path(path))
    except OSError as error:
        raise ConfigError("data.path", unreadable(error, path)) from None

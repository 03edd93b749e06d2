"""The fingerprint of a corpus: a hash of the names and contents of its files."""

import hashlib
import heapq
import json
import os
from collections.abc import Iterator
from pathlib import Path

from trainer.config import ConfigError
from trainer.data.sources import Source
from trainer.system.files import atomic_file, digest_of
from trainer.system.logging import progress


def fingerprint(source: Source, shape: list, caches: Path) -> str:
    """Return a hash of `shape` and of the names and contents of the files. shape: other values that determine the store.
    caches: folder for the cache of file digests.

    If the cache has an entry for a file with its current size and modification time, the file is not read. The entries are sorted
    by file name and are streamed, so that the digests of millions of files are never in memory at the same time.
    """
    hasher = hashlib.sha256(json.dumps(shape).encode())
    cache = caches / f"digests-{hashlib.sha256(source.root.encode(errors='surrogateescape')).hexdigest()[:16]}.jsonl"
    cached = _read_cache(cache)
    entry = next(cached, None)
    with progress(None, "B", "hashing the corpus") as bar, atomic_file(cache, durable=False) as out:
        for path in heapq.merge(source.files, source.auxiliary_files):
            name, stat = os.path.relpath(path, source.root), os.stat(path)
            while entry is not None and entry[0] < name:
                entry = next(cached, None)
            current = [name, stat.st_size, stat.st_mtime_ns]
            digest = entry[3] if entry is not None and entry[:3] == current else _digest(path)
            out.write(json.dumps([*current, digest]) + "\n")
            hasher.update(json.dumps([name, digest]).encode())
            bar.update(stat.st_size)
    return hasher.hexdigest()[:16]


def _read_cache(cache: Path) -> Iterator[list]:
    """Yield [name, size, modification time in ns, digest] of each file, up to the first damaged line."""
    try:
        with cache.open() as lines:
            for line in lines:
                name, size, mtime_ns, digest = json.loads(line)
                if not isinstance(name, str) or not isinstance(digest, str):
                    return
                yield [name, size, mtime_ns, digest]
    except (OSError, ValueError, TypeError):
        return


def _digest(path: str) -> str:
    try:
        return digest_of(Path(path))
    except OSError as error:
        raise ConfigError("data.path", f"{path} cannot be read ({error.strerror})") from None

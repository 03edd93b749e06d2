"""What a corpus is known by: the names and contents of its files."""

import hashlib
import heapq
import json
import os
from collections.abc import Iterator
from pathlib import Path

from trainer.config import ConfigError
from trainer.data.sources import Source
from trainer.system.files import atomic_file, digest_of
from trainer.system.progress import progress


def fingerprint(source: Source, shape: list, caches: Path) -> str:
    """Changes with the content or the names of the files, and with `shape`: what else makes a store what it is."""
    running = hashlib.sha256(json.dumps(shape).encode())
    cache = caches / f"digests-{hashlib.sha256(source.root.encode(errors='surrogateescape')).hexdigest()[:16]}.jsonl"
    with progress(None, "B", "looking at the corpus") as bar:
        for *entry, size in _digests(source, cache):
            running.update(json.dumps(entry).encode())
            bar.update(size)
    return running.hexdigest()[:16]


def _digests(source: Source, cache: Path) -> Iterator[tuple[str, str, int]]:
    """Name, digest and size of each file, in order. One whose size and time of change are those of the last look is not read
    again. Cache and files are in the same order and go by side by side, so that millions of them need no memory."""
    known = _known(cache)
    last = next(known, None)
    with atomic_file(cache, durable=False) as out:
        for path in heapq.merge(source.files, source.auxiliary_files):
            name = os.path.relpath(path, source.root)
            stat = os.stat(path)
            while last is not None and last[0] < name:
                last = next(known, None)
            looked = [name, stat.st_size, stat.st_mtime_ns]
            if last is not None and last[:3] == looked:
                digest = last[3]
                last = next(known, None)
            else:
                digest = _digest(path)
            out.write(json.dumps([*looked, digest]) + "\n")
            yield name, digest, stat.st_size


def _known(cache: Path) -> Iterator[list]:
    """[name, size, time of change, digest] of each file at the last look. A cache: what cannot be read ends it."""
    try:
        with cache.open() as lines:
            for line in lines:
                name, size, changed, digest = json.loads(line)
                if not isinstance(name, str) or not isinstance(digest, str):
                    return
                yield [name, size, changed, digest]
    except (OSError, ValueError, TypeError):
        return


def _digest(path: str) -> str:
    try:
        return digest_of(Path(path))
    except OSError as error:
        raise ConfigError("data.path", f"{path} cannot be read ({error.strerror})") from None

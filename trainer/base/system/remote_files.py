"""Files of object stores on this machine: a cache that all processes of a node share.

CACHE/                              MESHWRIGHT_CACHE (default: ~/.cache/meshwright)
    data-1a2b3c4d5e6f7a8b/          what a URL meant: the name is a hash of the keys, sizes and versions of its objects
        entry.json                  the URL, and size and modification time of every file
        in-use                      locked by the processes that read the files, so that others do not remove them
        files/...
    data-1a2b3c4d5e6f7a8b.part/     a download that is not complete; files in it that have their own name are verified
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from trainer.base.system import console
from trainer.base.system.files import atomic_write, file_lock, read_json_object, stamp, try_lock
from trainer.base.system.object_store import ObjectStore
from trainer.base.system.remote_objects import Found, Item, resolve
from trainer.base.system.spelling import counted
from trainer.base.system.store_errors import StoreError
from trainer.base.system.streams import print_error
from trainer.base.system.urls import WITHOUT_WEIGHTS, local_copies, remember

CACHE, LIMIT = "MESHWRIGHT_CACHE", "MESHWRIGHT_CACHE_GIB"
"""Environment variables: the folder of the cache, and its maximum size. Files in use are not removed."""
_ENTRY, _IN_USE, _FILES, _PART = "entry.json", "in-use", "files", ".part"
_WORKERS = 8
_held: dict[Path, TextIO] = {}
"""Locks of this process on entries."""


def local_copy(url: str, *, beside: Sequence[str] = (), with_weights: bool = True) -> str:
    """Return the local path that stands for a URL, after its files have been downloaded and verified.

    Args:
        url: Of an object, a prefix, a pattern, a NAME.manifest that lists paths, or a mirrored run (or RUN@best).
        beside: Names of files beside a single object that are downloaded too if they exist. *: the object's name without its
            ending.
        with_weights: Whether files with weights (.safetensors) are downloaded.

    Raises:
        StoreError: There are no such objects, they cannot be downloaded, or they change meanwhile.
        OSError: The cache cannot be written.
    """
    name, copies = url if with_weights else url + WITHOUT_WEIGHTS, local_copies()
    if name in copies and _use(_entry_of(copies[name])):
        return copies[name]
    found, store = resolve(url, beside, with_weights)
    entry = cache_folder() / f"data-{found.digest(store.url)}"
    if not _use(entry):
        _download(url, store, found, entry, again=lambda: resolve(url, beside, with_weights)[0])
    path = f"{entry / _FILES}{found.suffix}"
    remember(name, path)
    return path


def cache_folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "meshwright"
    return Path(os.environ.get(CACHE) or default).absolute()


def is_copy(path: Path) -> bool:
    """Return whether a path lies in the cache, where nobody writes."""
    return path.absolute().is_relative_to(cache_folder())


def _entry_of(path: str) -> Path:
    match = re.match(rf"(.*?/data-[0-9a-f]{{16}})/{_FILES}", path)
    assert match, path
    return Path(match[1])


def _use(entry: Path) -> bool:
    """Return whether an entry is complete. If so, other processes do not remove it until this process ends."""
    try:
        lock = _held.pop(entry, None) or (entry / _IN_USE).open("r+")
        fcntl.flock(lock, fcntl.LOCK_SH)
        stamps = read_json_object(entry / _ENTRY)["files"]
        if not os.path.samestat(os.fstat(lock.fileno()), (entry / _IN_USE).stat()):  # removed meanwhile
            return False
        if any(stamp(entry / _FILES / path) != noted for path, noted in stamps.items()):
            return False
        os.utime(entry / _ENTRY)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    _held[entry] = lock
    return True


def _download(url: str, store: ObjectStore, found: Found, entry: Path, again: Callable[[], Found]) -> None:
    """Download the objects of an entry. Other processes wait. Raises StoreError or OSError."""
    cache, part = entry.parent, entry.with_name(entry.name + _PART)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with file_lock(_lock_of(part)):
            if _use(entry):
                return
            if entry.exists() and not _remove_unused(entry):
                raise StoreError(f"{url}: files in {entry} were changed, and other processes use them")
            num_bytes = sum(item.size for item in found.items if not (part / _FILES / item.path).exists())
            _make_room(url, cache, part, num_bytes)
            count = counted(len(found.items), "file")
            print_error(f"downloading {count} of {url} ({num_bytes / 1e6:,.1f} MB) to {entry}")
            _download_items(store, found, part / _FILES, num_bytes)
            if not _still_means(found, again):
                raise StoreError(f"{url}: the objects have changed during the download; start again", "changed")
            stamps = {item.path: stamp(part / _FILES / item.path) for item in found.items}
            (part / _IN_USE).touch()
            atomic_write(part / _ENTRY, json.dumps({"url": url, "files": stamps}))
            part.rename(entry)
            if not _use(entry):
                raise StoreError(f"{url}: the cache {cache} does not keep what is written to it")
    except (OSError, StoreError) as error:
        if getattr(error, "kind", "") == "disk" or getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(f"{url}: no space is left in {cache}; {CACHE} names another folder", "disk") from None
        if isinstance(error, OSError):
            problem = f"the cache {cache} cannot be used ({error.strerror})"
            raise StoreError(f"{url}: {problem}; {CACHE} names another folder") from None
        raise


def _still_means(found: Found, again: Callable[[], Found]) -> bool:
    try:
        return again() == found
    except StoreError as error:
        if error.kind == "missing":
            return False
        raise


def _lock_of(part: Path) -> Path:
    return part.with_suffix(".lock")


def _download_items(store: ObjectStore, found: Found, folder: Path, num_bytes: int) -> None:
    """Download what is missing. Raises the first error."""
    stop = threading.Event()
    with console.progress(num_bytes, "B", "downloading") as bar, ThreadPoolExecutor(_WORKERS) as pool:
        lock = threading.Lock()

        def progress(num_bytes: int) -> None:
            if stop.is_set():
                raise StoreError("stopped", "stopped")
            with lock:
                bar.update(num_bytes)

        def fetch(item: Item) -> None:
            target = folder / item.path
            if target.exists() or stop.is_set():  # complete files have their names
                return
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished = target.with_name(f".{hashlib.sha256(target.name.encode()).hexdigest()[:16]}{_PART}")
            expected: dict[str, Any] = {"version": item.version, "sha256": item.sha256}
            store.download(item.key, unfinished, item.size, **expected, progress=progress)
            unfinished.rename(target)

        try:
            for future in [pool.submit(fetch, item) for item in found.items]:
                future.result()
        except BaseException:  # also Ctrl-C
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _make_room(url: str, cache: Path, part: Path, num_bytes: int) -> None:
    """Remove the entries and unfinished downloads that were used least recently, if the disk or the cache would be too full.
    Raises StoreError if that is not enough."""
    limit = _limit_bytes()

    def is_enough(total: float) -> bool:
        return total + num_bytes <= limit and shutil.disk_usage(cache).free >= num_bytes

    if not is_enough(0 if limit == float("inf") else limit):
        folders = [folder for folder in cache.iterdir() if folder.is_dir() and folder != part]
        sizes = {folder: _size_of(folder) for folder in folders}
        total = sum(sizes.values())
        for folder in sorted(folders, key=_last_use):
            if is_enough(total):
                break
            if _remove_unused(folder):
                total -= sizes[folder]
    if (free := shutil.disk_usage(cache).free) < num_bytes:
        message = f"{url}: {num_bytes / 1e6:,.1f} MB must be downloaded to {cache}, which has {free / 1e6:,.1f} MB free"
        raise StoreError(f"{message}; {CACHE} names another folder")


def _size_of(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # others download and remove files
            size += path.stat().st_size if path.is_file() else 0
    return size


def _limit_bytes() -> float:
    text = os.environ.get(LIMIT, "")
    if not re.fullmatch(r"(\d+(\.\d+)?)?", text):
        raise StoreError(f"{LIMIT}={text}: expected a size in GiB")
    return float(text) * 2**30 if text else float("inf")


def _last_use(folder: Path) -> float:
    for path in (folder / _ENTRY, folder):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _remove_unused(folder: Path) -> bool:
    """Remove an entry or an unfinished download, unless a process uses it. Return whether it was removed."""
    with suppress(OSError):
        if folder.name.endswith(_PART):
            lock = try_lock(_lock_of(folder), 0)
        else:
            lock = (folder / _IN_USE).open("r+")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if isinstance(lock, str):
            return False
        with lock:
            trash = folder.with_name(f"{folder.name}-removed-{os.getpid()}{_PART}")
            folder.rename(trash)
            shutil.rmtree(trash, ignore_errors=True)
            if folder.name.endswith(_PART):
                _lock_of(folder).unlink(missing_ok=True)
        return True
    return False

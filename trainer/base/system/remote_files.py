"""Files of object stores on this machine: a cache that all processes of a node share.

A URL means a file, all files below a prefix, those that match a pattern, or a mirrored run.

CACHE/                              MESHWRIGHT_CACHE (default: ~/.cache/meshwright)
    data-1a2b3c4d5e6f7a8b/          what a URL meant: the name is a hash of the keys, sizes and versions of its objects
        entry.json                  the URL, and size and modification time of every file
        in-use                      locked by the processes that read the files, so that others do not remove them
        files/...
    data-1a2b3c4d5e6f7a8b.part/     a download that is not complete; files in it that have their own name are verified
"""

import errno
import fcntl
import fnmatch
import glob
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from trainer.base.system import console, remote_run
from trainer.base.system.files import atomic_write, existing_part, file_lock, lock_holder, read_json_object
from trainer.base.system.object_store import Object, ObjectStore, StoreError, url_error
from trainer.base.system.paths import BEST
from trainer.base.system.remote_run import Lineage
from trainer.base.system.run_files import CHECKPOINTS, parse_step
from trainer.base.system.spelling import counted, did_you_mean
from trainer.base.system.streams import print_error
from trainer.base.system.urls import WITHOUT_WEIGHTS, local_copies, remember

CACHE, LIMIT = "MESHWRIGHT_CACHE", "MESHWRIGHT_CACHE_GIB"
"""Environment variables: the folder of the cache, and its maximum size. Files in use are not removed."""
_ENTRY, _IN_USE, _FILES, _PART = "entry.json", "in-use", "files", ".part"
_MANIFEST = ".manifest"
_WORKERS = 8
_held: dict[Path, TextIO] = {}
"""Locks of this process on entries."""


@dataclass(frozen=True)
class _Item:
    """An object that a URL means."""

    key: str
    path: str
    """Relative path on this machine."""
    size: int
    version: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class _Found:
    """What a URL means."""

    items: tuple[_Item, ...]
    suffix: str
    """End of the local path that stands for the URL, behind the folder of the files."""

    @property
    def digest(self) -> str:
        content = [self.suffix, *sorted((item.path, item.size, item.version or item.sha256) for item in self.items)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


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
    found, store = _resolve(url, beside, with_weights)
    entry = cache_folder() / f"data-{found.digest}"
    if not _use(entry):
        _download(url, store, found, entry, again=lambda: _resolve(url, beside, with_weights)[0])
    path = f"{entry / _FILES}{found.suffix}"
    remember(name, path)
    return path


def has_pattern(url: str) -> bool:
    return glob.has_magic(url)


def cache_folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "meshwright"
    return Path(os.environ.get(CACHE) or default).absolute()


def _entry_of(path: str) -> Path:
    return cache_folder() / Path(path).relative_to(cache_folder()).parts[0]


# ---------------------------------------------------------------- what a URL means


def _resolve(url: str, beside: Sequence[str], with_weights: bool) -> tuple[_Found, ObjectStore]:
    """Return what a URL means, and the store to whose bucket the keys belong. Raises StoreError."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    names = [name for name in key.split("/") if name]
    fixed = next((names[:i] for i, name in enumerate(names) if glob.has_magic(name)), names)
    if problem := url_error("/".join((f"{scheme}://{bucket}", *fixed))):
        raise StoreError(f"{url}: {problem}")
    store = ObjectStore(f"{scheme}://{bucket}")
    prefix, pattern = "/".join(fixed), "/".join(names[len(fixed) :])
    if pattern:
        found = replace(_matching(store, prefix, [pattern], beside, below=False), suffix=f"/{pattern}")
    else:
        found = _file(store, prefix, beside) or _run(store, url, prefix) or _below(store, prefix)
    if not with_weights:
        found = replace(found, items=tuple(i for i in found.items if not i.path.endswith(".safetensors")))
    if not found.items:
        raise StoreError(f"{url}: {_nothing(store, prefix, pattern)}", "missing")
    _require_distinct_paths(url, found.items)
    return found, store


def _file(store: ObjectStore, key: str, beside: Sequence[str]) -> _Found | None:
    """Return what the URL of a single object means, or None if there is none."""
    if not key or (main := store.head(key)) is None:
        return None
    folder, _, name = key.rpartition("/")
    if name.endswith(_MANIFEST):
        lines = (line.strip() for line in store.read(key)[0].decode(errors="replace").splitlines())
        patterns = [line for line in lines if line and not line.startswith("#")]
        listed = _matching(store, folder, patterns, beside, below=True)
        return _Found((_item(main, folder), *(item for item in listed.items if item.key != key)), f"/{name}")
    others = (store.head(other) for other in _beside(key, beside) if other != key)
    objects = [main, *(found for found in others if found is not None)]
    return _Found(tuple(_item(found, folder) for found in objects), f"/{name}")


def _run(store: ObjectStore, url: str, prefix: str) -> _Found | None:
    """Return the newest or the best checkpoint of a mirrored run, with the small files of the run, or None if there is no run."""
    is_best, prefix = prefix.endswith(BEST), prefix.removesuffix(BEST)
    place = ObjectStore("/".join(filter(None, (store.url, prefix))))
    lineage = Lineage.read(place)
    if not lineage.version:
        return None
    for name in reversed(lineage.saves):
        if is_best and remote_run.step_of_name(name) != lineage.best_step:
            continue
        if (save := remote_run.read_save(place, name)) is not None:
            local = f"{CHECKPOINTS}/{name.rpartition('-')[0]}"
            files = {remote_run.key_of(name, file): (f"{local}/{file}", f) for file, f in save.files.items()}
            files |= {save.key_of_run_file(file): (file, f) for file, f in save.run_files.items()}
            items = (_Item(f"{prefix}/{key}", path, f.size, sha256=f.sha256) for key, (path, f) in files.items())
            return _Found(tuple(items), "")
    raise StoreError(f"{url}: the run has no {'best' if is_best else 'complete'} checkpoint", "missing")


def _below(store: ObjectStore, prefix: str) -> _Found:
    """Return what a prefix means: all objects below it. Of a run folder's checkpoints, only the newest is meant."""
    is_best = prefix.endswith(BEST)
    folder = prefix.removesuffix(BEST)
    items = [_item(found, folder) for found in store.list(f"{folder}/" if folder else "") if _is_data(found, folder)]
    steps = [step for item in items if (step := _step(item)) is not None]
    if steps and not is_best:
        items = [item for item in items if _step(item) in (None, max(steps))]
    return _Found(tuple(items), BEST if is_best and items else "")


def _step(item: _Item) -> int | None:
    """Return the step of the checkpoint of a run to which a file belongs, or None."""
    parts = item.path.split("/")
    return parse_step(parts[1]) if parts[0] == CHECKPOINTS and len(parts) > 2 else None


def _matching(store: ObjectStore, prefix: str, patterns: Sequence[str], beside: Sequence[str], below: bool) -> _Found:
    """Return the objects below a prefix that match one of some patterns. below: also those below a folder that matches."""
    objects = store.list(f"{prefix}/" if prefix else "") if patterns else []
    items = {item.path: item for found in objects if _is_data(found, prefix) for item in (_item(found, prefix),)}
    names = [os.path.normpath(pattern).split("/") for pattern in patterns]
    found = {path for path in items if any(_matches(pattern, path.split("/"), below) for pattern in names)}
    found |= {other for path in found for other in _beside(path, beside) if other in items}
    return _Found(tuple(items[path] for path in sorted(found)), "")


def _matches(names: Sequence[str], parts: Sequence[str], below: bool) -> bool:
    """Return whether the names of a pattern match the parts of a path. ** matches any number of folders."""
    if not names:
        return below or not parts
    if names[0] == "**":
        return len(names) == 1 or any(_matches(names[1:], parts[i:], below) for i in range(len(parts)))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], names[0]) and _matches(names[1:], parts[1:], below)


def _beside(path: str, names: Sequence[str]) -> list[str]:
    """Return the paths of files beside a file. *: its name without the ending."""
    folder, _, name = path.rpartition("/")
    stem = name.rpartition(".")[0] or name
    return ["/".join(filter(None, (folder, other.replace("*", stem)))) for other in names]


def _item(found: Object, folder: str) -> _Item:
    return _Item(found.key, found.key.removeprefix(f"{folder}/" if folder else ""), found.size, found.version)


def _is_data(found: Object, folder: str) -> bool:
    """Return whether an object is a file: some programs write an empty object for each folder. Hidden names are no data."""
    path = _item(found, folder).path
    return bool(path) and found.key != folder and not path.endswith("/") and not re.search(r"(^|/)\.", path)


def _nothing(store: ObjectStore, prefix: str, pattern: str) -> str:
    """Return the message that a URL means nothing, with the nearest name."""
    if pattern:
        return "no object matches the pattern"
    parent, _, name = prefix.rpartition("/")
    with suppress(StoreError):
        return f"there is no such object, and none below it{did_you_mean(name, store.names(parent))}"
    return "there is no such object, and none below it"


def _require_distinct_paths(url: str, items: Sequence[_Item]) -> None:
    """Raise StoreError if the objects cannot be files: names may be too long, or those of a file and of a folder."""
    paths = {item.path for item in items}
    for path in sorted(paths):
        parts = path.split("/")
        if any(part in ("", "..") or len(os.fsencode(part)) > 255 or "\0" in part for part in parts):
            raise StoreError(f"{url}: the object {path!r:.200} has a name that no file can have")
        above = ("/".join(parts[:i]) for i in range(1, len(parts)))
        if both := next((folder for folder in above if folder in paths), ""):
            raise StoreError(f"{url}: {both} is an object and a prefix of others, but cannot be a file and a folder")


# ---------------------------------------------------------------- the cache


def _use(entry: Path) -> bool:
    """Return whether an entry is complete. If so, other processes do not remove it until this process ends."""
    try:
        lock = _held.get(entry) or (entry / _IN_USE).open("r+")
        fcntl.flock(lock, fcntl.LOCK_SH)
        stamps = read_json_object(entry / _ENTRY)["files"]
        if not os.path.samestat(os.fstat(lock.fileno()), (entry / _IN_USE).stat()):  # removed meanwhile
            return False
        if any(_stamp(entry / _FILES / path) != stamp for path, stamp in stamps.items()):
            return False
        os.utime(entry / _ENTRY)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    _held[entry] = lock
    return True


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _download(url: str, store: ObjectStore, found: _Found, entry: Path, again: Callable[[], _Found]) -> None:
    """Download the objects of an entry. Other processes wait. Raises StoreError or OSError."""
    cache, part = entry.parent, entry.with_name(entry.name + _PART)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with file_lock(_lock_of(part)):
            if _use(entry):
                return
            shutil.rmtree(entry, ignore_errors=True)  # damaged
            num_bytes = sum(item.size for item in found.items if not (part / _FILES / item.path).exists())
            _make_room(url, cache, part, num_bytes)
            count = counted(len(found.items), "file")
            print_error(f"downloading {count} of {url} ({num_bytes / 1e6:,.1f} MB) to {entry}")
            _download_items(store, found, part / _FILES, num_bytes)
            if not _still_means(found, again):
                raise StoreError(f"{url}: the objects have changed during the download; start again", "changed")
            stamps = {item.path: _stamp(part / _FILES / item.path) for item in found.items}
            (part / _IN_USE).touch()
            atomic_write(part / _ENTRY, json.dumps({"url": url, "files": stamps}))
            part.rename(entry)
            if not _use(entry):
                raise StoreError(f"{url}: the cache {cache} does not keep what is written to it")
    except (OSError, StoreError) as error:
        if getattr(error, "kind", "") == "disk" or getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(f"{url}: no space is left in {cache}; {CACHE} names another folder", "disk") from None
        raise


def _still_means(found: _Found, again: Callable[[], _Found]) -> bool:
    try:
        return again() == found
    except StoreError as error:
        if error.kind == "missing":
            return False
        raise


def _lock_of(part: Path) -> Path:
    return part.with_suffix(".lock")


def _download_items(store: ObjectStore, found: _Found, folder: Path, num_bytes: int) -> None:
    """Download what is missing. Raises the first error."""
    stop = threading.Event()
    with console.progress(num_bytes, "B", "downloading") as bar, ThreadPoolExecutor(_WORKERS) as pool:
        lock = threading.Lock()

        def progress(num_bytes: int) -> None:
            if stop.is_set():
                raise StoreError("stopped", "stopped")
            with lock:
                bar.update(num_bytes)

        def fetch(item: _Item) -> None:
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
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _make_room(url: str, cache: Path, part: Path, num_bytes: int) -> None:
    """Remove the entries and unfinished downloads that were used least recently, if the disk or the cache would be too full.
    Raises StoreError if that is not enough."""
    folders = [folder for folder in cache.iterdir() if folder.is_dir() and folder != part]
    sizes = {folder: sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) for folder in folders}
    total, limit = sum(sizes.values()) + num_bytes, _limit_bytes()
    for folder in sorted(folders, key=_last_use):
        if total <= limit and shutil.disk_usage(cache).free >= num_bytes:
            return
        if _remove_unused(folder):
            total -= sizes[folder]
    if (free := shutil.disk_usage(existing_part(cache)).free) < num_bytes:
        message = f"{url}: {num_bytes / 1e6:,.1f} MB must be downloaded to {cache}, which has {free / 1e6:,.1f} MB free"
        raise StoreError(f"{message}; {CACHE} names another folder")


def _limit_bytes() -> float:
    text = os.environ.get(LIMIT, "")
    if not re.fullmatch(r"(\d+(\.\d+)?)?", text):
        raise StoreError(f"{LIMIT}={text}: expected a size in GiB")
    return float(text) * 2**30 if text else float("inf")


def _last_use(folder: Path) -> float:
    try:
        return (folder / _ENTRY).stat().st_mtime
    except OSError:
        return folder.stat().st_mtime


def _remove_unused(folder: Path) -> bool:
    """Remove an entry or an unfinished download, unless a process uses it. Return whether it was removed."""
    if folder.name.endswith(_PART):
        if lock_holder(_lock_of(folder)):
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return True
    with suppress(OSError), (folder / _IN_USE).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        trash = folder.with_name(f"{folder.name}-removed-{os.getpid()}{_PART}")
        folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)
        return True
    return False

"""What the URL of an object store means: a file, all files below a prefix, those that match a pattern or that a list names, or a
mirrored run, which is read as if its folder were there."""

import fnmatch
import glob
import hashlib
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from trainer.base.system.object_store import Object, ObjectStore, url_error
from trainer.base.system.paths import BEST, PATH_LIST, listed_paths
from trainer.base.system.remote_run import Lineage, Save, key_of
from trainer.base.system.run_files import CHECKPOINTS, parse_step
from trainer.base.system.spelling import did_you_mean
from trainer.base.system.store_errors import StoreError


@dataclass(frozen=True)
class Item:
    """An object that a URL means."""

    key: str
    path: str
    """Relative path on this machine."""
    size: int
    version: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class Found:
    """What a URL means."""

    items: tuple[Item, ...]
    suffix: str
    """End of the local path that stands for the URL, behind the folder of the files."""

    def digest(self, bucket: str) -> str:
        items = sorted((item.path, item.key, item.size, item.version or item.sha256) for item in self.items)
        content = [bucket, *items]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def has_pattern(url: str) -> bool:
    return glob.has_magic(url)


def resolve(url: str, beside: Sequence[str], with_weights: bool) -> tuple[Found, ObjectStore]:
    """Return what a URL means, and the store to whose bucket the keys belong. Raises StoreError."""
    if re.search(r"\?[\w-]+=", url):
        raise StoreError(f"{url}: a query is not supported")
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    names = [name for name in key.split("/") if name]
    fixed = next((names[:i] for i, name in enumerate(names) if glob.has_magic(name)), names)
    if problem := url_error("/".join((f"{scheme}://{bucket}", *fixed))):
        raise StoreError(f"{url}: {problem}")
    store = ObjectStore(f"{scheme}://{bucket}")
    prefix, pattern = "/".join(fixed), "/".join(names[len(fixed) :])
    try:
        # A name that exists is no pattern, as on a disk.
        found = _file(store, "/".join(names), beside)
        if found is None and pattern:
            found = replace(_matching(store, prefix, [pattern], beside, below=False), suffix=f"/{pattern}")
        found = found or _run(store, url, prefix) or _below(store, prefix)
    except StoreError as error:
        raise (
            StoreError(f"{url}: there is no such bucket", error.kind) if error.kind == "no bucket" else error
        ) from None
    if not with_weights:
        found = replace(found, items=tuple(i for i in found.items if not i.path.endswith(".safetensors")))
    if not found.items:
        raise StoreError(f"{url}: {_nothing(store, prefix, pattern)}", "missing")
    _require_distinct_paths(url, found.items)
    return found, store


def _file(store: ObjectStore, key: str, beside: Sequence[str]) -> Found | None:
    """Return what the URL of a single object means, or None if there is none."""
    if not key or (main := store.head(key)) is None:
        return None
    folder, _, name = key.rpartition("/")
    if name.lower().endswith(PATH_LIST):
        patterns = _listed(store, key)
        listed = _matching(store, folder, patterns, beside, below=True)
        return Found((_item(main, folder), *(item for item in listed.items if item.key != key)), f"/{name}")
    others = (store.head(other) for other in _beside(key, beside) if other != key)
    objects = [main, *(found for found in others if found is not None)]
    return Found(tuple(_item(found, folder) for found in objects), f"/{name}")


def _listed(store: ObjectStore, key: str) -> list[str]:
    """Return the paths in a list. Raises StoreError if one leads elsewhere: a list in a bucket must not name local files."""
    try:
        entries = list(listed_paths(store.read(key)[0]))
    except UnicodeDecodeError as error:
        raise StoreError(f"{store.name(key)} is not UTF-8 text (byte {error.start})") from None
    for number, entry in entries:
        if entry.startswith("/") or "://" in entry or ".." in entry.split("/"):
            message = "in a bucket, a list names objects below its own prefix, relative to it"
            raise StoreError(f"{store.name(key)}:{number}: {entry}: {message}")
    return [entry for _, entry in entries]


def _run(store: ObjectStore, url: str, prefix: str) -> Found | None:
    """Return the newest or the best checkpoint of a mirrored run, with the small files of the run, or the checkpoint that the URL
    names as if it lay in the run's folder. None: there is no run."""
    named = re.fullmatch(rf"(?:(.*)/)?{CHECKPOINTS}/(step-\d+)(/.*)?", prefix)
    is_best, run = prefix.endswith(BEST), named[1] or "" if named else prefix.removesuffix(BEST)
    place = ObjectStore(_joined(store.url, run))
    lineage = Lineage.read(place)
    if not lineage.version:
        return None
    step = parse_step(named[2]) if named else lineage.best_step if is_best else None
    if (save := lineage.find(place, step)) is None:
        which = f"checkpoint {named[2]}" if named else "best checkpoint" if is_best else "complete checkpoint"
        raise StoreError(f"{url}: the run has no {which}", "missing")
    items = tuple(replace(item, key=_joined(run, item.key)) for item in _items_of(save, with_run_files=named is None))
    return Found(items, f"/{CHECKPOINTS}/{named[2]}{named[3] or ''}" if named else BEST if is_best else "")


def _items_of(save: Save, with_run_files: bool) -> list[Item]:
    folder = f"{CHECKPOINTS}/{save.local_name}"
    items = [
        Item(key_of(save.name, name), f"{folder}/{name}", f.size, sha256=f.sha256) for name, f in save.files.items()
    ]
    if with_run_files:
        items += [Item(save.key_of_run_file(path), path, f.size, sha256=f.sha256) for path, f in save.run_files.items()]
    return items


def _below(store: ObjectStore, prefix: str) -> Found:
    """Return what a prefix means: all objects below it. Of a run folder's checkpoints, only the newest is meant."""
    is_best = prefix.endswith(BEST)
    folder = prefix.removesuffix(BEST)
    items = [_item(found, folder) for found in store.list(f"{folder}/" if folder else "") if _is_data(found, folder)]
    steps = [step for item in items if (step := _step(item)) is not None]
    if steps and not is_best:
        items = [item for item in items if _step(item) in (None, max(steps))]
    return Found(tuple(items), BEST if is_best and items else "")


def _step(item: Item) -> int | None:
    """Return the step of the checkpoint of a run to which a file belongs, or None."""
    parts = item.path.split("/")
    return parse_step(parts[1]) if parts[0] == CHECKPOINTS and len(parts) > 2 else None


def _matching(store: ObjectStore, prefix: str, patterns: Sequence[str], beside: Sequence[str], below: bool) -> Found:
    """Return the objects below a prefix that match one of some patterns. below: also those below a folder that matches."""
    objects = store.list(f"{prefix}/" if prefix else "") if patterns else []
    items = {item.path: item for found in objects if _is_data(found, prefix) for item in (_item(found, prefix),)}
    names = [os.path.normpath(pattern).split("/") for pattern in patterns]
    found = {path for path in items if any(_matches(pattern, path.split("/"), below) for pattern in names)}
    found |= {other for path in found for other in _beside(path, beside) if other in items}
    return Found(tuple(items[path] for path in sorted(found)), "")


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
    return [_joined(folder, other.replace("*", stem)) for other in names]


def _joined(folder: str, name: str) -> str:
    """Return a key below a folder. "": the bucket itself."""
    return "/".join(filter(None, (folder, name)))


def _item(found: Object, folder: str) -> Item:
    return Item(found.key, found.key.removeprefix(f"{folder}/" if folder else ""), found.size, found.version)


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
        return f"there is no such object, and none below it{did_you_mean(name, {*store.names(parent)} - {name})}"
    return "there is no such object, and none below it"


def _require_distinct_paths(url: str, items: Sequence[Item]) -> None:
    """Raise StoreError if the objects cannot be files: names may be too long, or those of a file and of a folder."""
    paths = {item.path for item in items}
    for path in sorted(paths):
        parts = path.split("/")
        if any(part in ("", "..") or len(os.fsencode(part)) > 255 or "\0" in part for part in parts):
            raise StoreError(f"{url}: the object {path!r:.200} has a name that no file can have")
        above = ("/".join(parts[:i]) for i in range(1, len(parts)))
        if both := next((folder for folder in above if folder in paths), ""):
            raise StoreError(f"{url}: {both} is an object and a prefix of others, but cannot be a file and a folder")

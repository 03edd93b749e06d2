"""Resolution of data.path to files. The path is a file, a folder, a glob pattern, or a manifest that lists such paths."""

import glob
import itertools
import os
from collections.abc import Iterator
from typing import NoReturn

from trainer.config import ConfigError
from trainer.data.sources.streams import COMPRESSED

MANIFEST = ".manifest"


def with_compressed(suffixes: tuple[str, ...]) -> tuple[str, ...]:
    return suffixes + tuple(suffix + compressed for compressed in COMPRESSED for suffix in suffixes)


def find_files(path: str, suffixes: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the root folder and the sorted files of data.path. Raises ConfigError if no file matches.

    suffixes: in folders, only files whose names end in one of these suffixes are selected.
    """
    root, files = _from_manifest(path, suffixes) if path.endswith(MANIFEST) else _find(path, suffixes)
    if not files:
        raise ConfigError("data.path", f"this path holds no file ending in {' or '.join(suffixes)}")
    return root, tuple(sorted(files))


def _find(path: str, suffixes: tuple[str, ...]) -> tuple[str, list[str]]:
    if os.path.isdir(path):
        root, files = path, (file for file in _walk(path) if file.endswith(suffixes))
    elif os.path.isfile(path):
        root, files = os.path.dirname(path), iter([path])
    else:
        # The root consists of the folders before the first wildcard.
        fixed = itertools.takewhile(lambda name: not glob.has_magic(name), os.path.dirname(path).split("/"))
        root, files = "/".join(fixed) or ("/" if path.startswith("/") else ""), glob.iglob(path, recursive=True)
    return root, [file for file in files if os.path.isfile(file)]


def _walk(folder: str) -> Iterator[str]:
    for root, _, names in os.walk(folder, onerror=_raise_unreadable):
        for path in (os.path.join(root, name) for name in names):
            if os.path.islink(path) and not os.path.exists(path):
                raise ConfigError("data.path", f"{path} is a broken link")
            yield path


def _raise_unreadable(error: OSError) -> NoReturn:
    raise ConfigError("data.path", f"{error.filename} cannot be read ({error.strerror})")


def _from_manifest(manifest: str, suffixes: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the common parent folder and the paths of the files that a manifest lists.

    Each line holds a path or pattern, relative to the manifest's folder. Lines that begin with # are comments.
    """
    try:
        with open(manifest, encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError("data.path", f"{manifest} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        _raise_unreadable(error)
    listed: dict[str, int] = {}  # file -> line of the manifest
    for number, line in enumerate(lines, start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        _, files = _find(os.path.join(os.path.dirname(manifest), entry), suffixes)
        if not files:
            raise ConfigError("data.path", f"{manifest}:{number}: {entry} matches no file")
        for name in map(os.path.abspath, files):
            if name in listed:
                raise ConfigError("data.path", f"{manifest}:{number}: {name} is already listed on line {listed[name]}")
            listed[name] = number
    return os.path.commonpath([os.path.dirname(name) for name in listed]) if listed else "", list(listed)

"""Which files a path names: a file, a folder, a glob pattern, or a list of these."""

import glob
import itertools
import os
from collections.abc import Iterator
from typing import NoReturn

from trainer.config import ConfigError
from trainer.data.sources.streams import COMPRESSED

MANIFEST = ".manifest"


def with_compressed(suffixes: tuple[str, ...]) -> tuple[str, ...]:
    return suffixes + tuple(suffix + packed for packed in COMPRESSED for suffix in suffixes)


def matching(path: str, suffixes: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Root and files of data.path, in order. suffixes: of the files that a folder is searched through for. Raises
    ConfigError where there are none."""
    root, files = _listed(path, suffixes) if path.endswith(MANIFEST) else _matching(path, suffixes)
    if not files:
        raise ConfigError("data.path", f"holds no file ending in {' or '.join(suffixes)}")
    return root, tuple(sorted(files))


def _matching(path: str, suffixes: tuple[str, ...]) -> tuple[str, list[str]]:
    if os.path.isdir(path):
        root, files = path, (file for file in _walk(path) if file.endswith(suffixes))
    elif os.path.isfile(path):
        root, files = os.path.dirname(path), iter([path])
    else:
        # The folders before the first wildcard.
        fixed = itertools.takewhile(lambda part: not glob.has_magic(part), os.path.dirname(path).split("/"))
        root, files = "/".join(fixed) or ("/" if path.startswith("/") else ""), glob.iglob(path, recursive=True)
    return root, [file for file in files if os.path.isfile(file)]


def _walk(folder: str) -> Iterator[str]:
    for root, _, names in os.walk(folder, onerror=_unreadable):
        for path in (os.path.join(root, name) for name in names):
            if os.path.islink(path) and not os.path.exists(path):
                raise ConfigError("data.path", f"{path} is a link to nothing")
            yield path


def _unreadable(error: OSError) -> NoReturn:
    raise ConfigError("data.path", f"{error.filename} cannot be read ({error.strerror})")


def _listed(manifest: str, suffixes: tuple[str, ...]) -> tuple[str, list[str]]:
    """Of a file with a path or pattern on each line, relative to its own folder; lines that begin with # say nothing."""
    try:
        with open(manifest, encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError("data.path", f"{manifest}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        _unreadable(error)
    named: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        _, files = _matching(os.path.join(os.path.dirname(manifest), entry), suffixes)
        if not files:
            raise ConfigError("data.path", f"{manifest}:{number}: {entry} names no file")
        for name in map(os.path.abspath, files):
            if name in named:
                raise ConfigError("data.path", f"{manifest}:{number}: {name} is named in line {named[name]} too")
            named[name] = number
    return os.path.commonpath([os.path.dirname(name) for name in named]) if named else "", list(named)

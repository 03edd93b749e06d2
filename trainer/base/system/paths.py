"""Search for paths: the files below a folder, and the paths that match a pattern. Links are followed, each folder once."""

import fnmatch
import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BEST = "@best"
"""End of a path that stands for the best checkpoint of the run folder before it."""
PATH_LIST = ".manifest"
"""Ending of a file that lists paths of data."""
_NEVER_DATA = ("__MACOSX", "_temporary")
"""Folders with another program's files: attributes of files in archives of macOS, unfinished output of Spark and Hadoop."""


@dataclass
class Remarks:
    """Decisions of a search that its caller may want to log."""

    hidden: list[str] = field(default_factory=list)
    """Paths that were ignored because their name begins with a dot or is in _NEVER_DATA."""
    loops: list[str] = field(default_factory=list)
    """Links that were not followed, because they lead to a folder that contains them."""
    literal: list[str] = field(default_factory=list)
    """Existing paths whose name, as a pattern, would match other names too."""


def listed_paths(content: bytes) -> Iterator[tuple[int, str]]:
    """Yield (number of the line, path or pattern) of a file that lists paths. Lines that begin with # are comments. Raises
    UnicodeDecodeError."""
    for number, line in enumerate(content.decode("utf-8-sig").splitlines(), start=1):
        entry = line.strip()
        if entry and not entry.startswith("#"):
            yield number, entry


def split_best(path: str | Path) -> tuple[Path, bool]:
    """Return a path without BEST, and whether it ended so. A folder with such a name is meant itself."""
    text = str(Path(path))  # without a slash at its end
    is_best = text.endswith(BEST) and not os.path.lexists(text)
    return Path(text.removesuffix(BEST) if is_best else text), is_best


def path_error(path: str) -> str:
    """Return the reason why a text cannot be meant as a local path, or "" if it can. Each would become a folder of this name."""
    if path.startswith("file:///"):
        return f"must be a local path, not a URL: write {path[7:]}"
    if scheme := re.match(r"([a-zA-Z][a-zA-Z0-9+.-]*)://", path):
        return f"must be a local path, not a URL: copy the files to a folder, or mount {scheme[0]} as one"
    if (path.startswith("~") or re.match(r"\$\{?[A-Za-z_]", path)) and not os.path.lexists(path):
        return f"{path.split('/')[0]} is expanded only by a shell: write the complete path"
    return ""


def unreadable(error: OSError, path: str = "") -> str:
    """Return the reason why a search or a read failed, with the path. path: that of the error if the error has none, because
    the file was already open."""
    path = error.filename or path
    if os.path.islink(path) and not os.path.exists(path):
        return f"{path} is a broken link"
    return f"{path} cannot be read ({error.strerror})"


def walk(folder: str, remarks: Remarks, above: tuple[os.stat_result, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and all folders below it, each with the names of its files. Hidden names are ignored.

    Args:
        folder: its path; "" means the current folder.
        remarks: receives the ignored paths.
        above: the folders that lead to this one. A link to one of them would be followed forever.

    Raises:
        OSError: a folder cannot be read, or a link is broken.
    """
    status = os.stat(folder or ".")
    if any(os.path.samestat(status, other) for other in above):
        remarks.loops.append(folder)
        return
    files, folders = [], []
    with os.scandir(folder or ".") as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            path = os.path.join(folder, entry.name)
            if entry.name.startswith(".") or entry.name in _NEVER_DATA:
                remarks.hidden.append(path)
            elif entry.is_dir():
                folders.append(path)
            else:
                if entry.is_symlink():
                    os.stat(path)  # raises OSError if the link is broken
                files.append(entry.name)
    yield folder, files
    for inner in folders:
        yield from walk(inner, remarks, (*above, status))


def split_pattern(path: str, base: str, remarks: Remarks) -> tuple[str, list[str]]:
    """Split a path, relative to the folder `base`, into its fixed beginning and the names from the first wildcard on.

    A name that exists is fixed, even if it contains a wildcard.
    """
    fixed = "/" if path.startswith("/") else base
    names = [name for name in path.split("/") if name]
    while names:
        inner = os.path.join(fixed, names[0])
        if glob.has_magic(names[0]):
            if not os.path.lexists(inner):
                break
            if set(fnmatch.filter(os.listdir(fixed or "."), names[0])) - {names[0]}:
                remarks.literal.append(inner)
        fixed = inner
        del names[0]
    if names and path.endswith("/"):
        names.append("")  # only folders match
    return fixed, names


def expand(folder: str, names: list[str], remarks: Remarks) -> Iterator[str]:
    """Yield the existing paths that match a pattern, in the result of `split_pattern`, possibly more than once.

    *, ? and [...] match within a name, ** matches any number of folders. As in a shell, a wildcard does not match a name that
    begins with a dot. Raises OSError if a folder cannot be read, or a link is broken.
    """
    if not names:
        if os.path.lexists(folder):
            os.stat(folder)  # raises OSError if this is a broken link
            yield folder
        return
    name, *rest = names
    if glob.has_magic(name) and not os.path.isdir(folder or "."):
        return
    if name == "**":
        for inner, files in walk(folder, remarks):
            yield from expand(inner, rest, remarks) if rest else (os.path.join(inner, file) for file in files)
    elif not glob.has_magic(name):
        yield from expand(os.path.join(folder, name), rest, remarks)
    else:
        found = fnmatch.filter(sorted(os.listdir(folder or ".")), name)
        for match in found if name.startswith(".") else (n for n in found if not n.startswith(".")):
            path = os.path.join(folder, match)
            os.stat(path)
            if not rest or os.path.isdir(path):
                yield from expand(path, rest, remarks)


def exists(path: str) -> bool:
    """Return whether a path exists, or a path matches this pattern. If a folder cannot be read, return True: its reader fails."""
    try:
        return any(True for _ in expand(*split_pattern(path, "", Remarks()), Remarks()))
    except OSError:
        return True

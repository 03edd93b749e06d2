"""Resolution of data.path to files. The path is a file, a folder, a glob pattern, or a manifest that lists such paths."""

import itertools
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from trainer.base.config import ConfigError
from trainer.base.system import console
from trainer.base.system.object_store import is_url
from trainer.base.system.paths import PATH_LIST, Remarks, expand, listed_paths, split_pattern, unreadable, walk
from trainer.base.system.spelling import counted, similar_path
from trainer.data.sources.contents import ending_of, endings_of, kind_of_ending
from trainer.data.sources.streams import ends_in, is_compressed


@dataclass
class _Search(Remarks):
    """The search for the files of one dataset."""

    groups: tuple[tuple[str, ...], ...] = ()
    """Endings of the names of files in folders. In each folder, only the files of the first group that has any are selected."""
    other_endings: Counter[str] = field(default_factory=Counter)
    """Number of files in folders that are not selected, by the ending of their names."""
    folders: list[str] = field(default_factory=list)
    """Folders that a pattern matches. They are not searched."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        return tuple(itertools.chain.from_iterable(self.groups))


def find_files(path: str, dataset: str, readers: Sequence[str] = ()) -> tuple[str, tuple[str, ...]]:
    """Return the root folder and the sorted files of data.path. Raises ConfigError if no file matches.

    Args:
        path: A file, a folder, a pattern or a manifest.
        dataset: Type of the dataset.
        readers: Types of datasets that read the files, instead of this one. Of a folder, only the files with the endings of the
            first one that reads any are selected.
    """
    search = _Search(groups=tuple(map(endings_of, readers or (dataset,))))
    is_manifest = ends_in(path, PATH_LIST) and not os.path.isdir(path)
    try:
        root, files = _from_manifest(path, search) if is_manifest else _find(path, "", search)
    except OSError as error:
        raise ConfigError("data.path", unreadable(error)) from None
    if not files:
        suffixes = search.suffixes
        if len(search.groups) > 1:
            suffixes = [suffix for suffix in suffixes if not is_compressed(suffix)]
        message = f"this path holds no file ending in {' or '.join(suffixes)}"
        raise ConfigError("data.path", "; ".join([message, *_describe(search, dataset)]))
    _log(path, search)
    return root, tuple(sorted(files))


def _find(path: str, base: str, search: _Search) -> tuple[str, list[str]]:
    """Return the root folder and the files of one path, relative to the folder `base`."""
    fixed, names = split_pattern(path, base, search)
    if names:
        files = []
        for match in dict.fromkeys(expand(fixed, names, search)):
            if not os.path.isdir(match):
                files.append(match)
            elif "**" not in names:
                search.folders.append(match)
        return fixed, files
    if os.path.isdir(fixed):
        return fixed, _selected(fixed, search)
    return os.path.dirname(fixed), list(expand(fixed, [], search))


def _selected(folder: str, search: _Search) -> list[str]:
    """Return the files below a folder that belong to the first group that has any, without metadata of the package datasets."""
    found: list[list[str]] = [[] for _ in search.groups]
    for inner, names in walk(folder, search):
        metadata = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
        if "dataset_info.json" in names:
            metadata.add("state.json")
        for name in names:
            if name in metadata:
                continue
            group = next((i for i, suffixes in enumerate(search.groups) if ends_in(name, suffixes)), None)
            if group is None:
                search.other_endings[ending_of(name)] += 1
            else:
                found[group].append(os.path.join(inner, name))
    selected = next((i for i, files in enumerate(found) if files), 0)
    for files in found[selected + 1 :]:
        search.other_endings.update(map(ending_of, files))
    return found[selected] if found else []


def describe_folder(folder: str, dataset: str) -> str:
    """Return which files are in a folder, and what the user can do with them, as the continuation of a message."""
    search = _Search()
    try:
        assert not _selected(folder, search)
    except OSError as error:
        return f"; {unreadable(error)}"
    return "".join(f"; {part}" for part in _describe(search, dataset))


def _describe(search: _Search, dataset: str) -> Iterator[str]:
    if search.other_endings:
        yield f"its files: {_listed_endings(search)}"
        kinds = [kind for ending, _ in search.other_endings.most_common() if (kind := kind_of_ending(ending))]
        if kinds:  # text files beside files of another kind describe those
            yield next((kind for kind in kinds if kind.reader != "text"), kinds[0]).advice(dataset)
    if search.folders:
        yield f"the pattern matches only folders, such as {search.folders[0]}; append /** to select the files below them"
    if hidden := _hidden(search):
        yield f"hidden files and folders are ignored, such as {hidden[0]}"


def _listed_endings(search: _Search) -> str:
    """Return how many files have the most frequent endings, such as "3 .csv, 1 .parquet"."""
    frequent = search.other_endings.most_common(4)
    shown = [f"{count} {ending or 'without an ending'}" for ending, count in frequent]
    return ", ".join([*shown, "..."] if len(search.other_endings) > 4 else shown)


def _hidden(search: _Search) -> list[str]:
    return [path for path in search.hidden if ends_in(path, search.suffixes) or os.path.isdir(path)]


def _log(path: str, search: _Search) -> None:
    if hidden := _hidden(search):
        console.info(f"{path}: ignored {len(hidden)} hidden files and folders, such as {hidden[0]}")
    if search.other_endings:
        count = counted(search.other_endings.total(), "file")
        console.info(f"{path}: ignored {count} with other endings: {_listed_endings(search)}")
    if search.folders:
        console.info(
            f"{path}: ignored {len(search.folders)} folders that match the pattern, such as {search.folders[0]}"
        )
    for link in search.loops:
        console.info(f"{path}: {link} is not followed, because it leads to a folder that contains it")
    for name in search.literal:
        console.warning(f"{name} exists, so it is not a pattern, which would match other names too")


def _from_manifest(manifest: str, search: _Search) -> tuple[str, list[str]]:
    """Return the common parent folder and the paths of the files that a manifest lists.

    Each line holds a path or pattern, relative to the manifest's folder.
    """
    try:
        with open(manifest, "rb") as file:
            entries = list(listed_paths(file.read()))
    except UnicodeDecodeError as error:
        raise ConfigError("data.path", f"{manifest} is not UTF-8 text (byte {error.start})") from None
    listed: dict[str, int] = {}  # file -> line of the manifest
    for number, entry in entries:
        _, files = _find(entry, os.path.dirname(manifest), search)
        if not files and is_url(entry):
            message = "is a URL, which only a list in the bucket can name, relative to itself"
            raise ConfigError("data.path", f"{manifest}:{number}: {entry} {message}")
        if not files:
            similar = similar_path(os.path.join(os.path.dirname(manifest), entry))
            raise ConfigError("data.path", f"{manifest}:{number}: {entry} matches no file{similar}")
        for name in map(os.path.abspath, files):
            if name in listed:
                raise ConfigError("data.path", f"{manifest}:{number}: {name} is already listed on line {listed[name]}")
            if ends_in(name, PATH_LIST):
                raise ConfigError("data.path", f"{manifest}:{number}: {name} is another manifest; list its lines here")
            listed[name] = number
    return os.path.commonpath([os.path.dirname(name) for name in listed]) if listed else "", list(listed)


def require_distinct(files: Sequence[str]) -> None:
    """Raise ConfigError if a path is not a regular file, or if two paths lead to one file. Hard links to one file, which are
    equal copies of a document, are logged.

    The files are compared by device and inode, in 16 bytes of memory per file.
    """
    identities = np.empty((len(files), 2), np.uint64)
    for i, path in enumerate(files):
        try:
            status = os.stat(path)
        except OSError as error:
            raise ConfigError("data.path", unreadable(error)) from None
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError("data.path", f"{path} is not a regular file")
        identities[i] = status.st_dev, status.st_ino
    order = np.lexsort(identities.T)
    equal = np.flatnonzero((identities[order[1:]] == identities[order[:-1]]).all(1))
    hard_links: dict[str, str] = {}  # real path -> path
    for i in np.union1d(order[equal], order[equal + 1]).tolist():
        # A file with one name is reached twice through a link or a mounted folder, even if its real paths differ.
        has_names = os.stat(files[i]).st_nlink > 1
        name = os.path.realpath(files[i]) if has_names else str(identities[i])
        if name in hard_links:
            message = f"{files[i]} and {hard_links[name]} are the same file, whose documents would be read twice"
            raise ConfigError("data.path", f"{message}; remove one of them, or list the files in a manifest")
        hard_links[name] = files[i]
    if hard_links:
        first, second = list(hard_links.values())[:2]
        console.warning(
            f"{len(hard_links)} files are hard links, such as {first} and {second}: their documents are read repeatedly"
        )

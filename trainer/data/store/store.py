"""The token store: a prepared dataset on disk, read through memory maps. docs/data.md describes its files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import ConfigError
from trainer.system.files import digest, digest_of, read_json_object

VERSION = 2
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Encoded:
    """A document as it goes into a store."""

    tokens: np.ndarray
    """(tokens,) with what opens and closes it"""
    targets: np.ndarray | None = None
    """(tokens,) uint8: 1 where the token is to be predicted, else 0; None: everywhere."""


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class ConcatArray:
    """Arrays one after the other, read as one."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._arrays = arrays
        self._ends = np.cumsum([len(array) for array in arrays])
        self.dtype = arrays[0].dtype

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        """index: places, none of them negative, in any shape; or a slice."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            owner = int(np.searchsorted(self._ends, start, side="right"))
            if step == 1 and start < stop <= self._ends[owner]:  # as almost always: no copy
                before = int(self._ends[owner]) - len(self._arrays[owner])
                return self._arrays[owner][start - before : stop - before]
            return self[np.arange(start, stop, step)]
        flat = np.ravel(index)
        owner = np.searchsorted(self._ends, flat, side="right")
        result = np.empty(flat.shape, self.dtype)
        for number in np.unique(owner):
            mine = owner == number
            array = self._arrays[number]
            result[mine] = array[flat[mine] - (self._ends[number] - len(array))]
        return result.reshape(np.shape(index))


@dataclass(frozen=True)
class TokenStore:
    """One split of a store."""

    tokens: np.ndarray | ConcatArray
    """(tokens,)"""
    documents: np.ndarray
    """(documents + 1,): offsets into tokens."""
    targets: np.ndarray | ConcatArray | None = None
    """(tokens,) uint8, as Encoded.targets; None: every token is to be predicted."""


def read_description(folder: Path) -> dict[str, Any]:
    """store.json. Raises ConfigError where it is none of ours."""
    try:
        description = read_json_object(folder / "store.json")
        version = description["version"]
    except (OSError, ValueError, KeyError):
        raise _damaged(folder, "store.json cannot be read") from None
    if version != VERSION:
        raise ConfigError(
            "data.store_folder", f"{folder} is a store of version {version}, not {VERSION}: prepare it anew"
        )
    return description


def _damaged(folder: Path, what: str) -> ConfigError:
    return ConfigError("data.store_folder", f"{folder}/{what}; delete the folder {folder}")


def identity(folder: Path) -> str:
    """Changes with the content of a store: its description holds the digests of its files."""
    return digest((folder / "store.json").read_bytes())


def open_store(folder: Path, split: str) -> TokenStore:
    """Raises ConfigError where the files are not what store.json promises; their content is not read."""
    description = read_description(folder)
    try:
        members = [(Path(m["folder"]), m["identity"]) for m in description["stores"]]
        dtype, documents = np.dtype(description["dtype"]), int(description["splits"][split]["documents"])
        tokens = int(description["splits"][split]["tokens"])
        targets = bool(description["targets"])
        _check_sizes(folder, description)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _damaged(folder, "store.json cannot be read") from None
    offsets = _map(folder / f"{split}.documents", np.dtype("<i8"), documents + 1)
    if members:
        stores = [_member(*member, split) for member in members]
        masks = [np.broadcast_to(np.uint8(1), len(s.tokens)) if s.targets is None else s.targets for s in stores]
        return TokenStore(ConcatArray([s.tokens for s in stores]), offsets, ConcatArray(masks) if targets else None)
    return TokenStore(
        _map(folder / f"{split}.tokens", dtype, tokens),
        offsets,
        _map(folder / f"{split}.targets", np.dtype("u1"), tokens) if targets else None,
    )


def _member(folder: Path, known: str, split: str) -> TokenStore:
    if not (folder / "store.json").is_file() or identity(folder) != known:
        raise ConfigError("data.path", f"{folder} is not the store any more that it was at the start")
    return open_store(folder, split)


def _check_sizes(folder: Path, description: dict[str, Any]) -> None:
    for name, file in description["files"].items():
        path = folder / name
        found = path.stat().st_size if path.exists() else 0
        if found != file["size"]:
            raise _damaged(folder, f"{name} has {found} bytes of {file['size']}")


def check_content(folder: Path) -> None:
    """Read all of a store, and those it is made of. Raises ConfigError where it is not what was written."""
    description = read_description(folder)
    for split in SPLITS:
        open_store(folder, split)
    for name, file in description["files"].items():
        if digest_of(folder / name) != file["digest"]:
            raise _damaged(folder, f"{name} has another content than was written")
    for member in description["stores"]:
        check_content(Path(member["folder"]))


def _map(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    found, wanted = path.stat().st_size if path.exists() else 0, length * dtype.itemsize
    if found != wanted:
        raise _damaged(path.parent, f"{path.name} has {found} bytes of {wanted}")
    if not length:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r", shape=(length,)))  # mapped still, and faster to take a part of

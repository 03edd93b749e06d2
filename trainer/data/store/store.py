"""The token store: a prepared dataset on disk, read through memory maps. docs/data.md describes its files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import ConfigError
from trainer.system.files import digest, digest_of, read_json_object

VERSION = 3
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Encoded:
    """A tokenized document."""

    tokens: np.ndarray
    """Token ids, including BOS and EOS, shape (tokens,)."""
    targets: np.ndarray | None = None
    """Target mask, uint8 of shape (tokens,): 1 for a target token, otherwise 0. None: all tokens are targets."""


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class ConcatArray:
    """A read-only concatenation of arrays that is never materialized."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._arrays = arrays
        self._ends = np.cumsum([len(array) for array in arrays])
        self.dtype = arrays[0].dtype

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        """index: a slice, or an array of non-negative indices in any shape."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            i = int(np.searchsorted(self._ends, start, side="right"))
            if step == 1 and start < stop <= self._ends[i]:  # the common case needs no copy
                offset = int(self._ends[i]) - len(self._arrays[i])
                return self._arrays[i][start - offset : stop - offset]
            return self[np.arange(start, stop, step)]
        flat = np.ravel(index)
        owner = np.searchsorted(self._ends, flat, side="right")
        result = np.empty(flat.shape, self.dtype)
        for i in np.unique(owner):
            selected = owner == i
            array = self._arrays[i]
            result[selected] = array[flat[selected] - (self._ends[i] - len(array))]
        return result.reshape(np.shape(index))


@dataclass(frozen=True)
class TokenStore:
    """One split of a store: the tokens of all documents, one after the other."""

    tokens: np.ndarray | ConcatArray
    """Token ids of all documents, shape (tokens,)."""
    documents: np.ndarray
    """Index of the first token of each document, then the number of tokens, shape (documents + 1,)."""
    targets: np.ndarray | ConcatArray | None = None
    """Target mask of all documents, shape (tokens,), in the format of Encoded.targets."""


def read_description(folder: Path) -> dict[str, Any]:
    """Read store.json. Raises ConfigError if it is damaged or has another format version."""
    try:
        description = read_json_object(folder / "store.json")
        version = description["version"]
    except (OSError, ValueError, KeyError):
        raise _damaged(folder, "store.json cannot be read") from None
    if version != VERSION:
        raise ConfigError(
            "data.store_folder", f"{folder} has format version {version}, not {VERSION}; prepare it again"
        )
    return description


def _damaged(folder: Path, message: str) -> ConfigError:
    return ConfigError("data.store_folder", f"{folder}/{message}; delete the folder {folder}")


def store_digest(folder: Path) -> str:
    """Return a digest of the content of a store: the digest of store.json, which contains the digests of all files."""
    return digest((folder / "store.json").read_bytes())


def open_store(folder: Path, split: str) -> TokenStore:
    """Open one split. Raises ConfigError if file sizes do not match store.json; `check_content` also checks digests."""
    description = read_description(folder)
    try:
        members = [(Path(member["folder"]), member["digest"]) for member in description["members"]]
        dtype, documents = np.dtype(description["dtype"]), int(description["splits"][split]["documents"])
        tokens = int(description["splits"][split]["tokens"])
        has_targets = bool(description["targets"])
        _check_sizes(folder, description)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _damaged(folder, "store.json cannot be read") from None
    offsets = _map(folder / f"{split}.documents", np.dtype("<i8"), documents + 1)
    if members:
        stores = [_open_member(*member, split) for member in members]
        masks = [np.broadcast_to(np.uint8(1), len(s.tokens)) if s.targets is None else s.targets for s in stores]
        return TokenStore(ConcatArray([s.tokens for s in stores]), offsets, ConcatArray(masks) if has_targets else None)
    return TokenStore(
        _map(folder / f"{split}.tokens", dtype, tokens),
        offsets,
        _map(folder / f"{split}.targets", np.dtype("u1"), tokens) if has_targets else None,
    )


def _open_member(folder: Path, digest: str, split: str) -> TokenStore:
    if not (folder / "store.json").is_file() or store_digest(folder) != digest:
        raise ConfigError("data.path", f"{folder} has changed since the run started")
    return open_store(folder, split)


def _check_sizes(folder: Path, description: dict[str, Any]) -> None:
    for name, file in description["files"].items():
        path = folder / name
        size = path.stat().st_size if path.exists() else 0
        if size != file["size"]:
            raise _damaged(folder, f"{name} has {size} of {file['size']} bytes")


def check_content(folder: Path) -> None:
    """Read all files of a store and of its members. Raises ConfigError if a digest does not match."""
    description = read_description(folder)
    for split in SPLITS:
        open_store(folder, split)
    for name, file in description["files"].items():
        if digest_of(folder / name) != file["digest"]:
            raise _damaged(folder, f"{name} does not match its digest in store.json")
    for member in description["members"]:
        check_content(Path(member["folder"]))


def _map(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    size, expected = path.stat().st_size if path.exists() else 0, length * dtype.itemsize
    if size != expected:
        raise _damaged(path.parent, f"{path.name} has {size} of {expected} bytes")
    if not length:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r", shape=(length,)))  # still memory-mapped, but faster to slice

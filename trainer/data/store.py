"""The token store: a prepared dataset on disk, read through memory maps.

A store is a folder with `store.json` and, for each split ("train", "held_out"),
    SPLIT.tokens      the tokens of all documents, one after the other: little-endian uint16 or uint32
    SPLIT.documents   where each document begins, and the end of the last: little-endian int64
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.config import ConfigError

VERSION = 1
SPLITS = ("train", "held_out")


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


@dataclass(frozen=True)
class TokenStore:
    """One split of a store."""

    tokens: np.ndarray
    """(tokens,)"""
    documents: np.ndarray
    """(documents + 1,): offsets into tokens."""
    targets: np.ndarray | None = None
    """(tokens,), 0 or 1: whether each is a target; None: all are."""


def read_description(folder: Path) -> dict:
    return json.loads((folder / "store.json").read_text())


def open_store(folder: Path, split: str) -> TokenStore:
    """Raises ConfigError where the files are not what store.json promises."""
    try:
        description = read_description(folder)
        counts = description["splits"][split]
        dtype, tokens, documents = np.dtype(description["dtype"]), int(counts["tokens"]), int(counts["documents"])
        if description["version"] != VERSION:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError("data.store_folder", f"{folder}/store.json cannot be read; delete the folder") from None
    return TokenStore(
        _map(folder / f"{split}.tokens", dtype, tokens),
        _map(folder / f"{split}.documents", np.dtype("<i8"), documents + 1),
    )


def _map(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    found = path.stat().st_size if path.exists() else 0
    if found != length * dtype.itemsize:
        wanted = length * dtype.itemsize
        raise ConfigError("data.store_folder", f"{path} has {found} bytes of {wanted}; delete the folder {path.parent}")
    return np.memmap(path, dtype, mode="r", shape=(length,)) if length else np.empty(0, dtype)

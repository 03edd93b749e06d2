"""The token store: a prepared dataset on disk, read in parts. docs/data.md describes its files.

A concatenation of stores is itself a store. It lists its member stores and contains no tokens.
"""

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.config import ConfigError, DataConfig
from trainer.base.system import console
from trainer.base.system.files import (
    HashingFile,
    atomic_folder,
    digest,
    digest_of,
    file_lock,
    is_temporary,
    read_json_object,
)
from trainer.base.system.paths import Remarks, expand, split_pattern, unreadable
from trainer.base.system.spelling import counted
from trainer.data.store.arrays import ConcatArray, FileArray
from trainer.data.tokenizer.protocol import Tokenizer

VERSION = 3
SPLITS = ("train", "held_out")
Array = np.ndarray | FileArray | ConcatArray

SECOND_START = 2
"""Value in the target mask of a preference pair: the first token of the conversation with the rejected answer."""


@dataclass(frozen=True)
class Encoded:
    """A tokenized document."""

    tokens: np.ndarray
    """Token ids, including BOS and EOS, shape (tokens,)."""
    targets: np.ndarray | None = None
    """Target mask, uint8, shape (tokens,): 1 for target tokens, 0 for other tokens. None if all tokens are targets."""
    unused_fields: tuple[str, ...] = ()
    """Names of the document's fields that were not used, and of entries of data.columns whose field it does not have."""


def most_frequent(counts: Iterable[Mapping[str, int]], limit: int = 1000) -> dict[str, int]:
    """Return the sum of several counts by name, for the `limit` most frequent names."""
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0]))[:limit])


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


@dataclass(frozen=True)
class TokenStore:
    """One split of a store. The tokens of its documents are stored consecutively."""

    tokens: Array
    """Token ids of all documents, shape (tokens,)."""
    documents: np.ndarray | FileArray
    """Index of each document's first token, shape (documents + 1,). The last element is the number of tokens."""
    targets: Array | None = None
    """Target mask of all documents, shape (tokens,), in the format of Encoded.targets."""


def write_description(folder: Path, dataset: str, tokenizer: Tokenizer, **content: Any) -> None:
    """Write store.json, the description of a store. All other files of the store must be written before."""
    description = {
        "version": VERSION,
        "dataset": dataset,
        "dtype": token_dtype(tokenizer.vocab_size).str,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
    }
    (folder / "store.json").write_text(json.dumps(description | content, indent=1))


def read_description(folder: Path) -> dict[str, Any]:
    """Read store.json. Raises ConfigError if the file is damaged or has an unsupported format version."""
    try:
        description = read_json_object(folder / "store.json")
        version = description["version"]
    except (OSError, ValueError, KeyError):
        raise _damaged(folder, "store.json cannot be read") from None
    if version != VERSION:
        message = f"{folder} has format version {version}, not {VERSION}; prepare it again"
        raise ConfigError("data.store_folder", message)
    return description


def _damaged(folder: Path, message: str) -> ConfigError:
    return ConfigError("data.store_folder", f"{folder}/{message}; delete the folder {folder}")


def store_digest(folder: Path) -> str:
    """Return a digest of a store's content: the digest of store.json, which contains the digests of all other files."""
    return digest((folder / "store.json").read_bytes())


def splits_digest(folder: Path) -> str:
    """Return a digest of the documents of a store, their tokens and their targets, or "" if the store cannot be read."""
    try:
        files = read_description(folder)["files"]
        digests = {name: files[name]["digest"] for name in sorted(files) if name.partition(".")[0] in SPLITS}
        return digest(json.dumps(digests).encode()) if digests else ""
    except (ConfigError, KeyError, TypeError, AttributeError):
        return ""


def open_store(folder: Path, split: str) -> TokenStore:
    """Open one split of a store. Raises ConfigError if file sizes do not match store.json. Digests are not checked."""
    description = read_description(folder)
    try:
        for name, file in description["files"].items():
            _check_size(folder / name, file["size"])
        tokens, documents = (int(description["splits"][split][unit]) for unit in ("tokens", "documents"))
        offsets = _open(folder / f"{split}.documents", "<i8", documents + 1).as_index()
        has_targets = bool(description["targets"])
        if description["members"]:
            stores = [_open_member(*member, split) for member in _members(folder, description)]
            masks = [np.broadcast_to(np.uint8(1), len(s.tokens)) if s.targets is None else s.targets for s in stores]
            mask = ConcatArray(masks) if has_targets else None
            return TokenStore(ConcatArray([store.tokens for store in stores]), offsets, mask)
        mask = _open(folder / f"{split}.targets", "u1", tokens) if has_targets else None
        return TokenStore(_open(folder / f"{split}.tokens", description["dtype"], tokens), offsets, mask)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _damaged(folder, "store.json cannot be read") from None


def _members(folder: Path, description: dict[str, Any]) -> list[tuple[Path, str]]:
    """Return the folder and the digest of each member of a store, or an empty list if the store is not a concatenation."""
    return [((folder.parent / member["folder"]).resolve(), member["digest"]) for member in description["members"]]


def member_folders(folder: Path) -> list[Path]:
    """Return the folders of the members of a store, or an empty list if the store is not a concatenation."""
    return [member for member, _ in _members(folder, read_description(folder))]


def _open_member(folder: Path, digest: str, split: str) -> TokenStore:
    if not (folder / "store.json").is_file() or store_digest(folder) != digest:
        raise ConfigError("data.path", f"{folder} has changed since the run started")
    return open_store(folder, split)


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size if path.exists() else 0
    if size != expected:
        raise _damaged(path.parent, f"{path.name} has {size} bytes instead of {expected}")


def check_content(folder: Path) -> None:
    """Check the digests of all files of a store and of its members. Raises ConfigError if a file does not match its digest."""
    description = read_description(folder)
    for split in SPLITS:
        open_store(folder, split)
    for name, file in description["files"].items():
        if digest_of(folder / name) != file["digest"]:
            raise _damaged(folder, f"{name} does not match its digest in store.json")
    for member in member_folders(folder):
        check_content(member)


def _open(path: Path, dtype: str, length: int) -> FileArray:
    _check_size(path, length * np.dtype(dtype).itemsize)
    return FileArray.open(path, dtype, length)


# ---------------------------------------------------------------- concatenation


def concat_stores(data: DataConfig, tokenizer: Tokenizer) -> Path:
    """Concatenate all stores found at data.path, in the order of their names, and return the folder of the result. Its name
    contains a hash of the stores' names and digests. Raises ConfigError if a store was prepared with another tokenizer."""
    folders = _member_folders(data.path)
    descriptions = [read_description(folder) for folder in folders]
    for folder, description in zip(folders, descriptions, strict=True):
        for key, value in (("tokenizer", tokenizer.fingerprint), ("dtype", token_dtype(tokenizer.vocab_size).str)):
            if description[key] != value:
                message = f"{folder} was prepared with {key} {description[key]}, but this run uses {value}"
                raise ConfigError("data.path", message)
    with_pairs = [folder for folder, d in zip(folders, descriptions, strict=True) if d["dataset"] == "preference"]
    if 0 < len(with_pairs) < len(folders):
        raise ConfigError(
            "data.path", f"only some of these stores consist of preference pairs, such as {with_pairs[0]}"
        )
    digests = [store_digest(folder) for folder in folders]
    by_digest: dict[str, Path] = {}
    for member, key in zip(folders, digests, strict=True):
        if key in by_digest:
            message = (
                f"{member} and {by_digest[key]} are the same store, whose documents would be read twice; remove one"
            )
            raise ConfigError("data.path", message)
        by_digest[key] = member
    content = json.dumps([VERSION, [folder.name for folder in folders], digests])
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    folder = Path(data.store_folder) / f"prepared-{key}"
    # Stores that have moved are the same data, so only the list of members is rewritten.
    members = [(member.resolve(), d) for member, d in zip(folders, digests, strict=True)]
    if not _has_members(folder, members):
        with file_lock(folder.parent / "stores.lock"):
            if not _has_members(folder, members):
                _write_concatenation(folder, members, descriptions, tokenizer)
    return folder


def _has_members(folder: Path, members: list[tuple[Path, str]]) -> bool:
    try:
        return folder.exists() and _members(folder, read_description(folder)) == members
    except (KeyError, TypeError):
        raise _damaged(folder, "store.json cannot be read") from None


def _member_folders(path: str) -> list[Path]:
    if os.path.isfile(os.path.join(path, "store.json")):
        if read_description(Path(path))["members"]:
            raise ConfigError("data.path", "this store is a concatenation; give the paths of its members instead")
        return [Path(path)]
    try:
        fixed, names = split_pattern(path, "", Remarks())
        matches = dict.fromkeys(expand(fixed, names or ["*"], Remarks()))
    except OSError as error:
        raise ConfigError("data.path", unreadable(error)) from None
    folders = [Path(folder) for folder in matches if os.path.isfile(os.path.join(folder, "store.json"))]
    # Concatenations and unfinished stores may be in the same folder.
    folders = [folder for folder in folders if not is_temporary(folder) and not read_description(folder)["members"]]
    if not folders:
        raise ConfigError("data.path", "no prepared store was found; a prepared store is a folder with a store.json")
    return sorted(folders, key=lambda folder: (folder.name, str(folder)))


def _location(member: Path, stores: Path) -> str:
    """Return a member's path: relative if it is in the same folder of stores, so that this folder can be moved or mounted
    elsewhere, otherwise absolute."""
    return str(member.relative_to(stores.resolve()) if member.is_relative_to(stores.resolve()) else member)


def _write_concatenation(
    folder: Path, members: list[tuple[Path, str]], descriptions: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    splits, files = {}, {}
    with atomic_folder(folder) as unfinished:
        for split in SPLITS:
            tokens = 0
            with contextlib.closing(HashingFile(unfinished / f"{split}.documents")) as out:
                out.write(np.zeros(1, "<i8").data)
                for member, _ in members:
                    store = open_store(member, split)
                    out.write((store.documents[1:] + tokens).astype("<i8").data)
                    tokens += len(store.tokens)
            splits[split] = {"tokens": tokens, "documents": out.size // 8 - 1}
            files[f"{split}.documents"] = out.close()
        bad_documents, targets = sum(d["bad_documents"] for d in descriptions), any(d["targets"] for d in descriptions)
        unused_fields = most_frequent(d.get("unused_fields", {}) for d in descriptions)
        counts = {"splits": splits, "bad_documents": bad_documents, "unused_fields": unused_fields, "targets": targets}
        for number in ("files_read", "damaged_files"):  # stores of earlier versions do not have them
            counts[number] = sum(d.get(number, 0) for d in descriptions)
        dataset = "preference" if descriptions[0]["dataset"] == "preference" else "prepared"
        listed = [{"folder": _location(member, folder.parent), "digest": digest} for member, digest in members]
        write_description(unfinished, dataset, tokenizer, **counts, files=files, members=listed)
    console.info(f"concatenated {counted(len(members), 'store')} into {folder}")

"""Stores that were prepared before, on other machines perhaps, as one: a store that names them and holds no tokens."""

import contextlib
import glob
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import ConfigError, DataConfig
from trainer.data.store.store import SPLITS, VERSION, identity, open_store, read_description, token_dtype
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.system import logging
from trainer.system.files import HashingFile, atomic_folder, is_temporary


def join(data: DataConfig, tokenizer: Tokenizer) -> Path:
    """The folder of the store that is all stores of data.path together, in the order of their names; its own name comes from
    theirs and their digests. Raises ConfigError where they do not go together."""
    members = _members(data.path)
    descriptions = [_described(folder, tokenizer) for folder in members]
    identities = [identity(folder) for folder in members]
    names = [folder.name for folder in members]
    key = hashlib.sha256(json.dumps([VERSION, names, identities]).encode()).hexdigest()[:16]
    folder = Path(data.store_folder) / f"stores-{key}"
    # Other paths to the same stores are no other data: what names them is written anew.
    places = [{"folder": str(m.resolve()), "identity": i} for m, i in zip(members, identities, strict=True)]
    if not folder.exists() or read_description(folder)["stores"] != places:
        _write(folder, members, descriptions, places, tokenizer)
    return folder


def _members(path: str) -> list[Path]:
    if os.path.isfile(os.path.join(path, "store.json")):
        if read_description(Path(path))["stores"]:
            raise ConfigError("data.path", "is a joined store; name those that it joins")
        return [Path(path)]
    found = glob.glob(os.path.join(path, "*") if os.path.isdir(path) else path, recursive=True)
    members = [Path(folder) for folder in found if os.path.isfile(os.path.join(folder, "store.json"))]
    # Joined ones, and unfinished ones, may stand beside those that they join.
    members = [folder for folder in members if not is_temporary(folder) and not read_description(folder)["stores"]]
    if not members:
        raise ConfigError("data.path", "holds no prepared store (a folder with a store.json)")
    return sorted(members, key=lambda folder: (folder.name, str(folder)))


def _described(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    description = read_description(folder)
    for key, wanted in (("tokenizer", tokenizer.fingerprint), ("dtype", token_dtype(tokenizer.vocab_size).str)):
        if description[key] != wanted:
            raise ConfigError(
                "data.path", f"{folder} was prepared with the {key} {description[key]}, this run has {wanted}"
            )
    return description


def _write(
    folder: Path, members: list[Path], descriptions: list[dict[str, Any]], places: list[dict], tokenizer: Tokenizer
) -> None:
    splits, files = {}, {}
    with atomic_folder(folder) as unfinished:
        for split in SPLITS:
            tokens = 0
            with contextlib.closing(HashingFile(unfinished / f"{split}.documents")) as out:
                out.write(np.zeros(1, "<i8").data)
                for member in members:
                    store = open_store(member, split)
                    out.write((store.documents[1:] + tokens).astype("<i8").data)
                    tokens += len(store.tokens)
            splits[split] = {"tokens": tokens, "documents": out.size // 8 - 1}
            files[f"{split}.documents"] = out.close()
        description = {
            "version": VERSION,
            "dataset": "prepared",
            "dtype": token_dtype(tokenizer.vocab_size).str,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": tokenizer.fingerprint,
            "splits": splits,
            "skipped": sum(d["skipped"] for d in descriptions),
            "targets": any(d["targets"] for d in descriptions),
            "files": files,
            "stores": places,
        }
        (unfinished / "store.json").write_text(json.dumps(description, indent=1))
    logging.info(f"joined {len(members)} stores -> {folder}")

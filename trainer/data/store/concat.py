"""Concatenation of prepared stores: a store that lists its members and contains no tokens."""

import contextlib
import glob
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import ConfigError, DataConfig
from trainer.data.store.store import SPLITS, VERSION, open_store, read_description, store_digest, token_dtype
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.system import logging
from trainer.system.files import HashingFile, atomic_folder, is_temporary


def concat_stores(data: DataConfig, tokenizer: Tokenizer) -> Path:
    """Return the folder of the concatenation of all stores of data.path, ordered by name. The name of this folder is a hash
    of the members' names and digests. Raises ConfigError for incompatible stores."""
    folders = _member_folders(data.path)
    descriptions = [_compatible_description(folder, tokenizer) for folder in folders]
    digests = [store_digest(folder) for folder in folders]
    names = [folder.name for folder in folders]
    key = hashlib.sha256(json.dumps([VERSION, names, digests]).encode()).hexdigest()[:16]
    folder = Path(data.store_folder) / f"prepared-{key}"
    members = [{"folder": str(f.resolve()), "digest": d} for f, d in zip(folders, digests, strict=True)]
    # Stores that have moved are the same data, so only the list of members is rewritten.
    if not folder.exists() or read_description(folder)["members"] != members:
        _write(folder, members, descriptions, tokenizer)
    return folder


def _member_folders(path: str) -> list[Path]:
    if os.path.isfile(os.path.join(path, "store.json")):
        if read_description(Path(path))["members"]:
            raise ConfigError("data.path", "is a concatenation of stores; name its members")
        return [Path(path)]
    matches = glob.glob(os.path.join(path, "*") if os.path.isdir(path) else path, recursive=True)
    folders = [Path(folder) for folder in matches if os.path.isfile(os.path.join(folder, "store.json"))]
    # Concatenations and unfinished stores may be in the same folder.
    folders = [folder for folder in folders if not is_temporary(folder) and not read_description(folder)["members"]]
    if not folders:
        raise ConfigError("data.path", "contains no prepared store (a folder with a store.json)")
    return sorted(folders, key=lambda folder: (folder.name, str(folder)))


def _compatible_description(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    description = read_description(folder)
    for key, value in (("tokenizer", tokenizer.fingerprint), ("dtype", token_dtype(tokenizer.vocab_size).str)):
        if description[key] != value:
            message = f"{folder} was prepared with {key} {description[key]}, but this run uses {value}"
            raise ConfigError("data.path", message)
    return description


def _write(
    folder: Path, members: list[dict[str, str]], descriptions: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    splits, files = {}, {}
    with atomic_folder(folder) as unfinished:
        for split in SPLITS:
            tokens = 0
            with contextlib.closing(HashingFile(unfinished / f"{split}.documents")) as out:
                out.write(np.zeros(1, "<i8").data)
                for member in members:
                    store = open_store(Path(member["folder"]), split)
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
            "bad_documents": sum(d["bad_documents"] for d in descriptions),
            "targets": any(d["targets"] for d in descriptions),
            "files": files,
            "members": members,
        }
        (unfinished / "store.json").write_text(json.dumps(description, indent=1))
    logging.info(f"concatenated {len(members)} stores -> {folder}")

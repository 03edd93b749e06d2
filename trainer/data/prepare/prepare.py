"""Preparation of a token store from documents. It is parallel and resumable after a kill; an existing store is reused.

There are two passes. The first one tokenizes each shard of the source into its own files (tokenize.py, runs.py) and never
repeats a finished shard. The second one writes the documents of all shards in one shuffled order (shuffle.py). One rename then
makes the store appear.
"""

import contextlib
import errno
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trainer.config import ConfigError, DataConfig, TokenizerConfig
from trainer.data.prepare import fingerprint, tokenize
from trainer.data.prepare.encode import chat_format
from trainer.data.prepare.runs import ShardInfo, read_bad_documents, shard_file
from trainer.data.prepare.shuffle import write_split
from trainer.data.sources import BadDocument, Source, open_source
from trainer.data.store.concat import concat_stores
from trainer.data.store.store import SPLITS, VERSION, read_description, token_dtype
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.system import logging
from trainer.system.files import HashingFile, atomic_folder, file_lock


def prepare(
    data: DataConfig, tokenizer_config: TokenizerConfig, tokenizer: Tokenizer, file_shard: tuple[int, int] = (0, 1)
) -> Path:
    """Return the folder of the token store of a dataset under a tokenizer; build the store if it does not exist.

    tokenizer: loaded from tokenizer_config, from which worker processes load it again. file_shard: (i, n) selects every n-th
    file from file i on, for one of n nodes. Raises ConfigError if the source has no documents or too many bad documents, or
    if the store cannot be written.
    """
    stores = Path(data.store_folder)
    with writing(stores):
        stores.mkdir(parents=True, exist_ok=True)
        if data.dataset == "prepared":
            with file_lock(stores / "stores.lock"):
                folder = concat_stores(data, tokenizer)
        else:
            source = _file_shard(open_source(data, tokenizer), *file_shard)
            folder = stores / f"{data.dataset}-{_key(source, data, tokenizer, stores)}"
            if not folder.exists():
                with file_lock(folder.with_suffix(".lock")):
                    if not folder.exists():
                        return _build(source, data, tokenizer_config, tokenizer, folder)
    tokenize.check_bad_documents(data, read_description(folder)["bad_documents"], _bad_documents(folder))
    return folder


def _file_shard(source: Source, index: int, num_shards: int) -> Source:
    files = source.files[index::num_shards]
    if not files:
        raise ConfigError("data.path", f"has {len(source.files)} files, too few for {num_shards} shards")
    return replace(source, files=files)


@contextlib.contextmanager
def writing(stores: Path) -> Iterator[None]:
    """Context that raises a ConfigError about data.store_folder if a file below it cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError("data.store_folder", f"cannot be written ({error.strerror})") from None
        if error.filename is None or not Path(error.filename).is_relative_to(stores):
            raise
        raise ConfigError("data.store_folder", f"cannot be written ({error.strerror}: {error.filename})") from None


def _key(source: Source, data: DataConfig, tokenizer: Tokenizer, stores: Path) -> str:
    """Return a hash of the names and contents of the files, the tokenizer, and every setting that affects the store."""
    shape = [data.dataset, data.text_field, data.token_dtype, data.max_document_bytes, data.held_out_fraction]
    chat = chat_format(data, tokenizer).fingerprint if data.dataset == "chat" else ""
    return fingerprint.fingerprint(source, [VERSION, *shape, chat, tokenizer.fingerprint, tokenize.SHARD_BYTES], stores)


def _bad_documents(folder: Path) -> Iterator[BadDocument]:
    """Yield the bad documents of a store, or of all its members."""
    members = [Path(member["folder"]) for member in read_description(folder)["members"]]
    for store in members or [folder]:
        with (store / "bad_documents.jsonl").open() as file:
            yield from (BadDocument(**json.loads(line)) for line in file)


def _build(
    source: Source, data: DataConfig, tokenizer_config: TokenizerConfig, tokenizer: Tokenizer, folder: Path
) -> Path:
    shard_folder = folder.with_name(f"{folder.name}.tmp-shards")
    shard_folder.mkdir(exist_ok=True)
    total = sum(os.path.getsize(path) for path in source.files)
    logging.info(f"preparing {data.dataset}: {len(source.files)} files, {total / 1e6:.1f} MB -> {folder}")
    job = tokenize.TokenizeJob(source, data, tokenizer_config, shard_folder)
    shards = tokenize.tokenize_shards(job, tokenizer, total)
    _require_documents(job, shards)

    dtype = token_dtype(tokenizer.vocab_size)
    tokens = sum(run.tokens for shard in shards for run in shard.runs)
    with atomic_folder(folder) as unfinished:
        with logging.progress(tokens, " tokens", "shuffling") as bar:
            written = {s: write_split(unfinished, s, shard_folder, shards, dtype, bar.update) for s in SPLITS}
        with contextlib.closing(HashingFile(unfinished / "bad_documents.jsonl")) as out:
            for i in range(len(shards)):
                with shard_file(shard_folder, i, "bad_documents").open("rb") as file:
                    shutil.copyfileobj(file, out)
        files = {"bad_documents.jsonl": out.close()}
        for _, split_files in written.values():
            files |= split_files
        description = {
            "version": VERSION,
            "dataset": data.dataset,
            "dtype": dtype.str,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": tokenizer.fingerprint,
            "splits": {split: counts for split, (counts, _) in written.items()},
            "bad_documents": sum(shard.bad_documents for shard in shards),
            "targets": "train.targets" in files,
            "files": files,
            "members": [],
        }
        (unfinished / "store.json").write_text(json.dumps(description, indent=1))
    shutil.rmtree(shard_folder)
    _log_store(folder, description)
    return folder


def _require_documents(job: tokenize.TokenizeJob, shards: list[ShardInfo]) -> None:
    if any(shard.runs for shard in shards):
        return
    bad_documents = itertools.chain.from_iterable(read_bad_documents(job.folder, i) for i in range(len(shards)))
    first = next(bad_documents, None)
    reason = str(first) if first else f"{len(job.source.files)} files of blank lines"
    raise ConfigError("data.path", f"contains no readable document; {reason}")


def _log_store(folder: Path, description: dict) -> None:
    if count := description["bad_documents"]:
        first = next(_bad_documents(folder))
        logging.warning(f"skipped {count} bad documents, listed in {folder}/bad_documents.jsonl; the first: {first}")
    train = description["splits"]["train"]
    logging.info(f"prepared {train['documents']} documents, {train['tokens']} tokens for training")

"""Preparation of a token store from documents. It is parallel, and resumes if it was killed. An existing store is reused.

The first pass tokenizes each chunk of the source into its own files (tokenize.py, runs.py) and never repeats a finished chunk.
The second pass writes the documents of all chunks in one shuffled order (shuffle.py). Then the folder of the complete store is
renamed to its final name.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.base.config import ConfigError, DataConfig, TokenizerConfig
from trainer.base.config.schema.data import CHAT_DATASETS
from trainer.base.system import console
from trainer.base.system.files import HashingFile, atomic_folder, creation_error, file_lock
from trainer.base.system.spelling import counted
from trainer.data.chat.fields import PLAIN_TEXT
from trainer.data.chat.format import ChatFormat
from trainer.data.prepare import fingerprint, tokenize
from trainer.data.prepare.encode import COLUMNS, chat_format
from trainer.data.prepare.limits import Counts, check_number, check_share
from trainer.data.prepare.runs import Chunk, chunk_file, read_bad_documents
from trainer.data.prepare.shuffle import write_split
from trainer.data.sources import BadDocument, Source, open_source
from trainer.data.store.store import (
    SPLITS,
    VERSION,
    concat_stores,
    member_folders,
    most_frequent,
    read_description,
    token_dtype,
    write_description,
)
from trainer.data.tokenizer.protocol import Tokenizer


def prepare(
    data: DataConfig, tokenizer_config: TokenizerConfig, tokenizer: Tokenizer, file_shard: tuple[int, int] = (0, 1)
) -> Path:
    """Return the token store folder for a dataset and a tokenizer. Build the store if it does not exist.

    Args:
        tokenizer: The tokenizer that tokenizer_config describes. Each worker process loads its own copy.
        file_shard: (i, n) selects every n-th file, starting with file i, so that n nodes can share the work.

    Raises:
        ConfigError: The source has no documents or too many bad ones, or the store cannot be written.
    """
    stores = Path(data.store_folder)
    require_store_folder(stores)
    with writing(stores):
        if data.dataset == "prepared":
            folder = concat_stores(data, tokenizer)
        else:
            source, key, not_cached = locate(data, tokenizer, file_shard)
            folder = store_folder(data, key)
            # A complete store may be in a folder that cannot be written: it needs no lock.
            if not folder.exists():
                with file_lock(folder.with_suffix(".lock")):
                    if not folder.exists():
                        with _removing_chunks_of_refused_data(folder):
                            _build(source, data, tokenizer_config, tokenizer, folder, key)
            elif _chunk_folder(folder).exists():  # a preparation was killed when the store was already complete
                with contextlib.suppress(OSError), file_lock(folder.with_suffix(".lock")):
                    shutil.rmtree(_chunk_folder(folder), ignore_errors=True)
            if not_cached:
                message = (
                    f"{stores} cannot be written ({not_cached}), so that each start reads all files of the dataset"
                )
                console.warning(message)
    counts = _counts(read_description(folder))
    check_number(data, counts, bad_documents(folder))
    check_share(data, counts, bad_documents(folder))
    return folder


def locate(data: DataConfig, tokenizer: Tokenizer, file_shard: tuple[int, int] = (0, 1)) -> tuple[Source, str, str]:
    """Return the source of a dataset, the key of its store, which need not exist, and the reason why new digests of the files
    could not be cached, or "". Raises ConfigError."""
    source = open_source(data, tokenizer)
    files = source.files[file_shard[0] :: file_shard[1]]
    if not files:
        message = (
            f"this dataset has {counted(len(source.files), 'file')}, too few for {counted(file_shard[1], 'shard')}"
        )
        raise ConfigError("data.path", message)
    source = replace(source, files=files)
    return source, *_key(source, data, tokenizer, _chat_format(data, tokenizer), Path(data.store_folder))


def store_folder(data: DataConfig, key: str) -> Path:
    return Path(data.store_folder) / f"{data.dataset}-{key}"


def require_store_folder(stores: Path) -> None:
    """Raise ConfigError if a folder for stores neither exists nor can be created. That of complete stores may be read-only."""
    if not stores.is_dir() and (problem := creation_error(stores)):
        raise ConfigError("data.store_folder", problem)


@contextlib.contextmanager
def writing(stores: Path) -> Iterator[None]:
    """Context manager that raises a ConfigError about data.store_folder if a file in this folder cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ConfigError("data.store_folder", f"this folder cannot be written ({error.strerror})") from None
        if error.filename is None or not Path(error.filename).is_relative_to(stores):
            raise
        raise ConfigError(
            "data.store_folder", f"this folder cannot be written ({error.strerror}: {error.filename})"
        ) from None


def _chunk_folder(folder: Path) -> Path:
    """Return the folder for the chunks of a store that is being built."""
    return folder.with_name(f"{folder.name}.tmp-chunks")


@contextlib.contextmanager
def _removing_chunks_of_refused_data(folder: Path) -> Iterator[None]:
    """Context manager that removes the chunks of a store if its documents are refused: after a correction of the data they would
    not be used. Otherwise, such as after an interrupt, on a full disk or if a worker was killed, the next start continues with
    them."""
    try:
        yield
    except ConfigError as error:
        if error.key != "data.prepare_workers":
            shutil.rmtree(_chunk_folder(folder), ignore_errors=True)
        raise


def _chat_format(data: DataConfig, tokenizer: Tokenizer) -> ChatFormat | None:
    """Return the chat format of a dataset of conversations, or None."""
    return chat_format(data, tokenizer) if data.dataset in CHAT_DATASETS else None


def _key(
    source: Source, data: DataConfig, tokenizer: Tokenizer, chat_format: ChatFormat | None, stores: Path
) -> tuple[str, str]:
    """Return a hash of the names and contents of the files, the tokenizer, and every setting that affects the store. Also return
    the reason why the digests of the files could not be cached, or ""."""
    shape = [data.dataset, data.text_field, data.token_dtype, data.max_document_bytes, data.held_out_fraction]
    chat = "" if chat_format is None else chat_format.fingerprint
    if data.dataset in CHAT_DATASETS and data.columns:
        shape.append(dict(sorted(data.columns.items())))
    return fingerprint.fingerprint(source, [VERSION, *shape, chat, tokenizer.fingerprint, tokenize.CHUNK_BYTES], stores)


def bad_documents(folder: Path) -> Iterator[BadDocument]:
    """Yield the bad documents of a store or, if it is a concatenation of stores, of all its members."""
    return read_bad_documents(store / "bad_documents.jsonl" for store in member_folders(folder) or [folder])


def _counts(description: dict[str, Any]) -> Counts:
    documents = sum(description["splits"][split]["documents"] for split in SPLITS)
    # Stores of earlier versions of the trainer have no numbers of files.
    return Counts(
        documents, description["bad_documents"], description.get("files_read", 0), description.get("damaged_files", 0)
    )


def _build(
    source: Source,
    data: DataConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: Tokenizer,
    folder: Path,
    key: str,
) -> None:
    """Build a store. key: the result of `_key`."""
    chunk_folder = _chunk_folder(folder)
    chunk_folder.mkdir(exist_ok=True)
    total = sum(os.path.getsize(path) for path in source.files)
    console.info(f"preparing {data.dataset}: {counted(len(source.files), 'file')}, {total / 1e6:.1f} MB -> {folder}")
    job = tokenize.TokenizeJob(source, data, tokenizer_config, chunk_folder)
    chunks = tokenize.tokenize_chunks(job, tokenizer, total)
    if _key(source, data, tokenizer, _chat_format(data, tokenizer), folder.parent)[0] != key:
        newest = max(source.files, key=lambda path: os.stat(path).st_ctime_ns)
        message = f"the dataset has changed while it was prepared: {newest} is the file that changed last; start again"
        raise ConfigError("data.path", message)
    bad_documents = [chunk_file(chunk_folder, i, "bad_documents") for i in range(len(chunks))]
    counts = Counts(
        documents=sum(chunk.documents for chunk in chunks),
        bad_documents=sum(chunk.bad_documents for chunk in chunks),
        files=len(source.files),
        damaged_files=sum(chunk.damaged_files for chunk in chunks),
    )
    if not counts.documents:
        first = next(
            read_bad_documents(bad_documents),
            f"{counted(len(source.files), 'file')} ({counted(total, 'byte')}) without a document",
        )
        raise ConfigError("data.path", f"this dataset contains no readable document; found {first}")
    check_share(data, counts, read_bad_documents(bad_documents))
    _write_store(data, tokenizer, folder, chunk_folder, chunks, counts)
    shutil.rmtree(chunk_folder)
    _log_store(folder, data)


def _write_store(
    data: DataConfig, tokenizer: Tokenizer, folder: Path, chunk_folder: Path, chunks: list[Chunk], counts: Counts
) -> None:
    """Write the second pass: the documents of all chunks in one shuffled order, and the description of the store."""
    dtype = token_dtype(tokenizer.vocab_size)
    tokens = sum(run.tokens for chunk in chunks for run in chunk.runs)
    with atomic_folder(folder) as unfinished:
        with console.progress(tokens, " tokens", "shuffling") as bar:
            written = {s: write_split(unfinished, s, chunk_folder, chunks, dtype, bar.update) for s in SPLITS}
        with contextlib.closing(HashingFile(unfinished / "bad_documents.jsonl")) as out:
            for i in range(len(chunks)):
                with chunk_file(chunk_folder, i, "bad_documents").open("rb") as file:
                    shutil.copyfileobj(file, out)
        files = {"bad_documents.jsonl": out.close()}
        for _, split_files in written.values():
            files |= split_files
        write_description(
            unfinished,
            data.dataset,
            tokenizer,
            splits={split: split_counts for split, (split_counts, _) in written.items()},
            bad_documents=counts.bad_documents,
            files_read=counts.files,
            damaged_files=counts.damaged_files,
            unused_fields=most_frequent(chunk.unused_fields for chunk in chunks),
            targets="train.targets" in files,
            files=files,
            members=[],
        )


def unused_fields(folder: Path, data: DataConfig) -> list[str]:
    """Return one line for each kind of fields that were not used for a store: those without a meaning, those of
    data.ignored_fields, and entries of data.ignored_fields and data.columns that no document has."""
    description = read_description(folder)
    counts, documents = description.get("unused_fields", {}), _counts(description).documents
    shown = [n for n in counts if not n.startswith(COLUMNS) and n != PLAIN_TEXT]
    shown.sort(key=lambda name: (-counts[name], name))
    ignored = [name for name in shown if name in data.ignored_fields]
    others = [name for name in shown if name not in data.ignored_fields]
    missing = [name for name in data.ignored_fields if name not in counts]
    used = {name: counted(number, "document") for name, number in counts.items()}
    lines = [
        f"{title}: {', '.join(f'{name} ({used[name]})' for name in names)}"
        for title, names in (
            ("fields that were not used", others),
            ("fields that data.ignored_fields removed", ignored),
        )
        if names
    ]
    if plain := counts.get(PLAIN_TEXT):
        lines.append(f"{counted(plain, 'document')} of {PLAIN_TEXT}")
    absent = [name for ours, name in data.columns.items() if counts.get(f"{COLUMNS}{ours}") == documents]
    for setting, fields in (("data.ignored_fields", missing), ("data.columns", absent)):
        if fields:
            lines.append(f"no document has these fields of {setting}: {', '.join(fields)}")
    return lines


def _log_store(folder: Path, data: DataConfig) -> None:
    description = read_description(folder)
    if count := description["bad_documents"]:
        first = next(bad_documents(folder))
        console.warning(
            f"skipped {counted(count, 'bad document')}, listed in {folder}/bad_documents.jsonl; the first: {first}"
        )
    for line in unused_fields(folder, data):
        console.info(line)
    train = description["splits"]["train"]
    console.info(
        f"prepared {counted(train['documents'], 'document')}, {counted(train['tokens'], 'token')} for training"
    )


def renders_chats(store: Path) -> bool:
    """Return whether a chat template has rendered documents of a store. Prompts and answers of plain text need none."""
    description = read_description(store)
    is_chat = description["dataset"] in CHAT_DATASETS
    return is_chat and description.get("unused_fields", {}).get(PLAIN_TEXT, 0) < _counts(description).documents

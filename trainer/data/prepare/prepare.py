"""Documents -> token store: by all cores, resumable after a kill, and found again by content and tokenizer.

Two passes. First every part of the source is tokenized into files of its own (tokenize.py, parts.py); a finished part is
never done again. Then the documents of all parts are written in one shuffled order (shuffle.py), and the folder is renamed
into its place.
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
from trainer.data.prepare.runs import ShardInfo, part_file, problems_of
from trainer.data.prepare.shuffle import write_split
from trainer.data.sources import BadDocument, Source, open_source
from trainer.data.store.concat import join
from trainer.data.store.store import SPLITS, VERSION, read_description, token_dtype
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.system import logging
from trainer.system.files import HashingFile, atomic_folder, file_lock
from trainer.system.progress import progress


def prepare(
    data: DataConfig, tokenizer_config: TokenizerConfig, tokenizer: Tokenizer, share: tuple[int, int] = (0, 1)
) -> Path:
    """The folder of the token store of this dataset under this tokenizer, made if it is not there.

    tokenizer: loaded from its config, which goes to the worker processes. share: (i, n): of the source's files, take every
    n-th from the i-th on only, as one of n machines. Raises ConfigError where the source has no documents, or more problems
    than allowed, or the store cannot be written.
    """
    stores = Path(data.store_folder)
    with writing(stores):
        stores.mkdir(parents=True, exist_ok=True)
        if data.dataset == "prepared":
            with file_lock(stores / "stores.lock"):
                folder = join(data, tokenizer)
        else:
            source = _share(open_source(data, tokenizer), *share)
            folder = stores / f"{data.dataset}-{_key(source, data, tokenizer, stores)}"
            if not folder.exists():
                with file_lock(folder.with_suffix(".lock")):
                    if not folder.exists():
                        return _build(source, data, tokenizer_config, tokenizer, folder)
    tokenize.check_bad_documents(data, read_description(folder)["skipped"], _listed(folder))
    return folder


def _share(source: Source, number: int, shares: int) -> Source:
    files = source.files[number::shares]
    if not files:
        raise ConfigError("data.path", f"names {len(source.files)} files, too few for {shares} shares")
    return replace(source, files=files)


@contextlib.contextmanager
def writing(stores: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError("data.store_folder", f"cannot be written ({error.strerror})") from None
        if error.filename is None or not Path(error.filename).is_relative_to(stores):
            raise
        raise ConfigError("data.store_folder", f"cannot be written ({error.strerror}: {error.filename})") from None


def _key(source: Source, data: DataConfig, tokenizer: Tokenizer, stores: Path) -> str:
    """Changes with the content or the names of the files, the tokenizer, and every setting that shapes the store."""
    shape = [data.dataset, data.text_field, data.token_dtype, data.max_document_bytes, data.held_out_fraction]
    chat = chat_format(data, tokenizer).fingerprint if data.dataset == "chat" else ""
    return fingerprint.fingerprint(source, [VERSION, *shape, chat, tokenizer.fingerprint, tokenize.PART_BYTES], stores)


def _listed(folder: Path) -> Iterator[BadDocument]:
    """Of a store, or of those it is made of."""
    members = [Path(member["folder"]) for member in read_description(folder)["stores"]]
    for store in members or [folder]:
        with (store / "problems.jsonl").open() as file:
            yield from (BadDocument(**json.loads(line)) for line in file)


# ---------------------------------------------------------------- made once


def _build(
    source: Source, data: DataConfig, tokenizer_config: TokenizerConfig, tokenizer: Tokenizer, folder: Path
) -> Path:
    partial = folder.with_name(f"{folder.name}.tmp-shards")
    partial.mkdir(exist_ok=True)
    total = sum(os.path.getsize(path) for path in source.files)
    logging.info(f"preparing {data.dataset}: {len(source.files)} files, {total / 1e6:.1f} MB -> {folder}")
    parts = tokenize.tokenize_all(tokenize.TokenizeJob(source, data, tokenizer_config, partial), tokenizer, total)
    _require_documents(source, partial, parts)

    dtype = token_dtype(tokenizer.vocab_size)
    tokens = sum(run.tokens for part in parts for run in part.runs)
    with atomic_folder(folder) as unfinished:
        with progress(tokens, " tokens", "shuffling") as bar:
            written = {split: write_split(unfinished, split, partial, parts, dtype, bar.update) for split in SPLITS}
        with contextlib.closing(HashingFile(unfinished / "problems.jsonl")) as out:
            for number in range(len(parts)):
                with part_file(partial, number, "problems").open("rb") as file:
                    shutil.copyfileobj(file, out)
        files = {"problems.jsonl": out.close()}
        for _, of_split in written.values():
            files |= of_split
        description = {
            "version": VERSION,
            "dataset": data.dataset,
            "dtype": dtype.str,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": tokenizer.fingerprint,
            "splits": {split: counts for split, (counts, _) in written.items()},
            "skipped": sum(part.problems for part in parts),
            "targets": "train.targets" in files,
            "files": files,
            "stores": [],
        }
        (unfinished / "store.json").write_text(json.dumps(description, indent=1))
    shutil.rmtree(partial)
    _tell(folder, description)
    return folder


def _require_documents(source: Source, partial: Path, parts: list[ShardInfo]) -> None:
    if any(part.runs for part in parts):
        return
    problems = itertools.chain.from_iterable(problems_of(partial, number) for number in range(len(parts)))
    first = next(problems, None)
    why = str(first) if first else f"{len(source.files)} files of blank lines"
    raise ConfigError("data.path", f"holds no readable document; {why}")


def _tell(folder: Path, description: dict) -> None:
    if description["skipped"]:
        first = next(_listed(folder))
        logging.warning(
            f"documents left out: {description['skipped']}, listed in {folder}/problems.jsonl; the first: {first}"
        )
    train = description["splits"]["train"]
    logging.info(f"prepared {train['documents']} documents, {train['tokens']} tokens for training")

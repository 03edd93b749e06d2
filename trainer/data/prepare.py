"""Documents -> token store: by all cores, resumable after a kill, and found again by content and tokenizer.

Two passes. First every part of the source is tokenized into a file of its own; a finished part is never done again.
Then the documents of all parts are written in one shuffled order, and the folder is renamed into its place.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from trainer import logging
from trainer.config import ConfigError, DataConfig, TokenizerConfig
from trainer.data.order import permute
from trainer.data.sources import Problem, Source, Span, open_source
from trainer.data.store import SPLITS, VERSION, token_dtype
from trainer.data.tokenizers import Tokenizer, load_tokenizer
from trainer.system import cores, sync, write_durably

PART_BYTES = 4 * 2**20
"""Text of one part: the unit of parallel work, and what a kill can lose."""

_SHUFFLE_KEY = 0x6D657368
"""The order of documents in a store is a property of the store, not of a run."""


def prepare(data: DataConfig, tokenizer_config: TokenizerConfig, tokenizer: Tokenizer) -> Path:
    """The folder of the token store of this dataset under this tokenizer, made if it is not there.

    tokenizer: loaded from its config, which goes to the worker processes. Raises ConfigError where the source has no
    documents, or the store cannot be written.
    """
    source = open_source(data)
    stores = Path(data.store_folder)
    try:
        stores.mkdir(parents=True, exist_ok=True)
        folder = stores / f"{data.dataset}-{_key(source, data, tokenizer, stores)}"
        if folder.exists():
            return folder
        with _lock(folder.with_suffix(".lock")):
            if not folder.exists():
                _build(source, data, tokenizer_config, tokenizer, folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError("data.store_folder", f"cannot be written ({error.strerror})") from None
        if error.filename is None or not Path(error.filename).is_relative_to(stores):
            raise
        raise ConfigError("data.store_folder", f"cannot be written ({error.strerror}: {error.filename})") from None
    return folder


# ---------------------------------------------------------------- identity


def _key(source: Source, data: DataConfig, tokenizer: Tokenizer, stores: Path) -> str:
    """Changes with the content or the names of the files, the tokenizer, and every setting that shapes the store."""
    field = data.text_field if data.dataset == "jsonl" else ""
    shape = [VERSION, data.dataset, field, data.held_out_fraction, tokenizer.fingerprint, PART_BYTES]
    names = [path.relative_to(source.root).as_posix() for path in source.files]
    content = list(zip(names, _digests(source.files, stores / "digests.json"), strict=True))
    return hashlib.sha256(json.dumps([shape, content]).encode()).hexdigest()[:16]


def _digests(files: Sequence[Path], cache: Path) -> list[str]:
    """sha256 of each file. A file whose size and time of change are those of the last look is not read again."""
    try:
        known = dict(json.loads(cache.read_text()))
    except (FileNotFoundError, ValueError, TypeError):  # a cache: what cannot be read is made anew
        known = {}
    digests = {}
    names = [str(path.resolve()) for path in files]
    for name, path in zip(names, files, strict=True):
        stat = path.stat()
        entry = known.get(name)
        if not isinstance(entry, list) or len(entry) != 3 or entry[:2] != [stat.st_size, stat.st_mtime_ns]:
            entry = [stat.st_size, stat.st_mtime_ns, _sha256(path)]
        digests[name] = entry
    if any(known.get(path) != entry for path, entry in digests.items()):
        _write_atomically(cache, json.dumps(known | digests))
    return [digests[name][2] for name in names]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    except OSError as error:
        raise ConfigError("data.path", f"{path} cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def _write_atomically(path: Path, text: str) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(path)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process of this machine at a time; the system frees it when the process ends in any way."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------- first pass: parts


@dataclass(frozen=True)
class _Work:
    """What a worker process needs; travels to it once."""

    source: Source
    tokenizer: TokenizerConfig
    held_out_fraction: float
    folder: Path


def _parts(source: Source) -> list[list[Span]]:
    """Spans of about PART_BYTES together, in the order of the files."""
    parts: list[list[Span]] = [[]]
    room = PART_BYTES
    for path in source.files:
        size = path.stat().st_size
        step = PART_BYTES if source.splittable else max(size, 1)
        for start in range(0, max(size, 1), step):  # an empty file too, so that it is counted
            span = Span(path, start, min(start + step, size))
            if parts[-1] and span.stop - span.start > room:
                parts.append([])
                room = PART_BYTES
            parts[-1].append(span)
            room -= span.stop - span.start
    return [part for part in parts if part]


_worker: tuple[_Work, Tokenizer] | None = None


def _start_worker(work: _Work) -> None:
    # A worker process keeps its tokenizer from part to part; a process pool offers no other place for it.
    global _worker
    _worker = (work, load_tokenizer(work.tokenizer))


def _tokenize_in_worker(number: int, spans: list[Span]) -> int:
    assert _worker is not None
    return _tokenize(*_worker, number, spans)


def _tokenize(work: _Work, tokenizer: Tokenizer, number: int, spans: list[Span]) -> int:
    """Write part `number`; returns the bytes of text that it was made from."""
    target = _part_file(work.folder, number)
    text_bytes = sum(span.stop - span.start for span in spans)
    if _is_whole(target):
        return text_bytes
    tokens: list[np.ndarray] = []
    held_out: list[bool] = []
    problems: list[tuple[str, str]] = []
    dtype = token_dtype(tokenizer.vocab_size)
    for span in spans:
        for document in work.source.read(span):
            if isinstance(document, Problem):
                problems.append((document.where, document.reason))
            elif not document:
                problems.append((str(span.path), "empty"))
            else:
                tokens.append(np.array([tokenizer.bos, *tokenizer.encode(document), tokenizer.eos], dtype))
                held_out.append(_is_held_out(document, work.held_out_fraction))
    aside = target.with_suffix(".aside.npz")
    np.savez(
        aside,
        tokens=np.concatenate(tokens) if tokens else np.empty(0, dtype),
        lengths=np.array([len(t) for t in tokens], np.int64),
        held_out=np.array(held_out, bool),
        problems=np.array(problems, np.str_).reshape(-1, 2),
    )
    sync(aside)
    aside.replace(target)
    return text_bytes


def _is_whole(part: Path) -> bool:
    """A part that is damaged, or empty, is made again."""
    try:
        with np.load(part):
            return True
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return False


def _part_file(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}.npz"


def _is_held_out(document: str, fraction: float) -> bool:
    """By content: equal documents fall on the same side, wherever they stand."""
    digest = hashlib.blake2b(document.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def _tokenize_all(work: _Work, tokenizer: Tokenizer, parts: list[list[Span]], processes: int) -> None:
    total = sum(span.stop - span.start for part in parts for span in part)
    bar = tqdm(
        total=total, unit="B", unit_scale=True, desc="tokenizing", disable=not logging.on_terminal(), leave=False
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(bar)
        if min(processes, len(parts)) == 1:
            done = (_tokenize(work, tokenizer, *job) for job in enumerate(parts))
        else:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(min(processes, len(parts)), context, _start_worker, (work,)))
            done = pool.map(_tokenize_in_worker, range(len(parts)), parts)
        for text_bytes in done:
            bar.update(text_bytes)


# ---------------------------------------------------------------- second pass: one shuffled order


def _build(
    source: Source, data: DataConfig, tokenizer_config: TokenizerConfig, tokenizer: Tokenizer, folder: Path
) -> None:
    partial = folder.with_suffix(".partial")
    partial.mkdir(exist_ok=True)
    parts = _parts(source)
    logging.info(f"preparing {data.dataset}: {len(source.files)} files, {len(parts)} parts -> {folder}")
    processes = data.prepare_processes or cores()
    _tokenize_all(_Work(source, tokenizer_config, data.held_out_fraction, partial), tokenizer, parts, processes)

    final = partial / "store"
    if final.exists():
        shutil.rmtree(final)
    final.mkdir()
    documents = [_read_part(partial, number, "lengths", "held_out", "problems") for number in range(len(parts))]
    lengths = [part_lengths for part_lengths, _, _ in documents]
    held_out = np.concatenate([part_held_out for _, part_held_out, _ in documents])
    problems = [tuple(map(str, row)) for _, _, rows in documents for row in rows]
    if not held_out.size:
        first = ": ".join(problems[0]) if problems else f"{len(source.files)} files of blank lines"
        raise ConfigError("data.path", f"holds no readable document; {first}")
    splits = {
        "train": _write_split(final, "train", partial, lengths, ~held_out, tokenizer),
        "held_out": _write_split(final, "held_out", partial, lengths, held_out, tokenizer),
    }
    assert tuple(splits) == SPLITS
    description = {
        "version": VERSION,
        "dataset": data.dataset,
        "dtype": token_dtype(tokenizer.vocab_size).str,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "splits": splits,
        "skipped": len(problems),
    }
    write_durably(final / "store.json", json.dumps(description, indent=1))
    for path in (*final.iterdir(), final):
        sync(path)
    final.rename(folder)
    shutil.rmtree(partial)
    if problems:
        where, reason = problems[0]
        logging.warning(f"documents left out: {len(problems)}; the first: {where}: {reason}")
    train = splits["train"]
    logging.info(f"prepared {train['documents']} documents, {train['tokens']} tokens for training")


def _read_part(folder: Path, number: int, *names: str) -> list[np.ndarray]:
    with np.load(_part_file(folder, number)) as part:
        return [part[name] for name in names]


def _write_split(
    final: Path, split: str, partial: Path, lengths: list[np.ndarray], chosen: np.ndarray, tokenizer: Tokenizer
) -> dict:
    """Write the chosen documents in a shuffled order. lengths: of the documents of each part; chosen: (all documents,)."""
    sizes = np.concatenate(lengths)
    members = np.flatnonzero(chosen)
    order = members[permute(np.arange(len(members)), len(members), _SHUFFLE_KEY)] if len(members) else members
    offsets = np.concatenate([[0], np.cumsum(sizes[order])]).astype("<i8")
    offsets.tofile(final / f"{split}.documents")
    place = np.full(len(sizes), -1)  # (all documents,): where each goes, -1 for the other split's
    place[order] = offsets[:-1]
    counts = {"tokens": int(offsets[-1]), "documents": len(members)}
    path = final / f"{split}.tokens"
    path.touch()
    if not counts["tokens"]:
        return counts
    # Part by part, each document straight to its place: memory stays at one part, whatever the corpus.
    target = np.memmap(path, token_dtype(tokenizer.vocab_size), mode="w+", shape=(counts["tokens"],))
    first = 0
    for number, part in enumerate(lengths):
        (tokens,) = _read_part(partial, number, "tokens")
        ends = np.cumsum(part)
        for end, size, to in zip(ends, part, place[first : first + len(part)], strict=True):
            if to >= 0:
                target[to : to + size] = tokens[end - size : end]
        first += len(part)
    target.flush()
    return counts

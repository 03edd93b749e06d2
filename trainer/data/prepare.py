"""Documents -> token store: by all cores, resumable after a kill, and found again by content and tokenizer.

Two passes. First every part of the source is tokenized into files of its own (parts.py); a finished part is never done
again. Then the documents of all parts are written in one shuffled order (shuffle.py), and the folder is renamed into its
place.
"""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from trainer import logging
from trainer.config import ConfigError, DataConfig, TokenizerConfig
from trainer.data import corpus
from trainer.data.encode import ENCODERS, Encode, chat_format
from trainer.data.joined import join
from trainer.data.parts import Part, PartWriter, part_file, problems_of, read_part
from trainer.data.shuffle import write_split
from trainer.data.sources import Document, Problem, Source, Span, open_source
from trainer.data.store import SPLITS, VERSION, Encoded, read_description, token_dtype
from trainer.data.tokenizer import Tokenizer
from trainer.data.tokenizers import load_tokenizer
from trainer.manifest import digest_of
from trainer.system import cores, die_with_parent, leave_signals_to_parent, sync, write_durably

PART_BYTES = 4 * 2**20
_LARGEST_PART_BYTES = 2**28
_MOST_PARTS = 1024
"""Bytes of the source in one part: the unit of parallel work, and what a kill can lose. Parts grow, up to the largest, before
there are more of them."""

_SHOWN_PROBLEMS = 3


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
        if data.dataset == "stores":
            with _lock(stores / "stores.lock"):
                folder = join(data, tokenizer)
        else:
            source = _share(open_source(data, tokenizer), *share)
            folder = stores / f"{data.dataset}-{_key(source, data, tokenizer, stores)}"
            if not folder.exists():
                with _lock(folder.with_suffix(".lock")):
                    if not folder.exists():
                        return _build(source, data, tokenizer_config, tokenizer, folder)
    require_few(data, read_description(folder)["skipped"], _listed(folder))
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
    return corpus.fingerprint(source, [VERSION, *shape, chat, tokenizer.fingerprint, PART_BYTES], stores)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process of this machine at a time; the system frees it when the process ends in any way."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------- problems


def allowed_problems(data: DataConfig) -> int:
    return data.max_problems if data.on_problem == "skip" else 0


def require_few(data: DataConfig, count: int, first: Iterator[Problem]) -> None:
    """Raises ConfigError where there are more problems than the run was set to take, with the first of them."""
    if count <= allowed_problems(data):
        return
    key = "data.max_problems" if data.on_problem == "skip" else "data.on_problem"
    shown = "; ".join(map(str, itertools.islice(first, _SHOWN_PROBLEMS)))
    raise ConfigError(key, f"documents that cannot be read: {count} or more, the first: {shown}")


def _listed(folder: Path) -> Iterator[Problem]:
    """Of a store, or of those it is made of."""
    members = [Path(member["folder"]) for member in read_description(folder)["stores"]]
    for store in members or [folder]:
        with (store / "problems.jsonl").open() as file:
            yield from (Problem(**json.loads(line)) for line in file)


# ---------------------------------------------------------------- first pass: parts


@dataclass(frozen=True)
class _Work:
    """What a worker process needs; travels to it once."""

    source: Source
    data: DataConfig
    tokenizer: TokenizerConfig
    folder: Path


def _part_bytes(total: int) -> int:
    return max(PART_BYTES, min(total // _MOST_PARTS, _LARGEST_PART_BYTES))


def _parts(source: Source, part_bytes: int) -> Iterator[list[Span]]:
    """Spans of about part_bytes together, in the order of the files."""
    part: list[Span] = []
    room = part_bytes
    for path in source.files:
        for span in source.spans(path, os.path.getsize(path), part_bytes):
            if part and span.stop - span.start > room:
                yield part
                part, room = [], part_bytes
            part.append(span)
            room -= span.stop - span.start
    if part:
        yield part


_worker: tuple[_Work, Tokenizer, Encode] | None = None


def _start_worker(work: _Work) -> None:
    # A worker process keeps its tokenizer from part to part; a process pool offers no other place for it.
    global _worker
    leave_signals_to_parent()
    die_with_parent()  # else it would wait for work without end
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # it was too late to ask for that
        raise SystemExit
    tokenizer = load_tokenizer(work.tokenizer)
    _worker = (work, tokenizer, ENCODERS[work.data.dataset](work.data, tokenizer))


def _tokenize_in_worker(number: int, spans: list[Span]) -> tuple[int, int]:
    assert _worker is not None
    return _tokenize(*_worker, number, spans)


def _tokenize(work: _Work, tokenizer: Tokenizer, encode: Encode, number: int, spans: list[Span]) -> tuple[int, int]:
    """Write part `number`; returns the bytes that it was made from, and its problems. With more of them than the run is set to
    take it ends there, and is not finished."""
    size = sum(span.stop - span.start for span in spans)
    part = read_part(work.folder, number, verify=True)
    if part is not None:
        return size, part.problems
    allowed = allowed_problems(work.data)

    def take(document: Document) -> tuple[Encoded, bool]:
        return encode(document), _is_held_out(document, work.data.held_out_fraction)

    writer = PartWriter(work.folder, number, token_dtype(tokenizer.vocab_size))
    with contextlib.closing(writer):
        for span in spans:
            for taken in _read(work.source, span, take):
                if not isinstance(taken, Problem):
                    writer.add(*taken)
                    continue
                writer.add_problem(taken)
                if writer.problems > allowed:
                    return size, writer.problems
        writer.finish()
    return size, writer.problems


def _read(source: Source, span: Span, take: Callable[[Document], tuple[Encoded, bool]]) -> Iterator:
    found = source.read(span, take)
    while True:
        try:
            document = next(found)
        except StopIteration:
            return
        except OSError as error:
            if error.filename != span.path:
                raise
            raise ConfigError("data.path", f"{span.path} cannot be read ({error.strerror})") from None
        yield document


def _is_held_out(document: Document, fraction: float) -> bool:
    """By content: equal documents fall on the same side, wherever they stand, and whatever the tokenizer."""
    if isinstance(document, str):
        content = document.encode("utf-8", "surrogatepass")
    elif isinstance(document, np.ndarray):
        content = document.astype("<u4").tobytes()
    else:
        content = json.dumps(document, sort_keys=True).encode()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def _tokenize_all(work: _Work, tokenizer: Tokenizer, total: int) -> list[Part]:
    """Every part, in order. Raises ConfigError at the first problem that is one too many."""
    jobs = enumerate(_parts(work.source, _part_bytes(total)))
    first = list(itertools.islice(jobs, 2))
    processes = (work.data.prepare_processes or cores()) if len(first) > 1 else 1
    jobs = itertools.chain(first, jobs)
    parts: list[Part] = []
    problems = 0
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(_bar(total, "B", "tokenizing"))
        if processes == 1:
            encode = ENCODERS[work.data.dataset](work.data, tokenizer)
            done = (_tokenize(work, tokenizer, encode, *job) for job in jobs)
        else:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(processes, context, _start_worker, (work,)))
            done = _in_order(pool, jobs, ahead=4 * processes)
        for number, (size, found) in enumerate(done):
            problems += found
            if problems > allowed_problems(work.data):
                seen = itertools.chain.from_iterable(problems_of(work.folder, n) for n in range(number + 1))
                require_few(work.data, problems, seen)
            part = read_part(work.folder, number, verify=False)
            assert part is not None
            parts.append(part)
            bar.update(size)
    return parts


def _bar(total: int, unit: str, what: str) -> tqdm:
    return tqdm(total=total, unit=unit, unit_scale=True, desc=what, disable=not logging.on_terminal(), leave=False)


def _in_order(
    pool: ProcessPoolExecutor, jobs: Iterator[tuple[int, list[Span]]], ahead: int
) -> Iterator[tuple[int, int]]:
    """Results of the jobs. Only so many are handed over ahead: a corpus may have more of them than memory."""
    waiting = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(_tokenize_in_worker, *job))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        rule = "a process that prepares was killed, for want of memory perhaps: fewer of them need less"
        raise ConfigError("data.prepare_processes", rule) from None
    finally:
        for job in waiting:
            job.cancel()


# ---------------------------------------------------------------- second pass: one shuffled order


def _build(
    source: Source, data: DataConfig, tokenizer_config: TokenizerConfig, tokenizer: Tokenizer, folder: Path
) -> Path:
    partial = folder.with_suffix(".partial")
    partial.mkdir(exist_ok=True)
    total = sum(os.path.getsize(path) for path in source.files)
    logging.info(f"preparing {data.dataset}: {len(source.files)} files, {total / 1e6:.1f} MB -> {folder}")
    parts = _tokenize_all(_Work(source, data, tokenizer_config, partial), tokenizer, total)
    _require_documents(source, partial, parts)

    final = partial / "store"
    if final.exists():
        shutil.rmtree(final)
    final.mkdir()
    dtype = token_dtype(tokenizer.vocab_size)
    tokens = sum(run.tokens for part in parts for run in part.runs)
    with _bar(tokens, " tokens", "shuffling") as bar:
        written = {split: write_split(final, split, partial, parts, dtype, bar.update) for split in SPLITS}
    with (final / "problems.jsonl").open("wb") as out:
        for number in range(len(parts)):
            with part_file(partial, number, "problems").open("rb") as file:
                shutil.copyfileobj(file, out)
    listed = final / "problems.jsonl"
    files = {"problems.jsonl": {"size": listed.stat().st_size, "digest": digest_of(listed)}}
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
    write_durably(final / "store.json", json.dumps(description, indent=1))
    for path in (*final.iterdir(), final):
        sync(path)
    final.rename(folder)
    shutil.rmtree(partial)
    _tell(folder, description)
    return folder


def _require_documents(source: Source, partial: Path, parts: list[Part]) -> None:
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

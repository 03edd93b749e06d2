"""First pass of preparing a token store: every part of the source is tokenized, by all cores, into files of its own."""

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.config import ConfigError, DataConfig, TokenizerConfig
from trainer.data.prepare.encode import ENCODERS, Encode
from trainer.data.prepare.runs import ShardInfo, ShardWriter, problems_of, read_part
from trainer.data.sources import BadDocument, Document, Source, Span
from trainer.data.store.store import Encoded, token_dtype
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.system.process import cores, detach_signals
from trainer.system.progress import progress

PART_BYTES = 4 * 2**20
_LARGEST_PART_BYTES = 2**28
_MOST_PARTS = 1024
"""Bytes of the source in one part: the unit of parallel work, and what a kill can lose. Parts grow, up to the largest, before
there are more of them."""

_SHOWN_PROBLEMS = 3


def allowed_problems(data: DataConfig) -> int:
    return data.max_bad_documents if data.on_bad_document == "skip" else 0


def check_bad_documents(data: DataConfig, count: int, first: Iterator[BadDocument]) -> None:
    """Raises ConfigError where there are more problems than the run was set to take, with the first of them."""
    if count <= allowed_problems(data):
        return
    key = "data.max_bad_documents" if data.on_bad_document == "skip" else "data.on_bad_document"
    shown = "; ".join(map(str, itertools.islice(first, _SHOWN_PROBLEMS)))
    raise ConfigError(key, f"documents that cannot be read: {count} or more, the first: {shown}")


# ---------------------------------------------------------------- one part


@dataclass(frozen=True)
class TokenizeJob:
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


_worker: tuple[TokenizeJob, Tokenizer, Encode] | None = None


def _start_worker(work: TokenizeJob) -> None:
    # A worker process keeps its tokenizer from part to part; a process pool offers no other place for it.
    global _worker
    detach_signals()
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # it was too late to ask for that
        raise SystemExit
    tokenizer = load_tokenizer(work.tokenizer)
    _worker = (work, tokenizer, ENCODERS[work.data.dataset](work.data, tokenizer))


def _tokenize_in_worker(number: int, spans: list[Span]) -> tuple[int, int]:
    assert _worker is not None
    return _tokenize(*_worker, number, spans)


def _tokenize(
    work: TokenizeJob, tokenizer: Tokenizer, encode: Encode, number: int, spans: list[Span]
) -> tuple[int, int]:
    """Write part `number`; returns the bytes that it was made from, and its problems. With more of them than the run is set to
    take it ends there, and is not finished."""
    size = sum(span.stop - span.start for span in spans)
    part = read_part(work.folder, number, verify=True)
    if part is not None:
        return size, part.problems
    allowed = allowed_problems(work.data)

    def take(document: Document) -> tuple[Encoded, bool]:
        return encode(document), _is_held_out(document, work.data.held_out_fraction)

    writer = ShardWriter(work.folder, number, token_dtype(tokenizer.vocab_size))
    with contextlib.closing(writer):
        for span in spans:
            for taken in _read(work.source, span, take):
                if not isinstance(taken, BadDocument):
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


# ---------------------------------------------------------------- all of them


def tokenize_all(work: TokenizeJob, tokenizer: Tokenizer, total: int) -> list[ShardInfo]:
    """Every part, in order. Raises ConfigError at the first problem that is one too many."""
    jobs = enumerate(_parts(work.source, _part_bytes(total)))
    first = list(itertools.islice(jobs, 2))
    processes = (work.data.prepare_workers or cores()) if len(first) > 1 else 1
    jobs = itertools.chain(first, jobs)
    parts: list[ShardInfo] = []
    problems = 0
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(progress(total, "B", "tokenizing"))
        if processes == 1:
            encode = ENCODERS[work.data.dataset](work.data, tokenizer)
            done = (_tokenize(work, tokenizer, encode, *job) for job in jobs)
        else:
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(processes, context, _start_worker, (work,))
            # Not as a context manager: at Ctrl-C that would wait for the parts that are being tokenized.
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            done = _in_order(pool, jobs, ahead=4 * processes)
        for number, (size, found) in enumerate(done):
            problems += found
            if problems > allowed_problems(work.data):
                seen = itertools.chain.from_iterable(problems_of(work.folder, n) for n in range(number + 1))
                check_bad_documents(work.data, problems, seen)
            part = read_part(work.folder, number, verify=False)
            assert part is not None
            parts.append(part)
            bar.update(size)
    return parts


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
        raise ConfigError("data.prepare_workers", rule) from None
    finally:
        for job in waiting:
            job.cancel()

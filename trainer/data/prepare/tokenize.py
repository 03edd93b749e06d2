"""First pass of preparing a token store: worker processes tokenize each chunk of the corpus into its own files."""

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

from trainer.base.config import ConfigError, DataConfig, TokenizerConfig
from trainer.base.system.children import children_ignore_signals, exit_with_parent, for_pool
from trainer.base.system.console import progress
from trainer.base.system.paths import unreadable
from trainer.base.system.process import cores
from trainer.base.system.signals import detach_signals
from trainer.data.prepare.encode import encoder
from trainer.data.prepare.limits import Counts, allowed_bad_documents, check_number
from trainer.data.prepare.runs import Chunk, chunk_file, read_bad_documents, read_chunk, write_chunk
from trainer.data.sources import BadDocument, Document, Source, Span
from trainer.data.store.store import Encoded, token_dtype
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.data.tokenizer.protocol import Tokenizer

CHUNK_BYTES = 4 * 2**20
_MAX_CHUNK_BYTES = 2**28
_MAX_CHUNKS = 1024
"""Approximate maximum number of chunks, unless chunks would then exceed _MAX_CHUNK_BYTES of the source. A chunk is the unit of
parallel work. If the process is killed, only the chunks in progress are lost."""

Encode = Callable[[Document], Encoded]


# ---------------------------------------------------------------- one chunk


@dataclass(frozen=True)
class TokenizeJob:
    """The inputs that all chunks share. Each worker process receives them once."""

    source: Source
    data: DataConfig
    tokenizer: TokenizerConfig
    folder: Path


def _chunks(source: Source, chunk_bytes: int) -> Iterator[list[Span]]:
    """Yield each chunk's list of spans, in the order of the files. chunk_bytes: approximate total size of a chunk's spans."""
    chunk: list[Span] = []
    remaining = chunk_bytes
    for path in source.files:
        for span in source.spans(path, os.path.getsize(path), chunk_bytes):
            if chunk and span.stop - span.start > remaining:
                yield chunk
                chunk, remaining = [], chunk_bytes
            chunk.append(span)
            remaining -= span.stop - span.start
    if chunk:
        yield chunk


_worker: tuple[TokenizeJob, Tokenizer, Encode] | None = None


def _start_worker(job: TokenizeJob) -> None:
    # A worker process reuses its tokenizer from chunk to chunk. A process pool can keep it only in a global variable.
    global _worker
    detach_signals()
    exit_with_parent()  # also if the parent ended before detach_signals was called
    tokenizer = load_tokenizer(job.tokenizer)
    _worker = (job, tokenizer, encoder(job.data, tokenizer))


def _tokenize_in_worker(index: int, spans: list[Span]) -> tuple[int, Chunk]:
    assert _worker is not None
    return _tokenize(*_worker, index, spans)


def _tokenize(
    job: TokenizeJob, tokenizer: Tokenizer, encode: Encode, index: int, spans: list[Span]
) -> tuple[int, Chunk]:
    """Tokenize and write a chunk unless it is already finished. Returns the number of bytes in its spans, and the chunk."""
    chunk = read_chunk(job.folder, index)
    if chunk is None:
        results, dtype = _results(job, encode, spans), token_dtype(tokenizer.vocab_size)
        chunk = write_chunk(job.folder, index, dtype, results, allowed_bad_documents(job.data))
    return sum(span.stop - span.start for span in spans), chunk


def _results(job: TokenizeJob, encode: Encode, spans: list[Span]) -> Iterator[tuple[Encoded, bool] | BadDocument]:
    """Yield, in document order, either (encoded document, whether it is held out) or a bad document."""

    def transform(document: Document) -> tuple[Encoded, bool]:
        return encode(document), _is_held_out(document, job.data.held_out_fraction)

    for span in spans:
        try:
            yield from job.source.read(span, transform)
        except OSError as error:
            if error.filename != span.path:
                raise
            raise ConfigError("data.path", unreadable(error)) from None


def _is_held_out(document: Document, fraction: float) -> bool:
    """Return whether a document is held out. The hash of its content decides, so that equal documents are in the same split."""
    if isinstance(document, str):
        content = document.encode("utf-8", "surrogatepass")
    elif isinstance(document, np.ndarray):
        content = document.astype("<u4").tobytes()
    else:
        content = json.dumps(document, sort_keys=True).encode()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


# ---------------------------------------------------------------- all chunks


def tokenize_chunks(job: TokenizeJob, tokenizer: Tokenizer, total: int) -> list[Chunk]:
    """Tokenize all chunks and return them in order. total: size of the source in bytes. Raises ConfigError as soon as there are
    more bad documents than allowed."""
    chunk_bytes = max(CHUNK_BYTES, min(total // _MAX_CHUNKS, _MAX_CHUNK_BYTES))
    tasks = enumerate(_chunks(job.source, chunk_bytes))
    first = list(itertools.islice(tasks, 2))
    num_workers = (job.data.prepare_workers or cores()) if len(first) > 1 else 1
    tasks = itertools.chain(first, tasks)
    chunks: list[Chunk] = []
    documents = bad_documents = 0
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(progress(total, "B", "tokenizing"))
        if num_workers == 1:
            encode = encoder(job.data, tokenizer)
            results = (_tokenize(job, tokenizer, encode, *task) for task in tasks)
        else:
            context = for_pool(multiprocessing.get_context("spawn"))
            pool = ProcessPoolExecutor(num_workers, context, _start_worker, (job,))
            # Of refused documents, the chunks are removed, so no worker may still write one. After Ctrl-C nothing is waited for.
            stack.push(lambda kind, *_: pool.shutdown(wait=kind is ConfigError, cancel_futures=True))
            results = _in_order(pool, tasks, max_pending=4 * num_workers)
        for num_bytes, chunk in results:
            chunks.append(chunk)
            documents += chunk.documents
            bad_documents += chunk.bad_documents
            listed = (chunk_file(job.folder, i, "bad_documents") for i in range(len(chunks)))
            check_number(job.data, Counts(documents, bad_documents), read_bad_documents(listed))
            bar.update(num_bytes)
    return chunks


def _in_order(
    pool: ProcessPoolExecutor, tasks: Iterator[tuple[int, list[Span]]], max_pending: int
) -> Iterator[tuple[int, Chunk]]:
    """Yield the results of the tasks in order. max_pending: maximum number of pending tasks, to bound memory."""
    pending = deque()
    try:
        for task in tasks:
            with children_ignore_signals():  # the pool starts a worker when no worker is idle
                pending.append(pool.submit(_tokenize_in_worker, *task))
            if len(pending) > max_pending:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        pool.shutdown()  # Python would otherwise wait when it exits, and Ctrl-C would print a traceback
    except BrokenProcessPool:
        message = "a worker process was killed, possibly for lack of memory; use fewer workers"
        raise ConfigError("data.prepare_workers", message) from None
    finally:
        for future in pending:
            future.cancel()

"""Chunks of a store under construction. A chunk contains the tokenized documents of one section of the source. They are stored
in sorted runs, as in an external sort. A sorted run is a list of documents that fits in memory and is sorted by random key.

    chunk-000000.runs           for each sorted run: keys (uint64), lengths (int64), tokens, and targets (uint8) if any
    chunk-000000.bad_documents  bad documents, one JSON object per line
    chunk-000000.json           index of the sorted runs and digests of the files. It is written last, when the chunk is finished

These files are not synced to disk. After a power cut, the digests identify incomplete chunks, which are then rewritten.
"""

import bisect
import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trainer.base.system.files import HashingFile, atomic_write, digest_of, read_json_object
from trainer.data.sampling.permutation import hash_index
from trainer.data.sources import BadDocument
from trainer.data.store.store import SPLITS, Encoded

_FILES = ("runs", "bad_documents")
_RUN_TOKENS = 2**24
"""Number of tokens in memory at which sorted runs are written. With _RUN_DOCUMENTS, it bounds the memory of a worker process."""
_RUN_DOCUMENTS = 2**17
"""Number of documents in memory at which sorted runs are written."""

_SHUFFLE_KEY = 0x6D657368
"""Key of the random order of documents. It is constant, so that the order does not depend on the training seed."""


@dataclass(frozen=True)
class SortedRun:
    """Documents of one split in a .runs file, sorted by random key."""

    split: str
    offset: int
    """Byte offset of the run in the file."""
    documents: int
    tokens: int
    has_targets: bool


@dataclass(frozen=True)
class Chunk:
    """Content of a finished chunk."""

    runs: tuple[SortedRun, ...]
    documents: int
    bad_documents: int
    damaged_files: int
    """Number of files of which a part could not be read. Each is also a bad document."""
    unused_fields: Mapping[str, int]
    """Name -> number of the documents that have this field, which was not used."""


def chunk_file(folder: Path, index: int, suffix: str) -> Path:
    return folder / f"chunk-{index:06d}.{suffix}"


def read_chunk(folder: Path, index: int) -> Chunk | None:
    """Return a finished chunk, or None if the chunk is unfinished or its files do not match their digests."""
    try:
        values = read_json_object(chunk_file(folder, index, "json"))
        for suffix in _FILES:
            path = chunk_file(folder, index, suffix)
            if values["files"][suffix] != {"size": path.stat().st_size, "digest": digest_of(path)}:
                return None
        runs = tuple(SortedRun(*run) for run in values["runs"])
        return Chunk(
            runs, values["documents"], values["bad_documents"], values["damaged_files"], values["unused_fields"]
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_bad_documents(paths: Iterable[Path]) -> Iterator[BadDocument]:
    for path in paths:
        with path.open() as file:
            yield from (BadDocument(**json.loads(line)) for line in file)


def write_chunk(
    folder: Path,
    index: int,
    dtype: np.dtype,
    results: Iterable[tuple[Encoded, bool] | BadDocument],
    max_bad_documents: int,
) -> Chunk:
    """Write a chunk. results: in source order, either (document, whether it is held out) or a bad document. If there are more
    than max_bad_documents bad documents, the chunk remains unfinished and is returned without runs."""
    chunk_file(folder, index, "json").unlink(missing_ok=True)
    runs_file, bad_file = (HashingFile(chunk_file(folder, index, suffix)) for suffix in _FILES)
    runs: list[SortedRun] = []
    documents: list[tuple[Encoded, bool]] = []
    tokens = read = bad_documents = damaged_files = 0
    unused_fields: Counter[str] = Counter()
    with contextlib.closing(runs_file), contextlib.closing(bad_file):
        for result in results:
            if isinstance(result, BadDocument):
                bad_file.write(json.dumps(asdict(result)).encode() + b"\n")
                bad_documents += 1
                damaged_files += result.ends_file
                if bad_documents > max_bad_documents:
                    return Chunk((), read, bad_documents, damaged_files, unused_fields)
                continue
            read += 1
            document, held_out = result
            documents.append((Encoded(document.tokens.astype(dtype), document.targets), held_out))
            tokens += len(document.tokens)
            unused_fields.update(document.unused_fields)
            if tokens >= _RUN_TOKENS or len(documents) >= _RUN_DOCUMENTS:
                runs += _write_runs(runs_file, index, sum(run.documents for run in runs), documents)
                documents, tokens = [], 0
        runs += _write_runs(runs_file, index, sum(run.documents for run in runs), documents)
    values = {
        "runs": [astuple(run) for run in runs],
        "documents": read,
        "bad_documents": bad_documents,
        "damaged_files": damaged_files,
        "unused_fields": unused_fields,
        "files": {"runs": runs_file.close(), "bad_documents": bad_file.close()},
    }
    atomic_write(chunk_file(folder, index, "json"), json.dumps(values), durable=False)
    return Chunk(tuple(runs), read, bad_documents, damaged_files, unused_fields)


def _write_runs(file: HashingFile, chunk: int, first: int, documents: list[tuple[Encoded, bool]]) -> list[SortedRun]:
    """Write one sorted run for each split that has documents. first: index of documents[0] in the chunk."""
    keys = hash_index(np.arange(first, first + len(documents)), _SHUFFLE_KEY, chunk)
    order = np.argsort(keys, kind="stable")
    runs = []
    for split in SPLITS:
        selected = [i for i in order if documents[i][1] == (split == "held_out")]
        if not selected:
            continue
        encoded = [documents[i][0] for i in selected]
        offset = file.size
        lengths = np.array([len(document.tokens) for document in encoded], "<i8")
        file.write(keys[selected].astype("<u8").data)
        file.write(lengths.data)
        for document in encoded:
            file.write(document.tokens.data)
        has_targets = any(document.targets is not None for document in encoded)
        for document in encoded if has_targets else ():
            mask = np.ones(len(document.tokens), np.uint8) if document.targets is None else document.targets
            file.write(mask.astype(np.uint8).data)
        runs.append(SortedRun(split, offset, len(encoded), int(lengths.sum()), has_targets))
    return runs


class RunReader:
    """Reader of the documents of a sorted run, in the order of their keys."""

    def __init__(self, run: SortedRun, dtype: np.dtype):
        self._run, self._dtype = run, dtype
        self._lengths = run.offset + 8 * run.documents
        self._tokens = self._lengths + 8 * run.documents
        self._targets = self._tokens + dtype.itemsize * run.tokens
        self._document = self._token = 0  # indices of the next document and token to read

    def read_below(self, file: BinaryIO, limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Read the next documents with keys below `limit`. Return keys, lengths, tokens and targets. file: the .runs file."""

        def key(document: int) -> int:
            return int.from_bytes(os.pread(file.fileno(), 8, self._run.offset + 8 * document), "little")

        first = self._document
        last = bisect.bisect_left(range(self._run.documents), limit, lo=first, key=key)
        keys = _read(file, self._run.offset + 8 * first, "<u8", last - first)
        lengths = _read(file, self._lengths + 8 * first, "<i8", last - first)
        count = int(lengths.sum())
        tokens = _read(file, self._tokens + self._dtype.itemsize * self._token, self._dtype, count)
        targets = _read(file, self._targets + self._token, "u1", count) if self._run.has_targets else None
        self._document, self._token = last, self._token + count
        return keys, lengths, tokens, targets


def _read(file: BinaryIO, offset: int, dtype: np.dtype | str, count: int) -> np.ndarray:
    file.seek(offset)
    return np.fromfile(file, dtype, count)

"""Parts of a store in the making: the documents of a piece of the source, tokenized, in runs that are sorted by the place
that chance gives each document. Every run fits in memory, so a part may be larger than that.

    part-000000.runs      for each run and split: keys (uint64), lengths (int64), tokens, and targets (uint8) where there are
    part-000000.problems  documents left out, one JSON object on each line
    part-000000.json      written last: what stands where, and digests; a part without it was never finished

Nothing waits for the disk here: after a power cut, a part that has not come to it is told by its digests and made again.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainer.data.sampling.permutation import hash_index
from trainer.data.sources import BadDocument
from trainer.data.store.store import SPLITS, Encoded
from trainer.system.files import HashingFile, atomic_write, digest_of, read_json_object

_FILES = ("runs", "problems")
_RUN_TOKENS = 2**24
_RUN_DOCUMENTS = 2**17
"""A run ends when it has so many: what a process that prepares keeps in memory."""

_SHUFFLE_KEY = 0x6D657368
"""The order of documents in a store is a property of the store, not of a run."""


@dataclass(frozen=True)
class SortedRun:
    """Documents of one split, sorted by key, in a .runs file."""

    split: str
    offset: int
    """Byte at which it begins."""
    documents: int
    tokens: int
    targets: bool


@dataclass(frozen=True)
class ShardInfo:
    """What is in a finished part, and how large its files are."""

    runs: tuple[SortedRun, ...]
    problems: int
    files: Mapping[str, Mapping[str, Any]]
    """Size and digest of the .runs and the .problems file."""


def part_file(folder: Path, number: int, suffix: str) -> Path:
    return folder / f"part-{number:06d}.{suffix}"


def read_part(folder: Path, number: int, verify: bool) -> ShardInfo | None:
    """A part that is finished; one that is not is made again. verify: only if its files are as they were written."""
    try:
        values = read_json_object(part_file(folder, number, "json"))
        part = ShardInfo(tuple(SortedRun(*run) for run in values["runs"]), values["problems"], values["files"])
        for suffix in _FILES if verify else ():
            path = part_file(folder, number, suffix)
            if part.files[suffix] != {"size": path.stat().st_size, "digest": digest_of(path)}:
                return None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return part


def problems_of(folder: Path, number: int) -> Iterator[BadDocument]:
    with part_file(folder, number, "problems").open() as file:
        for line in file:
            yield BadDocument(**json.loads(line))


class ShardWriter:
    """Takes the documents of a part in their order."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype):
        self.problems = 0
        self._folder, self._number, self._dtype = folder, number, dtype
        part_file(folder, number, "json").unlink(missing_ok=True)
        self._runs, self._problems = (HashingFile(part_file(folder, number, suffix)) for suffix in _FILES)
        self._written: list[SortedRun] = []
        self._taken = 0  # documents before those that wait
        self._documents: list[Encoded] = []
        self._held_out: list[bool] = []
        self._tokens = 0

    def add(self, document: Encoded, held_out: bool) -> None:
        self._documents.append(Encoded(document.tokens.astype(self._dtype), document.targets))
        self._held_out.append(held_out)
        self._tokens += len(document.tokens)
        if self._tokens >= _RUN_TOKENS or len(self._documents) >= _RUN_DOCUMENTS:
            self._write_runs()

    def add_problem(self, problem: BadDocument) -> None:
        self._problems.write(json.dumps(asdict(problem)).encode() + b"\n")
        self.problems += 1

    def _write_runs(self) -> None:
        keys = hash_index(self._taken + np.arange(len(self._documents)), _SHUFFLE_KEY, self._number)
        held_out = np.array(self._held_out, bool)
        for split, chosen in zip(SPLITS, (~held_out, held_out), strict=True):
            members = np.flatnonzero(chosen)
            members = members[np.argsort(keys[members], kind="stable")]
            if len(members):
                self._write_run(split, keys[members], [self._documents[i] for i in members])
        self._taken += len(self._documents)
        self._documents, self._held_out, self._tokens = [], [], 0

    def _write_run(self, split: str, keys: np.ndarray, documents: list[Encoded]) -> None:
        offset = self._runs.size
        lengths = np.array([len(document.tokens) for document in documents], "<i8")
        self._runs.write(keys.astype("<u8").data)
        self._runs.write(lengths.data)
        for document in documents:
            self._runs.write(document.tokens.data)
        targets = any(document.targets is not None for document in documents)
        for document in documents if targets else ():
            mask = np.ones(len(document.tokens), np.uint8) if document.targets is None else document.targets
            self._runs.write(mask.astype(np.uint8).data)
        self._written.append(SortedRun(split, offset, len(documents), int(lengths.sum()), targets))

    def close(self) -> None:
        """Without finish, the part was never there."""
        self._runs.close()
        self._problems.close()

    def finish(self) -> None:
        self._write_runs()
        values = {
            "runs": [astuple(run) for run in self._written],
            "problems": self.problems,
            "files": {"runs": self._runs.close(), "problems": self._problems.close()},
        }
        atomic_write(part_file(self._folder, self._number, "json"), json.dumps(values), durable=False)


class RunReader:
    """A run, from which documents are taken in the order of their keys."""

    def __init__(self, run: SortedRun, dtype: np.dtype):
        self._run, self._dtype = run, dtype
        self._lengths = run.offset + 8 * run.documents
        self._tokens = self._lengths + 8 * run.documents
        self._targets = self._tokens + dtype.itemsize * run.tokens
        self._document = self._token = 0  # the next one

    def take(self, file: BinaryIO, below: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Keys, lengths, tokens and targets of the documents that are left whose key is smaller. file: the part's .runs."""
        first, last = self._document, self._find(file, below)
        keys = _read(file, self._run.offset + 8 * first, "<u8", last - first)
        lengths = _read(file, self._lengths + 8 * first, "<i8", last - first)
        count = int(lengths.sum())
        tokens = _read(file, self._tokens + self._dtype.itemsize * self._token, self._dtype, count)
        targets = _read(file, self._targets + self._token, "u1", count) if self._run.targets else None
        self._document, self._token = last, self._token + count
        return keys, lengths, tokens, targets

    def _find(self, file: BinaryIO, below: int) -> int:
        """The first document that is left whose key is not smaller; by halving, with a few small reads."""
        low, high = self._document, self._run.documents
        while low < high:
            middle = (low + high) // 2
            if int.from_bytes(os.pread(file.fileno(), 8, self._run.offset + 8 * middle), "little") < below:
                low = middle + 1
            else:
                high = middle
        return low


def _read(file: BinaryIO, offset: int, dtype: np.dtype | str, count: int) -> np.ndarray:
    file.seek(offset)
    return np.fromfile(file, dtype, count)

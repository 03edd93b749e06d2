"""Source of documents in token files that other tools wrote: .bin (nanoGPT, llm.c), .bin with .idx (Megatron) and .npy."""

import bisect
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from trainer.base.config import ConfigError, DataConfig
from trainer.data.sources.contents import endings_of
from trainer.data.sources.files import find_files
from trainer.data.sources.source import BadDocument, Source, Span, too_long
from trainer.data.sources.streams import ends_in
from trainer.data.tokenizer.protocol import Tokenizer

T = TypeVar("T")

_CHUNK_TOKENS = 2**20
"""Number of tokens that are searched for EOS at a time."""

_IDX_MAGIC = b"MMIDIDX\x00\x00"
_IDX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type, number of sequences, number of document boundaries
_IDX_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating-point types

_LLM_C_START = struct.Struct("<3i")  # magic, version, number of tokens; the header has 256 integers
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # (magic, version) -> type of the tokens
_LLM_C_HEADER_BYTES = 1024


def _error(message: str) -> ConfigError:
    return ConfigError("data.path", message)


@dataclass(frozen=True)
class _Index:
    """Content of a Megatron .idx file. Each document consists of consecutive sequences."""

    lengths: np.ndarray
    """Number of tokens of each sequence, shape (sequences,)."""
    pointers: np.ndarray
    """Byte offset of each sequence in the .bin file, shape (sequences,)."""
    boundaries: np.ndarray
    """Index of each document's first sequence, shape (documents + 1,). The last element is the number of sequences."""

    def start(self, document: int) -> int:
        """Return a document's byte offset. If all sequences are in earlier documents, return an offset beyond any file's end."""
        sequence = int(self.boundaries[document])
        return int(self.pointers[sequence]) if sequence < len(self.pointers) else 2**63


@dataclass(frozen=True)
class _TokenFile:
    tokens: np.ndarray
    """Memory-mapped token ids, shape (tokens,)."""
    start: int
    """Byte offset of the first token."""
    index: _Index | None

    def token_at(self, byte: int) -> int:
        """Return the index of the first token that begins at this byte or later."""
        return min(max(-((self.start - byte) // self.tokens.itemsize), 0), len(self.tokens))

    def byte_of(self, token: int) -> int:
        return self.start + token * self.tokens.itemsize


def _map(path: str, dtype: str, start: int) -> np.ndarray:
    """Map a file from byte `start` to its end."""
    num_bytes, item = os.path.getsize(path) - start, np.dtype(dtype).itemsize
    if num_bytes < 0:
        raise _error(f"{path} is truncated: it has {num_bytes + start} bytes, but its header alone has {start}")
    if num_bytes % item:
        name = np.dtype(dtype).name
        raise _error(f"{path} is truncated or does not hold {name}: {num_bytes} bytes are not a multiple of {item}")
    return np.memmap(path, dtype, "r", start, (num_bytes // item,)) if num_bytes else np.empty(0, dtype)


def _open(path: str, raw_dtype: str) -> _TokenFile:
    """Open a token file. Raises ConfigError if the file is not a valid token file."""
    if ends_in(path, ".npy"):
        return _open_npy(path)
    idx = _index_path(path)
    if os.path.exists(idx):
        index, dtype = _read_index(idx)
        return _TokenFile(_map(path, dtype, 0), 0, index)
    with open(path, "rb") as file:
        header = file.read(_LLM_C_START.size)
    magic, version, count = _LLM_C_START.unpack(header.ljust(_LLM_C_START.size, b"\0"))
    if dtype := _LLM_C.get((magic, version)):
        tokens = _map(path, dtype, _LLM_C_HEADER_BYTES)
        if len(tokens) != count:
            raise _error(f"{path} holds {len(tokens)} tokens, but its header states {count}")
        return _TokenFile(tokens, _LLM_C_HEADER_BYTES, None)
    return _TokenFile(_map(path, raw_dtype, 0), 0, None)


def _index_path(path: str) -> str:
    """Return the path of the index that belongs to a token file, whether it exists or not."""
    stem = os.path.splitext(path)[0]
    return next((file for ending in (".idx", ".IDX") if os.path.exists(file := stem + ending)), f"{stem}.idx")


def _open_npy(path: str) -> _TokenFile:
    try:
        with np.errstate(over="ignore"):  # a size beyond 2**63 bytes raises an exception too
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception:  # numpy evaluates the header as Python, which raises exceptions of many types
        tokens = None
    if not isinstance(tokens, np.memmap):  # a .npz archive is none
        raise _error(f"{path} is truncated, or it is not a .npy file of numbers (Python objects are never loaded)")
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        raise _error(f"{path}: expected one row of integers, found {tokens.dtype} of shape {tokens.shape}")
    if (num_bytes := os.path.getsize(path) - tokens.offset) != tokens.nbytes:
        raise _error(f"{path}: expected {tokens.nbytes} bytes of tokens, found {num_bytes}")
    return _TokenFile(tokens, tokens.offset, None)


def _read_index(path: str) -> tuple[_Index, str]:
    """Memory-map a Megatron .idx file. Return the index and the dtype of the tokens."""
    with open(path, "rb") as file:
        header = file.read(_IDX_HEADER.size)
    if len(header) < _IDX_HEADER.size or not header.startswith(_IDX_MAGIC):
        raise _error(f"{path} is not a Megatron index")
    _, version, code, sequences, boundaries = _IDX_HEADER.unpack(header)
    if version != 1 or code not in _IDX_TYPES:
        raise _error(f"{path} has Megatron version {version} and type {code}; expected version 1 and an integer type")
    num_bytes = os.path.getsize(path)
    expected = len(header) + 12 * sequences + 8 * boundaries
    if num_bytes not in (expected, expected + sequences):  # some files end with a mode for each sequence
        raise _error(
            f"{path} has {num_bytes} bytes, but {sequences} sequences and {boundaries} boundaries need {expected}"
        )
    arrays, start = [], len(header)
    for dtype, count in (("<i4", sequences), ("<i8", sequences), ("<i8", boundaries)):
        arrays.append(np.memmap(path, dtype, "r", start, (count,)) if count else np.empty(0, dtype))
        start += arrays[-1].nbytes
    return _Index(*arrays), _IDX_TYPES[code]


def _check_index(index: _Index, file: _TokenFile, path: str) -> None:
    ends = np.cumsum(index.lengths, dtype=np.int64) * file.tokens.itemsize
    starts = ends - index.lengths * file.tokens.itemsize
    if (index.lengths < 0).any() or (index.pointers != starts).any():
        raise _error(f"{path}: the sequences in its index are not contiguous")
    num_bytes = int(ends[-1]) if len(ends) else 0
    if num_bytes != file.tokens.nbytes:
        raise _error(f"{path} has {file.tokens.nbytes} bytes, but its index describes {num_bytes}")
    boundaries = index.boundaries
    covers_all = len(boundaries) and boundaries[0] == 0 and boundaries[-1] == len(ends)
    if not covers_all or (np.diff(boundaries) < 0).any():
        raise _error(f"{path}: the documents in its index do not cover its {len(ends)} sequences")


def _check_width(file: _TokenFile, path: str, vocab_size: int) -> None:
    """Raise ConfigError if uint32 tokens are read as uint16. This is assumed if every second uint16 is small."""
    sample = np.asarray(file.tokens[: 2**16])
    upper = sample[1::2]
    if sample.itemsize == 2 and len(upper) >= 32 and upper.max() <= (vocab_size - 1) >> 16 and sample[::2].any():
        message = f"{path} looks like uint32 data, because every second uint16 is at most {int(upper.max())}"
        raise ConfigError("data.token_dtype", message)


@dataclass(frozen=True)
class TokenFiles:
    """Reader of token files. If a file has an index, the index defines the documents. Otherwise, a document ends after an EOS."""

    raw_dtype: str
    eos: int
    vocab_size: int
    max_bytes: int

    def check(self, path: str) -> None:
        """Raise ConfigError for faults that can be found without reading all tokens."""
        file = _open(path, self.raw_dtype)
        if file.index is not None:
            _check_index(file.index, file, path)
        else:
            _check_width(file, path, self.vocab_size)

    def __call__(self, span: Span, transform: Callable[[np.ndarray], T]) -> Iterator[T | BadDocument]:
        file = _open(span.path, self.raw_dtype)
        documents = self._by_index(file, file.index, span) if file.index is not None else self._by_eos(file, span)
        for line, start, end in documents:
            if (end - start) * file.tokens.itemsize > self.max_bytes:
                reason = f"{too_long(self.max_bytes)} and begins at byte {file.byte_of(start)}"
                yield BadDocument(span.path, line, reason)
            elif start == end:
                yield BadDocument(span.path, line, "the document is empty")
            else:
                yield transform(self._checked(file, start, end, span.path))

    def _checked(self, file: _TokenFile, start: int, end: int, path: str) -> np.ndarray:
        document = np.asarray(file.tokens[start:end])
        if document.max() >= self.vocab_size or document.min() < 0:
            first = int(np.flatnonzero((document < 0) | (document >= self.vocab_size))[0])
            found = f"token {document[first]} at byte {file.byte_of(start + first)} (read as {document.dtype.name})"
            raise _error(f"{path}: {found} is outside the tokenizer's vocabulary of {self.vocab_size}")
        return document

    def _by_index(self, file: _TokenFile, index: _Index, span: Span) -> Iterator[tuple[int, int, int]]:
        """Yield (1-based number, first token's index, index after last token) for each document that begins in the span."""
        documents = range(len(index.boundaries) - 1)
        item, num_bytes = file.tokens.itemsize, file.tokens.nbytes
        for i in documents[bisect.bisect_left(documents, span.start, key=index.start) :]:
            start, end = min(index.start(i), num_bytes), min(index.start(i + 1), num_bytes)
            if start >= span.stop and span.stop < num_bytes:
                return
            yield i + 1, start // item, end // item

    def _by_eos(self, file: _TokenFile, span: Span) -> Iterator[tuple[int, int, int]]:
        """Yield (0 as number, first token's index, index after last token) for each document that begins in the span."""
        first, stop = file.token_at(span.start), file.token_at(span.stop)
        if first == stop:
            return
        start = None if first else 0
        for end in _document_ends(file.tokens, self.eos, first - 1 if first else 0):
            if start is not None:
                yield 0, start, end
            start = end
            if start >= stop:
                return


def _document_ends(tokens: np.ndarray, eos: int, first: int) -> Iterator[int]:
    """Yield the end index of each document from token `first` on. A document ends after an EOS or at the end of the file."""
    end = first
    for start in range(first, len(tokens), _CHUNK_TOKENS):
        for end in (np.flatnonzero(tokens[start : start + _CHUNK_TOKENS] == eos) + (start + 1)).tolist():
            yield end
    if end < len(tokens):
        yield len(tokens)


def tokens(config: DataConfig, tokenizer: Tokenizer) -> Source:
    root, files = find_files(config.path, config.dataset)
    endings = endings_of("tokens")
    wrong = next((file for file in files if not ends_in(file, endings)), None)
    if wrong is not None:
        raise _error(f"{wrong}: expected the name of a {' or '.join(endings)} file")
    dtype = {"uint16": "<u2", "uint32": "<u4"}[config.token_dtype]
    read = TokenFiles(dtype, tokenizer.eos, tokenizer.vocab_size, config.max_document_bytes)
    for path in files:
        read.check(path)
    indices = tuple(idx for path in files if os.path.exists(idx := _index_path(path)))
    return Source(root, files, True, read, auxiliary_files=indices)

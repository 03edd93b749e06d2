"""Documents from files of tokens that others have made: raw .bin (nanoGPT, llm.c), Megatron's .bin with .idx, and .npy."""

import bisect
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from trainer.config import ConfigError, DataConfig
from trainer.data.sources.files import matching
from trainer.data.sources.source import BadDocument, Source, Span, too_long
from trainer.data.tokenizer.protocol import Tokenizer

T = TypeVar("T")

_BLOCK = 2**20
"""Tokens that are looked at together."""

# What Megatron's .idx begins with, and its numbers of types; 6 and 7 are of fractions.
_IDX_MAGIC = b"MMIDIDX\x00\x00"
_IDX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type, sequences, document bounds
_IDX_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

# What llm.c's .bin begins with: (magic, version) -> type. 256 numbers, the third the count of tokens.
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
_LLM_C_BYTES = 1024


def _refuse(rule: str) -> ConfigError:
    return ConfigError("data.path", rule)


@dataclass(frozen=True)
class _Index:
    """Of Megatron: documents are made of sequences."""

    lengths: np.ndarray
    """(sequences,) tokens"""
    pointers: np.ndarray
    """(sequences,) first byte of each in the .bin"""
    bounds: np.ndarray
    """(documents + 1,) first sequence of each document, and the end of the last"""

    def begin(self, document: int) -> int:
        """First byte of a document; of the one behind the last, the end of the file."""
        sequence = int(self.bounds[document])
        return int(self.pointers[sequence]) if sequence < len(self.pointers) else 2**63


@dataclass(frozen=True)
class _Opened:
    tokens: np.ndarray
    """(tokens,), mapped"""
    start: int
    """Byte of the first token."""
    index: _Index | None

    def place(self, byte: int) -> int:
        """Number of the first token that begins at this byte or later."""
        return min(max(-((self.start - byte) // self.tokens.itemsize), 0), len(self.tokens))


def _map(path: str, dtype: str, start: int) -> np.ndarray:
    """The rest of a file from byte `start` on."""
    size, item = os.path.getsize(path) - start, np.dtype(dtype).itemsize
    if size % item:
        raise _refuse(f"{path}: {size} bytes of tokens are no multiple of {item}: truncated, or not {_name(dtype)}")
    return np.memmap(path, dtype, "r", start, (size // item,)) if size else np.empty(0, dtype)


def _name(dtype: str) -> str:
    return np.dtype(dtype).name


def _open(path: str, raw_dtype: str) -> _Opened:
    """Raises ConfigError for what is no file of tokens."""
    if path.endswith(".npy"):
        return _open_npy(path)
    idx = _index_of(path)
    if os.path.exists(idx):
        index, dtype = _read_index(idx)
        return _Opened(_map(path, dtype, 0), 0, index)
    with open(path, "rb") as file:
        head = np.frombuffer(file.read(12), "<i4")
    if len(head) == 3 and (dtype := _LLM_C.get((int(head[0]), int(head[1])))):
        tokens = _map(path, dtype, _LLM_C_BYTES)
        if len(tokens) != head[2]:
            raise _refuse(f"{path}: has {len(tokens)} tokens of the {head[2]} that its head names")
        return _Opened(tokens, _LLM_C_BYTES, None)
    return _Opened(_map(path, raw_dtype, 0), 0, None)


def _index_of(path: str) -> str:
    return path.removesuffix(".bin") + ".idx"


def _open_npy(path: str) -> _Opened:
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        with open(path, "rb") as file:
            shape, _, dtype = read_header[np.lib.format.read_magic(file)](file)
            start = file.tell()
    except OSError:
        raise
    except Exception:  # numpy reads the head as Python, and fails in as many ways
        raise _refuse(f"{path}: not a .npy file") from None
    if dtype.hasobject:
        raise _refuse(f"{path}: holds Python objects, which are never loaded")
    if dtype.kind not in "iu" or len(shape) != 1:
        raise _refuse(f"{path}: expected one row of integers, found {dtype} of shape {shape}")
    there = os.path.getsize(path) - start
    if there != shape[0] * dtype.itemsize:
        raise _refuse(f"{path}: has {there} bytes of tokens of {shape[0] * dtype.itemsize}")
    return _Opened(_map(path, dtype.str, start), start, None)


def _read_index(path: str) -> tuple[_Index, str]:
    """A Megatron .idx, mapped, and the type of its tokens."""
    with open(path, "rb") as file:
        head = file.read(_IDX_HEADER.size)
    if len(head) < _IDX_HEADER.size or not head.startswith(_IDX_MAGIC):
        raise _refuse(f"{path}: not a Megatron index")
    _, version, kind, sequences, bounds = _IDX_HEADER.unpack(head)
    if version != 1 or kind not in _IDX_TYPES:
        raise _refuse(f"{path}: a Megatron index of version {version} and type {kind}, which holds no tokens")
    size, item = os.path.getsize(path), len(head)
    if size not in (
        item + 12 * sequences + 8 * bounds,
        item + 13 * sequences + 8 * bounds,
    ):  # some have a mode for each
        raise _refuse(f"{path}: has {size} bytes, which {sequences} sequences and {bounds} bounds do not make")
    arrays = []
    for dtype, count in (("<i4", sequences), ("<i8", sequences), ("<i8", bounds)):
        arrays.append(np.memmap(path, dtype, "r", item, (count,)) if count else np.empty(0, dtype))
        item += arrays[-1].nbytes
    return _Index(*arrays), _IDX_TYPES[kind]


def _check_index(index: _Index, opened: _Opened, path: str) -> None:
    ends = np.cumsum(index.lengths, dtype=np.int64) * opened.tokens.itemsize
    whole = int(ends[-1]) if len(ends) else 0
    consecutive_skips = (index.lengths >= 0).all() and (
        index.pointers == ends - index.lengths * opened.tokens.itemsize
    ).all()
    if not consecutive_skips or whole != opened.tokens.nbytes:
        raise _refuse(f"{path}: has {opened.tokens.nbytes} bytes, but its index tells of {whole}")
    bounds = index.bounds
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(ends) or (np.diff(bounds) < 0).any():
        raise _refuse(f"{path}: the documents in its index do not cover its {len(ends)} sequences")


def _check_width(opened: _Opened, path: str, vocab_size: int) -> None:
    """Refuse uint32 that is read as uint16: every second number is the upper half of one, and as good as always 0."""
    sample = np.asarray(opened.tokens[: 2**16])
    upper = sample[1::2]
    if sample.itemsize == 2 and len(upper) >= 32 and upper.max() <= (vocab_size - 1) >> 16 and sample[::2].any():
        raise ConfigError(
            "data.token_dtype", f"{path}: every second number is {int(upper.max())} or less: it holds uint32"
        )


@dataclass(frozen=True)
class TokenFiles:
    """Documents end where an index says so, or behind each end-of-text token."""

    raw_dtype: str
    eos: int
    vocab_size: int
    max_bytes: int

    def check(self, path: str) -> None:
        """Raises ConfigError for what can be seen without reading all tokens."""
        opened = _open(path, self.raw_dtype)
        if opened.index is not None:
            _check_index(opened.index, opened, path)
        else:
            _check_width(opened, path, self.vocab_size)

    def __call__(self, span: Span, take: Callable[[np.ndarray], T]) -> Iterator[T | BadDocument]:
        opened = _open(span.path, self.raw_dtype)
        cut = self._by_index(opened, span) if opened.index is not None else self._by_end_of_text(opened, span)
        for number, begin, end in cut:
            if (end - begin) * opened.tokens.itemsize > self.max_bytes:
                at = opened.start + begin * opened.tokens.itemsize
                yield BadDocument(span.path, number, f"the document at byte {at} is {too_long(self.max_bytes)}")
            elif begin == end:
                yield BadDocument(span.path, number, "empty")
            else:
                yield take(self._checked(opened, begin, end, span.path))

    def _checked(self, opened: _Opened, begin: int, end: int, path: str) -> np.ndarray:
        document = np.asarray(opened.tokens[begin:end])
        if document.max() >= self.vocab_size or document.min() < 0:
            first = int(np.flatnonzero((document < 0) | (document >= self.vocab_size))[0])
            at = opened.start + (begin + first) * document.itemsize
            rule = f"token {document[first]} at byte {at} is none of the tokenizer's {self.vocab_size}"
            raise _refuse(f"{path}: {rule} (read as {document.dtype.name})")
        return document

    def _by_index(self, opened: _Opened, span: Span) -> Iterator[tuple[int, int, int]]:
        """(number, begin, end) of the documents that begin in the span, in tokens."""
        index = opened.index
        assert index is not None
        documents = range(len(index.bounds) - 1)
        item = opened.tokens.itemsize
        size = opened.tokens.nbytes
        for number in documents[bisect.bisect_left(documents, span.start, key=index.begin) :]:
            begin, end = min(index.begin(number), size), min(index.begin(number + 1), size)
            if begin >= span.stop and span.stop < size:
                return
            yield number + 1, begin // item, end // item

    def _by_end_of_text(self, opened: _Opened, span: Span) -> Iterator[tuple[int, int, int]]:
        """(0, begin, end) of the documents that begin in the span."""
        first, stop = opened.place(span.start), opened.place(span.stop)
        if first == stop:
            return
        begin = None if first else 0
        for end in _ends(opened.tokens, self.eos, first - 1 if first else 0):
            if begin is not None:
                yield 0, begin, end
            begin = end
            if begin >= stop:
                return


def _ends(tokens: np.ndarray, eos: int, first: int) -> Iterator[int]:
    """Where documents end, from token `first` on: behind each end-of-text token, and at the end of the file."""
    end = first
    for start in range(first, len(tokens), _BLOCK):
        for end in (np.flatnonzero(tokens[start : start + _BLOCK] == eos) + (start + 1)).tolist():
            yield end
    if end < len(tokens):
        yield len(tokens)


def tokens(config: DataConfig, tokenizer: Tokenizer) -> Source:
    root, files = matching(config.path, (".bin", ".npy"))
    wrong = next((file for file in files if not file.endswith((".bin", ".npy"))), None)
    if wrong is not None:
        raise _refuse(f"{wrong}: expected the name of a .bin or .npy file")
    dtype = {"uint16": "<u2", "uint32": "<u4"}[config.token_dtype]
    read = TokenFiles(dtype, tokenizer.eos, tokenizer.vocab_size, config.max_document_bytes)
    for path in files:
        read.check(path)
    indices = tuple(idx for path in files if os.path.exists(idx := _index_of(path)))
    return Source(root, files, True, read, auxiliary_files=indices)

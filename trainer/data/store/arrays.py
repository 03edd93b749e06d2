"""Read-only arrays in files.

They are read with system calls instead of memory maps. A page fault keeps the interpreter's lock: if the disk hangs, no other
thread could report it. It also ends the process with SIGBUS if the file has become shorter or its disk fails.
"""

import itertools
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_GAP = 1024
"""Number of elements up to which it is faster to read the elements between two others than to read twice."""
_SMALL = 2**26
"""Size in bytes up to which an index is in memory: that of 8 million documents."""


class LoadingFailed(Exception):
    """Error that ends a run whose samples cannot be loaded. Its message is one line for the user. The exit code is 1."""


class _OpenFile:
    """A file that is open until no array needs it."""

    def __init__(self, path: Path, descriptor: int):
        self.path, self._descriptor = path, descriptor
        # Not at the interpreter's exit: a thread may still read.
        weakref.finalize(self, os.close, descriptor).atexit = False

    @classmethod
    def open(cls, path: Path) -> "_OpenFile":
        return cls(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def read_into(self, array: np.ndarray, start: int) -> None:
        """Fill a contiguous array with the bytes from offset `start` on. Raises LoadingFailed."""
        buffer = memoryview(array).cast("B")
        while buffer:
            try:
                count = os.preadv(self._descriptor, [buffer], start)
            except OSError as error:
                raise self._failure(error.strerror) from None
            if not count:
                raise self._failure("the file has become shorter since it was opened")
            buffer, start = buffer[count:], start + count

    def _failure(self, problem: str | None) -> LoadingFailed:
        return LoadingFailed(f"the training data cannot be read: {self.path}: {problem}")


class FileArray:
    """An array of one dimension in a file. Each access reads the elements that it needs."""

    def __init__(self, file: _OpenFile, dtype: np.dtype, length: int, start: int = 0):
        """start: offset of the first element in the file, in bytes."""
        self._file, self._length, self._start = file, length, start
        self.dtype = dtype

    @classmethod
    def open(cls, path: Path, dtype: str, length: int) -> "FileArray":
        return cls(_OpenFile.open(path), np.dtype(dtype), length)

    @classmethod
    def open_npy(cls, path: Path) -> "FileArray":
        """Open an array that np.save has written. Raises ValueError if it is damaged or has several dims."""
        with path.open("rb") as file:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError
            (length,), _, dtype = np.lib.format.read_array_header_1_0(file)
            start = file.tell()
        if path.stat().st_size != start + length * dtype.itemsize:
            raise ValueError
        return cls(_OpenFile.open(path), dtype, length, start)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int | slice | np.ndarray) -> np.generic | np.ndarray:
        """Read elements. Raises LoadingFailed.

        Args:
            index: An index, a slice without a step, or non-negative indices of shape (n,). To read indices is fast if they
                consist of ascending ranges.
        """
        if isinstance(index, np.ndarray):
            return self._gather(index)
        selected = range(self._length)[index]
        if isinstance(selected, int):
            return self._read(selected, 1)[0]
        return self._read(selected.start, len(selected))

    def as_index(self) -> "np.ndarray | FileArray":
        """Return the elements, in memory unless they are too many. A sample needs several single elements of an index, and each
        would be a system call. Raises LoadingFailed."""
        return self[:] if self._length * self.dtype.itemsize <= _SMALL else self

    def part(self, start: int, stop: int) -> "FileArray":
        """Return the elements [start, stop) as an array in the same file. They are not read."""
        return FileArray(self._file, self.dtype, stop - start, self._start + start * self.dtype.itemsize)

    def _read(self, first: int, count: int) -> np.ndarray:
        result = np.empty(count, self.dtype)
        self._file.read_into(result, self._start + first * self.dtype.itemsize)
        return result

    def _gather(self, index: np.ndarray) -> np.ndarray:
        result = np.empty(len(index), self.dtype)
        distances = np.diff(index)
        starts = np.flatnonzero((distances < 0) | (distances > _GAP)) + 1
        for first, last in itertools.pairwise([0, *starts.tolist(), len(index)]):
            if first < last:
                offsets = index[first:last] - index[first]
                result[first:last] = self._read(int(index[first]), int(offsets[-1]) + 1)[offsets]
        return result


class ConcatArray:
    """A read-only concatenation of arrays that is never materialized."""

    def __init__(self, arrays: Sequence[np.ndarray | FileArray]):
        self._arrays = arrays
        self._ends = np.cumsum([len(array) for array in arrays])
        self.dtype = arrays[0].dtype

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        """index: a slice without a step, or non-negative indices of shape (n,)."""
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            i = int(np.searchsorted(self._ends, start, side="right"))
            if start < stop <= self._ends[i]:  # the common case needs no copy
                offset = int(self._ends[i]) - len(self._arrays[i])
                return self._arrays[i][start - offset : stop - offset]
            index = np.arange(start, stop)
        owner = np.searchsorted(self._ends, index, side="right")
        result = np.empty(len(index), self.dtype)
        for i in np.unique(owner):
            selected = owner == i
            array = self._arrays[i]
            result[selected] = array[index[selected] - (self._ends[i] - len(array))]
        return result

"""External sort that merges the sorted runs of all chunks into the files of a store, in one shuffled order.

Documents are ordered by their random keys in [0, 2**64), and this range is divided into windows. For each window, one contiguous
slice of every run is read, and the documents of all slices are appended to the files in the order of their keys. Thus all disk
accesses are large and sequential, and memory is bounded by the window size, however large the corpus is.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.system.files import HashingFile
from trainer.data.prepare.runs import Chunk, RunReader, chunk_file

_WINDOW_BYTES = 2**27
_MAX_WINDOW_BYTES = 2**30
_MAX_WINDOWS = 1024
"""Approximate maximum number of windows, unless windows would then exceed _MAX_WINDOW_BYTES or _WINDOW_DOCUMENTS. Fewer windows
are faster, because every run is read for each window."""
_WINDOW_DOCUMENTS = 2**19


def write_split(
    folder: Path,
    split: str,
    chunk_folder: Path,
    chunks: Sequence[Chunk],
    dtype: np.dtype,
    progress: Callable[[int], None],
) -> tuple[dict[str, int], dict[str, Any]]:
    """Write the files of one split to `folder`. Returns the numbers of tokens and documents, and the size and digest of each
    file. progress: function that is called with each window's number of tokens."""
    runs = [run for chunk in chunks for run in chunk.runs if run.split == split]
    counts = {"tokens": sum(run.tokens for run in runs), "documents": sum(run.documents for run in runs)}
    names = ["documents", "tokens"]
    if any(run.has_targets for chunk in chunks for run in chunk.runs):  # of either split: both have the file or none
        names.append("targets")
    files = {name: HashingFile(folder / f"{split}.{name}") for name in names}
    files["documents"].write(np.zeros(1, "<i8").data)
    readers = [[RunReader(run, dtype) for run in chunk.runs if run.split == split] for chunk in chunks]
    end = 0
    for limit in _key_limits(counts["tokens"] * (dtype.itemsize + len(names) - 2), counts["documents"]):
        slices = []
        for i, chunk_readers in enumerate(readers):
            if chunk_readers:
                with chunk_file(chunk_folder, i, "runs").open("rb", buffering=0) as file:
                    slices += [reader.read_below(file, limit) for reader in chunk_readers]
        end = _write_window(files, slices, end)
        progress(sum(len(tokens) for _, _, tokens, _ in slices))
    assert end == counts["tokens"]
    return counts, {f"{split}.{name}": file.close() for name, file in files.items()}


def _key_limits(num_bytes: int, documents: int) -> list[int]:
    """Return the exclusive upper key limit of each window."""
    window_bytes = min(max(num_bytes // _MAX_WINDOWS, _WINDOW_BYTES), _MAX_WINDOW_BYTES)
    windows = max(-(-num_bytes // window_bytes), -(-documents // _WINDOW_DOCUMENTS))
    return [2**64 * (i + 1) // windows for i in range(windows)]


def _write_window(files: dict[str, HashingFile], slices: list[tuple], end: int) -> int:
    """Append a window's documents in the order of their keys. end: number of tokens before. Returns the number after."""
    keys, lengths = (np.concatenate([s[i] for s in slices]) for i in (0, 1))
    order = np.argsort(keys, kind="stable")
    offsets = end + np.cumsum(lengths[order])
    files["documents"].write(offsets.astype("<i8").data)
    starts = np.concatenate([np.cumsum(s[1]) - s[1] for s in slices])
    slice_of = np.repeat(np.arange(len(slices)), [len(s[0]) for s in slices])
    spans = list(zip(slice_of[order].tolist(), starts[order].tolist(), lengths[order].tolist(), strict=True))
    for name, column in (("tokens", 2), ("targets", 3)):
        if name in files and spans:
            # In a run without a target mask, all tokens are targets.
            arrays = [np.ones(len(s[2]), np.uint8) if s[column] is None else s[column] for s in slices]
            files[name].write(np.concatenate([arrays[i][start : start + n] for i, start, n in spans]).data)
    return int(offsets[-1]) if len(offsets) else end

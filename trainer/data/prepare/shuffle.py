"""Parts -> the files of a store: all documents in one shuffled order, written from front to back.

A document's key is its place in [0, 2**64). Each window of that range takes from every run the documents that fall in it:
one stretch of each, since runs are sorted. So the disk sees neither writes in random order nor small ones, and memory
stays at one window, whatever the corpus.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.prepare.runs import RunReader, ShardInfo, part_file
from trainer.system.files import HashingFile

_WINDOW_BYTES = 2**27
_LARGEST_WINDOW_BYTES = 2**30
_MOST_WINDOWS = 1024
"""Windows grow, up to the largest, before there are more of them: each reads from every run."""
_WINDOW_DOCUMENTS = 2**19


def write_split(
    final: Path,
    split: str,
    partial: Path,
    parts: Sequence[ShardInfo],
    dtype: np.dtype,
    progress: Callable[[int], None],
) -> tuple[dict[str, int], dict[str, Any]]:
    """Write the files of one split to the folder `final`. Returns its numbers of tokens and documents, and the sizes and
    digests of its files. progress: called with tokens written."""
    runs = [run for part in parts for run in part.runs if run.split == split]
    counts = {"tokens": sum(run.tokens for run in runs), "documents": sum(run.documents for run in runs)}
    names = ["documents", "tokens"]
    if any(run.targets for part in parts for run in part.runs):  # both splits alike
        names.append("targets")
    files = {name: HashingFile(final / f"{split}.{name}") for name in names}
    files["documents"].write(np.zeros(1, "<i8").data)
    readers = [[RunReader(run, dtype) for run in part.runs if run.split == split] for part in parts]
    end = 0
    for limit in _limits(counts["tokens"] * (dtype.itemsize + len(names) - 2), counts["documents"]):
        taken = []
        for number, of_part in enumerate(readers):
            if of_part:
                with part_file(partial, number, "runs").open("rb", buffering=0) as file:
                    taken += [reader.take(file, limit) for reader in of_part]
        end = _write_window(files, taken, end)
        progress(sum(len(tokens) for _, _, tokens, _ in taken))
    assert end == counts["tokens"]
    return counts, {f"{split}.{name}": file.close() for name, file in files.items()}


def _limits(size: int, documents: int) -> list[int]:
    """Where the windows end, for so many bytes and documents."""
    window = min(max(size // _MOST_WINDOWS, _WINDOW_BYTES), _LARGEST_WINDOW_BYTES)
    windows = max(-(-size // window), -(-documents // _WINDOW_DOCUMENTS))
    return [2**64 * (number + 1) // windows for number in range(windows)]


def _write_window(files: dict[str, HashingFile], taken: list[tuple], end: int) -> int:
    """Append documents in the order of their keys. end: of the tokens before; returns that of the last one."""
    keys, lengths = (np.concatenate([t[i] for t in taken]) for i in (0, 1))
    order = np.argsort(keys, kind="stable")
    offsets = end + np.cumsum(lengths[order])
    files["documents"].write(offsets.astype("<i8").data)
    starts = np.concatenate([np.cumsum(t[1]) - t[1] for t in taken])
    owner = np.repeat(np.arange(len(taken)), [len(t[0]) for t in taken])
    places = list(zip(owner[order].tolist(), starts[order].tolist(), lengths[order].tolist(), strict=True))
    for name, column in (("tokens", 2), ("targets", 3)):
        if name in files and places:
            arrays = [_mask(t) if t[column] is None else t[column] for t in taken]
            files[name].write(np.concatenate([arrays[run][start : start + n] for run, start, n in places]).data)
    return int(offsets[-1]) if len(offsets) else end


def _mask(taken: tuple) -> np.ndarray:
    """Of a run whose documents have no targets of their own."""
    return np.ones(len(taken[2]), np.uint8)

"""Small stores, built without a tokenizer."""

import itertools
from pathlib import Path

import numpy as np

from trainer.data.prepare.runs import read_chunk, write_chunk
from trainer.data.prepare.shuffle import write_split
from trainer.data.store.store import Encoded

U2 = np.dtype("<u2")


def write_chunks(folder: Path, chunks: list[list[tuple[Encoded, bool]]]) -> list:
    """Write and read back chunks. chunks: the documents of each, and whether they are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, documents in enumerate(chunks):
        assert write_chunk(folder, i, U2, documents, 0) == read_chunk(folder, i)
    return [read_chunk(folder, i) for i in range(len(chunks))]


def shuffled(folder: Path, chunks: list, split: str = "train") -> tuple[list[list[int]], list[list[int]] | None]:
    """Write a split from the chunks and return its documents and their targets, in the order of the store."""
    final = folder / "final"
    final.mkdir(exist_ok=True)
    counts, files = write_split(final, split, folder, chunks, U2, lambda tokens: None)
    assert sorted(files) == sorted(path.name for path in final.glob(f"{split}.*"))
    offsets = np.fromfile(final / f"{split}.documents", "<i8")
    tokens = np.fromfile(final / f"{split}.tokens", "<u2")
    assert (counts["documents"], counts["tokens"]) == (len(offsets) - 1, len(tokens)) == (len(offsets) - 1, offsets[-1])
    mask = final / f"{split}.targets"
    targets = np.fromfile(mask, "u1") if mask.exists() else None

    def per_document(values):
        return [values[a:b].tolist() for a, b in itertools.pairwise(offsets)]

    return per_document(tokens), None if targets is None else per_document(targets)

"""Small stores, made without a tokenizer."""

import itertools
from pathlib import Path

import numpy as np

from trainer.data.prepare.runs import ShardWriter, read_part
from trainer.data.prepare.shuffle import write_split
from trainer.data.store.store import Encoded

U2 = np.dtype("<u2")


def write_parts(folder: Path, parts: list[list[tuple[Encoded, bool]]]) -> list:
    """parts: the documents of each, and whether they are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, documents in enumerate(parts):
        writer = ShardWriter(folder, number, U2)
        for document, held_out in documents:
            writer.add(document, held_out)
        writer.finish()
    return [read_part(folder, number, verify=True) for number in range(len(parts))]


def shuffled(folder: Path, parts: list, split: str = "train") -> tuple[list[list[int]], list[list[int]] | None]:
    """Documents of a split, and their targets, in the order of the store that these parts make."""
    final = folder / "final"
    final.mkdir(exist_ok=True)
    counts, files = write_split(final, split, folder, parts, U2, lambda tokens: None)
    assert sorted(files) == sorted(path.name for path in final.glob(f"{split}.*"))
    offsets = np.fromfile(final / f"{split}.documents", "<i8")
    tokens = np.fromfile(final / f"{split}.tokens", "<u2")
    assert (counts["documents"], counts["tokens"]) == (len(offsets) - 1, len(tokens)) == (len(offsets) - 1, offsets[-1])
    mask = final / f"{split}.targets"
    targets = np.fromfile(mask, "u1") if mask.exists() else None

    def cut(values):
        return [values[a:b].tolist() for a, b in itertools.pairwise(offsets)]

    return cut(tokens), None if targets is None else cut(targets)

"""Which pieces of a token store's documents make which samples: packed whole, or one by one."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.config import ConfigError, DataConfig
from trainer.data.store.store import TokenStore
from trainer.system import logging
from trainer.system.files import atomic_folder, read_json_object

VERSION = 1


@dataclass(frozen=True)
class PackedIndex:
    """Stretches of documents, and which samples they are in."""

    starts: np.ndarray
    """(pieces,): the first token of each."""
    lengths: np.ndarray
    """(pieces,): positions; the token behind the last one is its label."""
    samples: np.ndarray
    """(samples + 1,): the first piece of each sample, and the end of the last."""

    def __len__(self) -> int:
        return len(self.samples) - 1

    def efficiency(self, seq_len: int) -> float:
        """Share of the positions that belong to a document."""
        return float(self.lengths.sum() / max(1, len(self) * seq_len))


def split_documents(store: TokenStore, seq_len: int, long_documents: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Starts and lengths of the pieces of all documents, and how many documents are not whole in them. long_documents: what
    becomes of those that have more than seq_len positions: "split" (several pieces), "truncate" (the first), "drop" (none)."""
    positions = np.diff(store.documents) - 1  # the last token is a label only
    if long_documents == "split":
        counts = -(-positions // seq_len)
    else:
        counts = (positions > 0) * (positions <= seq_len if long_documents == "drop" else 1)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its document
    starts = np.repeat(store.documents[:-1], counts) + number * seq_len
    lengths = np.minimum(np.repeat(positions, counts) - number * seq_len, seq_len)
    longer = int((positions > seq_len).sum()) if long_documents != "split" else 0
    return starts, lengths, longer + int((positions <= 0).sum())


def has_target(store: TokenStore, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(pieces,) bool: which have a target."""
    if store.targets is None:
        return np.ones(len(starts), bool)
    found = np.zeros(len(starts), bool)
    block_of = np.cumsum(lengths) // 2**22  # so that memory stays small
    for here in _runs(block_of):
        own = lengths[here]
        places = np.repeat(starts[here] + 1, own) + np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own)
        targets = np.concatenate([[0], np.cumsum(store.targets[places] != 0)])
        ends = np.cumsum(own)
        found[here] = targets[ends] > targets[ends - own]
    return found


def _runs(numbers: np.ndarray) -> Iterator[slice]:
    """Where the same number stands in a row."""
    borders = np.flatnonzero(np.diff(numbers)) + 1
    for first, last in itertools.pairwise([0, *borders.tolist(), len(numbers)]):
        if first < last:
            yield slice(first, last)


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """(pieces,): the bin of each piece; none is longer than the capacity. Best-fit decreasing (Johnson 1974, "Fast algorithms
    for bin packing"): the longest first, each into the fullest bin that has room for it. Pieces of one length that find the
    same room are placed at once, so time grows with the lengths there are, not with the pieces."""
    order = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), np.int64)
    bins_with: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # by what room they have left
    some_with = np.zeros(capacity + 1, bool)
    opened = 0

    def put_back(which: np.ndarray, room: int) -> None:
        if len(which) and room:
            bins_with[room].append(which)
            some_with[room] = True

    for members in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        length = int(lengths[members[0]]) if len(members) else capacity
        while len(members):
            room = length + int(np.argmax(some_with[length:]))
            if some_with[room]:
                which = bins_with[room].pop()
                some_with[room] = bool(bins_with[room])
            else:
                room = capacity
                which = opened + np.arange(-(-len(members) // (capacity // length)))
                opened += len(which)
            each = room // length  # the next of this length finds the same bin the fullest
            used = -(-len(members) // each)
            put_back(which[used:], room)
            which = which[:used]
            placed = min(len(members), each * len(which))
            bins[members[:placed]] = np.repeat(which, each)[:placed]
            in_last = placed - each * (len(which) - 1)
            put_back(which[:-1], room - each * length)
            put_back(which[-1:], room - in_last * length)
            members = members[placed:]
    return bins


def _whole_samples(
    store: TokenStore, seq_len: int, packing: str, long_documents: str
) -> tuple[PackedIndex, dict[str, int]]:
    """And what was left out."""
    starts, lengths, not_whole = split_documents(store, seq_len, long_documents)
    kept = has_target(store, starts, lengths)
    starts, lengths = starts[kept], lengths[kept]
    documents = len(store.documents) - 1
    without = {"pieces": len(starts), "without_target": int((~kept).sum()), "documents": documents}
    without["cut_or_dropped"] = not_whole
    if packing == "none":
        return PackedIndex(starts, lengths.astype(np.int32), np.arange(len(starts) + 1)), without
    bins = best_fit(lengths, seq_len)
    order = np.argsort(bins, kind="stable")
    samples = np.concatenate([[0], np.cumsum(np.bincount(bins))])
    return PackedIndex(starts[order], lengths[order].astype(np.int32), samples), without


# ---------------------------------------------------------------- made once, found again


def pack(store: TokenStore, folder: Path, seq_len: int, config: DataConfig) -> None:
    """Write which pieces make which samples to a folder, if it is not there."""
    if folder.exists():
        return
    pieces, counts = _whole_samples(store, seq_len, config.packing, config.long_documents)
    counts |= {"version": VERSION, "samples": len(pieces), "positions": int(pieces.lengths.sum())}
    with atomic_folder(folder) as unfinished:
        for name in ("starts", "lengths", "samples"):
            np.save(unfinished / f"{name}.npy", getattr(pieces, name))
        (unfinished / "pieces.json").write_text(json.dumps(counts))
    share = 100 * pieces.efficiency(seq_len)
    logging.info(
        f"packed {counts['documents']} documents into {counts['samples']} samples, {share:.1f} % of them full: {folder}"
    )
    if counts["cut_or_dropped"] or counts["without_target"]:
        logging.warning(
            f"{counts['cut_or_dropped']} documents are longer than training.seq_len {seq_len}, or of a single token, and were "
            f"cut or left out; {counts['without_target']} pieces have no target, and were left out"
        )


def read_packing(folder: Path) -> PackedIndex:
    """Raises ConfigError where the folder is not what `pack` writes."""
    try:
        counts = read_json_object(folder / "pieces.json")
        starts, lengths, samples = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("starts", "lengths", "samples")
        )
        if (counts["version"], counts["pieces"], counts["samples"]) != (VERSION, len(starts), len(samples) - 1):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        raise ConfigError("data.store_folder", f"{folder} cannot be read; delete it") from None
    return PackedIndex(starts, lengths, samples)

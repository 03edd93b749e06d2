"""Packing: the assignment of document spans to samples."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.base.config import ConfigError, DataConfig
from trainer.base.system import console
from trainer.base.system.files import atomic_folder, read_json_object
from trainer.base.system.spelling import counted
from trainer.data.store.arrays import FileArray
from trainer.data.store.store import SECOND_START, TokenStore

VERSION = 2
_COUNTS = ("documents", "spans", "truncated_or_dropped", "without_target", "samples", "positions")


@dataclass(frozen=True)
class PackedIndex:
    """Spans of documents, and the sample that contains each span."""

    name: str
    """Name of the packing. It changes when the content of the samples changes."""
    starts: np.ndarray | FileArray
    """Index of the first token of each span, shape (spans,)."""
    lengths: np.ndarray | FileArray
    """Number of positions of each span, shape (spans,). The token after a span is the label of its last position."""
    samples: np.ndarray | FileArray
    """Index of the first span of each sample, followed by the total number of spans, shape (samples + 1,)."""


def concatenated_ranges(starts: np.ndarray | int, lengths: np.ndarray) -> np.ndarray:
    """Return the integers of range(start, start + length) for each start and length, one range after the other."""
    return np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)


def split_documents(store: TokenStore, seq_len: int, long_documents: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the starts and lengths of the spans of all documents, and the number of documents that were truncated or
    dropped. long_documents: whether a document of more than seq_len positions is divided into several spans ("split"), reduced to
    its first span ("truncate") or dropped ("drop")."""
    documents = store.documents[:]
    positions = np.diff(documents) - 1  # the last token of a document is only a label
    if long_documents == "split":
        counts = -(-positions // seq_len)
    else:
        counts = (positions > 0) * (positions <= seq_len if long_documents == "drop" else 1)
    index = concatenated_ranges(0, counts)  # index of each span in its document
    starts = np.repeat(documents[:-1], counts) + index * seq_len
    lengths = np.minimum(np.repeat(positions, counts) - index * seq_len, seq_len)
    incomplete = int((positions > seq_len).sum()) if long_documents != "split" else 0
    return starts, lengths, incomplete + int((positions <= 0).sum())


def split_pairs(store: TokenStore, seq_len: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the starts and lengths of the spans of all preference pairs that fit into a sample, (pairs, 2), and the number of
    pairs that do not."""
    second = np.flatnonzero(store.targets[:] == SECOND_START)
    documents = store.documents[:]
    starts = np.stack((documents[:-1], second), axis=1)
    lengths = np.stack((second, documents[1:]), axis=1) - starts - 1
    fits = lengths.sum(1) <= seq_len
    return starts[fits], lengths[fits], int((~fits).sum())


def has_target(store: TokenStore, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return whether each span contains a target token, bool of shape (spans,)."""
    if store.targets is None:
        return np.ones(len(starts), bool)
    result = np.zeros(len(starts), bool)
    boundaries = np.flatnonzero(np.diff(np.cumsum(lengths) // 2**22)) + 1  # chunks of spans bound memory
    for first, last in itertools.pairwise([0, *boundaries.tolist(), len(starts)]):
        sizes = lengths[first:last]
        targets = store.targets[concatenated_ranges(starts[first:last] + 1, sizes)]
        result[first:last] = np.logical_or.reduceat(targets, np.cumsum(sizes) - sizes)
    return result


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin index of each span, shape (spans,). lengths: lengths of the spans, at most `capacity` each.

    Best-fit decreasing (Johnson 1974, "Fast algorithms for bin packing"): spans are placed in order of decreasing length, each
    into the fullest bin with enough space. Spans of equal length are placed together, so that the time depends on the number of
    distinct lengths, not on the number of spans.
    """
    order = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), np.int64)
    bins_by_space: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # indexed by remaining space of a bin
    any_bin = np.zeros(capacity + 1, bool)  # whether bins_by_space has an entry for a space
    num_bins = 0

    def put_back(bin_ids: np.ndarray, space: int) -> None:
        if len(bin_ids) and space:
            bins_by_space[space].append(bin_ids)
            any_bin[space] = True

    for spans in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        while len(spans):
            length = int(lengths[spans[0]])
            space = length + int(np.argmax(any_bin[length:]))
            if any_bin[space]:
                bin_ids = bins_by_space[space].pop()
                any_bin[space] = bool(bins_by_space[space])
            else:
                space = capacity
                bin_ids = num_bins + np.arange(-(-len(spans) // (capacity // length)))
                num_bins += len(bin_ids)
            per_bin = space // length  # a bin that took a span remains the fullest for the next equal span
            num_used = -(-len(spans) // per_bin)
            used, unused = bin_ids[:num_used], bin_ids[num_used:]
            placed = np.repeat(used, per_bin)[: len(spans)]
            bins[spans[: len(placed)]] = placed
            put_back(unused, space)
            put_back(used[:-1], space - per_bin * length)
            put_back(used[-1:], space - (len(placed) - per_bin * (len(used) - 1)) * length)
            spans = spans[len(placed) :]
    return bins


def pack(store: TokenStore, folder: Path, seq_len: int, config: DataConfig, pairs: bool) -> None:
    """Write the packing of a store to `folder`, unless it exists. pairs: whether the documents are preference pairs."""
    if folder.exists():
        return
    if pairs:
        starts, lengths, incomplete = split_pairs(store, seq_len)
    else:
        starts, lengths, incomplete = split_documents(store, seq_len, config.long_documents)
        starts, lengths = starts[:, None], lengths[:, None]
    # Each row consists of the spans that must be in the same sample.
    targeted = has_target(store, starts.ravel(), lengths.ravel()).reshape(starts.shape).all(1)
    starts, lengths = starts[targeted], lengths[targeted]
    bins = best_fit(lengths.sum(1), seq_len) if config.packing == "best-fit" else np.arange(len(starts))
    order = np.argsort(bins, kind="stable")
    samples = np.concatenate([[0], np.cumsum(np.bincount(bins))]) * starts.shape[1]
    counts = {
        "documents": len(store.documents) - 1,
        "spans": starts.size,
        "truncated_or_dropped": incomplete,
        "without_target": int((~targeted).sum()) * starts.shape[1],
        "version": VERSION,
        "samples": len(samples) - 1,
        "positions": int(lengths.sum()),
    }
    with atomic_folder(folder) as unfinished:
        np.save(unfinished / "starts.npy", starts[order].ravel())
        np.save(unfinished / "lengths.npy", lengths[order].ravel().astype(np.int32))
        np.save(unfinished / "samples.npy", samples)
        (unfinished / "packing.json").write_text(json.dumps(counts))
    used = f"{100 * counts['positions'] / max(1, counts['samples'] * seq_len):.1f} % of the positions are used"
    console.info(
        f"packed {counted(counts['documents'], 'document')} into {counted(counts['samples'], 'sample')} in {folder}: {used}"
    )
    if incomplete:
        which = "documents are truncated or dropped, because each has a single token or is"
        if pairs:
            which = "pairs are dropped, because the two answers of each, with their prompts, are together"
        console.warning(f"{incomplete} {which} longer than training.seq_len {seq_len}")
    if spans := counts["without_target"]:
        console.warning(f"{spans} document spans are not part of any sample, because they contain no target token")


def read_packing(folder: Path) -> PackedIndex:
    """Read a packing. Raises ConfigError if `pack` did not write the folder, or if the folder is damaged."""
    counts = read_counts(folder)
    try:
        starts, lengths, samples = (
            FileArray.open_npy(folder / f"{name}.npy").as_index() for name in ("starts", "lengths", "samples")
        )
        if (counts["spans"], counts["samples"]) != (len(starts), len(samples) - 1):
            raise ValueError
    except (OSError, ValueError):
        raise _unreadable(folder) from None
    return PackedIndex(folder.name, starts, lengths, samples)


def read_counts(folder: Path) -> dict[str, int]:
    """Read the counts of a packing, which `pack` has written. Raises ConfigError."""
    try:
        counts = read_json_object(folder / "packing.json")
        if counts["version"] != VERSION:
            raise ValueError
        return {name: int(counts[name]) for name in _COUNTS}
    except (OSError, ValueError, KeyError, TypeError):
        raise _unreadable(folder) from None


def _unreadable(folder: Path) -> ConfigError:
    return ConfigError("data.store_folder", f"{folder} cannot be read; delete this folder")

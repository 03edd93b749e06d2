"""The splits of a token store: training documents and held-out documents.

A hash of each document's content selects the held-out documents. Of a single document, or of a few, it selects none or all. Then
the last share of the tokens is held out instead, or if equal documents stand everywhere, some of the distinct contents. The store
itself does not change: what is held out is computed when it is opened.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.config import DataConfig
from trainer.base.system.files import digest
from trainer.base.system.spelling import counted
from trainer.data.store.store import TokenStore, open_store

_MAX_DOCUMENTS = 10_000
"""Number of documents up to which a store has few documents. They are compared with each other at each start."""
_MAX_TOKENS = 2**26
"""Number of tokens up to which some of the contents can be held out, because each process then copies the tokens."""


@dataclass(frozen=True)
class Splits:
    train: TokenStore
    held_out: TokenStore | None
    """None if held_out_fraction is 0."""
    suffix: str = ""
    """Part of the names of everything that depends on the splits, if they are not those of the store."""
    note: str = ""
    """How the splits differ from those of the store."""

    def items(self) -> list[tuple[str, TokenStore]]:
        """Return (name of the split, its store) of each split."""
        stores = (("train", self.train), ("held_out", self.held_out))
        return [(name, store) for name, store in stores if store is not None]


def may_be_held_out(data: DataConfig) -> bool:
    """Return whether a dataset may have held-out documents. A prepared store has the fraction with which it was prepared."""
    return data.held_out_fraction > 0 or data.dataset == "prepared"


def open_splits(folder: Path, data: DataConfig, evaluates: bool) -> Splits:
    """Open the splits of a store. evaluates: whether the run evaluates. Otherwise, no tokens need to be held out."""
    train = open_store(folder, "train")
    if not may_be_held_out(data):
        return Splits(train, None)
    held_out = open_store(folder, "held_out")
    splits = Splits(train, held_out)
    if data.dataset == "prepared" or not evaluates or (len(train.tokens) and len(held_out.tokens)):
        return splits
    store = train if len(train.tokens) else held_out
    count, tokens = len(store.documents) - 1, len(store.tokens)
    why = "cannot divide the only document" if count == 1 else f"selects none or all of the {count} documents"
    note = f"data.held_out_fraction = {data.held_out_fraction:g} {why}, so that"
    first = first_held_out(store, data.held_out_fraction)
    if first is not None:
        what = f"the last {tokens - first} of {tokens} tokens are held out instead"
        return Splits(_part(store, 0, first), _part(store, first, tokens), f"-last-{tokens - first}", f"{note} {what}")
    selected = held_out_contents(store, data.held_out_fraction)
    if selected is None:
        return splits
    train, held_out = _selection(store, ~selected), _selection(store, selected)
    num_contents = len(np.unique(_first_equal(store)[:-1][selected]))
    what = f"{counted(int(selected.sum()), 'document')} ({counted(num_contents, 'content')}) are held out instead"
    return Splits(train, held_out, f"-contents-{len(held_out.tokens)}", f"{note} {what}")


def first_held_out(store: TokenStore, fraction: float) -> int | None:
    """Return the index of the first token to hold out, or None if the documents are too many, or cannot be divided.

    Texts are divided at any token; documents with targets (conversations) stay complete. Equal documents are on the same side, as
    they are if a hash selects them.
    """
    tokens, count = len(store.tokens), len(store.documents) - 1
    if not 0 < count <= _MAX_DOCUMENTS or tokens < 4:
        return None
    documents = store.documents[:]
    first = tokens - min(max(round(fraction * tokens), 2), tokens // 2)
    separates = _separates_documents(store)  # index: document from which on all are held out
    document = int(np.searchsorted(documents, first, side="right")) - 1
    if store.targets is None and separates[document] and separates[document + 1]:
        return first
    starts = documents[1:-1][separates[1:-1]]
    return int(starts[np.abs(starts - first).argmin()]) if len(starts) else None


def held_out_contents(store: TokenStore, fraction: float) -> np.ndarray | None:
    """Return for each document whether it is held out, shape (documents,), so that equal documents are on the same side, or
    None if the documents are too many, or all equal. At least one content is held out, and at most half of the tokens."""
    count = len(store.documents) - 1
    if not 0 < count <= _MAX_DOCUMENTS or len(store.tokens) > _MAX_TOKENS:
        return None
    earliest, lengths = _first_equal(store)[:-1], np.diff(store.documents[:])
    selected, wanted = np.zeros(count, bool), fraction * len(store.tokens)
    for content in np.unique(earliest)[::-1]:  # the order of a store is random
        equal = earliest == content
        if lengths[selected | equal].sum() <= len(store.tokens) / 2:
            selected |= equal
        if selected.any() and lengths[selected].sum() >= wanted:
            return selected
    return selected if selected.any() else None


def _separates_documents(store: TokenStore) -> np.ndarray:
    """Return for each document whether no document before it equals it or a later one, and True, shape (documents + 1,)."""
    earliest = _first_equal(store)
    return np.minimum.accumulate(earliest[::-1])[::-1] >= np.arange(len(earliest))


def _first_equal(store: TokenStore) -> np.ndarray:
    """Return for each document the index of the first one that equals it, and the number of documents, shape (documents + 1,)."""
    documents = store.documents[:]
    count, lengths = len(documents) - 1, np.diff(documents).tolist()
    frequency = Counter(lengths)
    earliest, first_of = np.arange(count + 1), {}
    for i in range(count):
        if frequency[lengths[i]] > 1:  # documents of other lengths are not equal to any
            content = store.tokens[documents[i] : documents[i + 1]].tobytes()
            earliest[i] = first_of.setdefault(digest(content), i)
    return earliest


def _part(store: TokenStore, start: int, stop: int) -> TokenStore:
    """Return the tokens [start, stop) of a store. The documents at its ends may be incomplete."""
    documents = store.documents[:]
    inner = documents[(documents > start) & (documents < stop)]
    documents = np.concatenate([[start], inner, [stop]]) - start
    targets = None if store.targets is None else store.targets.part(start, stop)
    return TokenStore(store.tokens.part(start, stop), documents, targets)


def _selection(store: TokenStore, selected: np.ndarray) -> TokenStore:
    """Return a copy of some documents of a store. selected: whether a document is one of them, shape (documents,)."""
    documents, chosen = store.documents[:], np.flatnonzero(selected)

    def copy(values: Any) -> np.ndarray:
        return np.concatenate([values[documents[i] : documents[i + 1]] for i in chosen])

    lengths = np.diff(documents)[chosen]
    targets = None if store.targets is None else copy(store.targets)
    return TokenStore(copy(store.tokens), np.concatenate([[0], np.cumsum(lengths)]), targets)

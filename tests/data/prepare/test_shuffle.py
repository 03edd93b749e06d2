"""The external sort: one shuffled order, for runs and windows of any size."""

import numpy as np
import pytest

from tests.data.stores import shuffled, write_chunks
from trainer.data.prepare import runs, shuffle
from trainer.data.prepare.shuffle import _key_limits
from trainer.data.store.store import Encoded


def documents(count: int, first: int = 0) -> list[tuple[Encoded, bool]]:
    """Return documents of different lengths, every fifth of them held out."""
    return [(Encoded(np.full(1 + i % 7, first + i)), i % 5 == 0) for i in range(count)]


def tokens_of(documents, held_out=False) -> list[list[int]]:
    return [d.tokens.tolist() for d, h in documents if h == held_out]


def test_every_document_is_written_once_in_a_shuffled_order(tmp_path):
    source = [documents(100), documents(57, 100), documents(0), documents(80, 157)]
    chunks = write_chunks(tmp_path, source)
    expected = [d for chunk in source for d in tokens_of(chunk)]
    found, targets = shuffled(tmp_path, chunks)
    assert sorted(found) == sorted(expected) and targets is None
    indices = np.array([d[0] for d in found])
    # The mean distance of neighbours is a third of the range in a random order, and one in the order of the source.
    assert np.abs(np.diff(indices)).mean() > 237 / 3 * 0.8
    held_out, _ = shuffled(tmp_path, chunks, "held_out")
    assert sorted(held_out) == sorted(d for chunk in source for d in tokens_of(chunk, held_out=True))


def test_the_order_does_not_depend_on_the_size_of_runs_or_windows(tmp_path, monkeypatch):
    source = [documents(100), documents(57, 100)]
    expected, _ = shuffled(tmp_path, write_chunks(tmp_path, source))
    monkeypatch.setattr(shuffle, "_WINDOW_DOCUMENTS", 3)
    assert shuffled(tmp_path, write_chunks(tmp_path, source))[0] == expected
    monkeypatch.setattr(runs, "_RUN_DOCUMENTS", 7)
    chunks = write_chunks(tmp_path, source)
    assert len(chunks[0].runs) > 20
    assert shuffled(tmp_path, chunks)[0] == expected
    monkeypatch.setattr(runs, "_RUN_TOKENS", 10)
    assert shuffled(tmp_path, write_chunks(tmp_path, source))[0] == expected
    monkeypatch.setattr(shuffle, "_WINDOW_DOCUMENTS", 10**6)
    assert shuffled(tmp_path, write_chunks(tmp_path, source))[0] == expected


@pytest.mark.parametrize("window", [2, 10**6])
def test_targets_follow_their_tokens_and_are_all_ones_for_documents_without_them(tmp_path, monkeypatch, window):
    monkeypatch.setattr(shuffle, "_WINDOW_DOCUMENTS", window)
    monkeypatch.setattr(runs, "_RUN_DOCUMENTS", 4)
    has_target = [(Encoded(np.arange(i, i + 3), np.array([i % 2, 0, 1], bool)), False) for i in range(9)]
    chunks = write_chunks(tmp_path, [documents(11, 100), has_target])
    tokens, targets = shuffled(tmp_path, chunks)
    assert targets is not None and len(tokens) == 8 + 9
    for document, mask in zip(tokens, targets, strict=True):
        assert mask == ([document[0] % 2, 0, 1] if document[0] < 100 else [1] * len(document))
    held_out, masks = shuffled(tmp_path, chunks, "held_out")
    assert masks == [[1] * len(document) for document in held_out], "a file of targets in both splits"


def test_a_split_without_documents_is_empty(tmp_path):
    assert shuffled(tmp_path, write_chunks(tmp_path, [documents(1)])) == ([], None)


def test_windows_are_bounded_in_bytes_and_documents():
    assert _key_limits(0, 0) == []
    assert _key_limits(2**27, 1000) == [2**64]
    assert _key_limits(2**28, 1000) == [2**63, 2**64]
    assert len(_key_limits(1000, 2**22)) == 8
    assert len(_key_limits(2**37, 1000)) == 1024
    assert len(_key_limits(2**38, 1000)) == 1024, "the number of windows is limited"
    assert len(_key_limits(2**42, 1000)) == 4096, "except by the maximum size of a window"

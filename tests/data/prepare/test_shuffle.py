"""Parts -> one shuffled order, in windows of any size."""

import numpy as np
import pytest

from tests.data.stores import shuffled, write_parts
from trainer.data.prepare import runs as parts_module
from trainer.data.prepare import shuffle as module
from trainer.data.prepare.shuffle import _limits
from trainer.data.store.store import Encoded


def documents(count: int, first: int = 0) -> list[tuple[Encoded, bool]]:
    """Of different lengths; every fifth is held out."""
    return [(Encoded(np.full(1 + i % 7, first + i)), i % 5 == 0) for i in range(count)]


def plain(documents, held_out=False) -> list[list[int]]:
    return [d.tokens.tolist() for d, h in documents if h == held_out]


def test_every_document_is_written_once_in_an_order_that_is_none_of_the_parts(tmp_path):
    source = [documents(100), documents(57, 100), documents(0), documents(80, 157)]
    parts = write_parts(tmp_path, source)
    expected = [d for part in source for d in plain(part)]
    found, targets = shuffled(tmp_path, parts)
    assert sorted(found) == sorted(expected) and targets is None
    numbers = np.array([d[0] for d in found])
    # A random order's mean distance of neighbours is a third of the range, this one's own is one.
    assert np.abs(np.diff(numbers)).mean() > 237 / 3 * 0.8
    held_out, _ = shuffled(tmp_path, parts, "held_out")
    assert sorted(held_out) == sorted(d for part in source for d in plain(part, held_out=True))


def test_the_order_depends_neither_on_the_size_of_runs_nor_on_that_of_windows(tmp_path, monkeypatch):
    source = [documents(100), documents(57, 100)]
    expected, _ = shuffled(tmp_path, write_parts(tmp_path, source))
    monkeypatch.setattr(module, "_WINDOW_DOCUMENTS", 3)
    assert shuffled(tmp_path, write_parts(tmp_path, source))[0] == expected
    monkeypatch.setattr(parts_module, "_RUN_DOCUMENTS", 7)
    parts = write_parts(tmp_path, source)
    assert len(parts[0].runs) > 20
    assert shuffled(tmp_path, parts)[0] == expected
    monkeypatch.setattr(parts_module, "_RUN_TOKENS", 10)
    assert shuffled(tmp_path, write_parts(tmp_path, source))[0] == expected
    monkeypatch.setattr(module, "_WINDOW_DOCUMENTS", 10**6)
    assert shuffled(tmp_path, write_parts(tmp_path, source))[0] == expected


@pytest.mark.parametrize("window", [2, 10**6])
def test_targets_go_with_their_tokens_and_are_everywhere_where_a_document_has_none(tmp_path, monkeypatch, window):
    monkeypatch.setattr(module, "_WINDOW_DOCUMENTS", window)
    monkeypatch.setattr(parts_module, "_RUN_DOCUMENTS", 4)
    has_target = [(Encoded(np.arange(i, i + 3), np.array([i % 2, 0, 1], bool)), False) for i in range(9)]
    parts = write_parts(tmp_path, [documents(11, 100), has_target])
    tokens, targets = shuffled(tmp_path, parts)
    assert targets is not None and len(tokens) == 8 + 9
    for document, mask in zip(tokens, targets, strict=True):
        assert mask == ([document[0] % 2, 0, 1] if document[0] < 100 else [1] * len(document))
    held_out, masks = shuffled(tmp_path, parts, "held_out")
    assert masks == [[1] * len(document) for document in held_out], "both splits have the file"


def test_a_split_without_documents_is_there_and_empty(tmp_path):
    assert shuffled(tmp_path, write_parts(tmp_path, [documents(1)])) == ([], None)


def test_windows_are_bounded_in_bytes_and_documents():
    assert _limits(0, 0) == []
    assert _limits(2**27, 1000) == [2**64]
    assert _limits(2**28, 1000) == [2**63, 2**64]
    assert len(_limits(1000, 2**22)) == 8
    assert len(_limits(2**37, 1000)) == 1024
    assert len(_limits(2**38, 1000)) == 1024, "windows grow before there are more"
    assert len(_limits(2**42, 1000)) == 4096, "but not beyond the largest"

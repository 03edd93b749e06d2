"""Packing: no token is lost or repeated, and documents in one sample are separated."""

import numpy as np
import pytest
import torch

from trainer.base.config import ConfigError, DataConfig
from trainer.batch import IGNORE_INDEX
from trainer.data.sampling.packing import best_fit, pack, read_packing, split_documents
from trainer.data.sampling.samples import PackedSamples, WrappedSamples
from trainer.data.store import arrays
from trainer.data.store.arrays import FileArray
from trainer.data.store.store import SECOND_START, TokenStore


def store_of(lengths, targets=None):
    """Return a store in which token i is i, with documents of these lengths."""
    return TokenStore(np.arange(sum(lengths)), np.cumsum([0, *lengths]), targets)


def packed(tmp_path, store, seq_len, packing="best-fit", long_documents="split"):
    pack(store, tmp_path / "packed", seq_len, DataConfig(packing=packing, long_documents=long_documents), pairs=False)
    return PackedSamples(store, seq_len, read_packing(tmp_path / "packed"), reset_positions=True)


def complete(samples):
    return samples[np.arange(len(samples))]


def test_packed_documents_are_complete_and_each_token_is_a_target_once(tmp_path):
    lengths = np.random.default_rng(0).integers(2, 40, 200).tolist()
    store = store_of(lengths)
    samples = packed(tmp_path, store, 100)
    batch = complete(samples)
    assert samples.index.lengths[:].sum() > 0.97 * 100 * len(samples)
    labels = sorted(batch.labels[batch.labels != IGNORE_INDEX].tolist())
    firsts = set(store.documents.tolist())
    assert labels == [token for token in range(sum(lengths)) if token not in firsts]
    assert ((batch.labels == batch.tokens + 1) | (batch.labels == IGNORE_INDEX)).all()


def test_positions_and_document_indices_separate_packed_documents(tmp_path):
    batch = complete(packed(tmp_path, store_of([5, 4, 3]), 8))  # 4 + 3 positions in one sample, 2 in another
    assert batch.tokens.tolist() == [[0, 1, 2, 3, 5, 6, 7, 0], [9, 10, 0, 0, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[1, 2, 3, 4, 6, 7, 8, -100], [10, 11, -100, -100, -100, -100, -100, -100]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.documents.tolist() == [[0, 0, 0, 0, 1, 1, 1, -1], [0, 0, -1, -1, -1, -1, -1, -1]]


def test_without_packing_a_sample_is_one_document_with_padding(tmp_path):
    batch = complete(packed(tmp_path, store_of([3, 4]), 4, packing="none"))
    assert batch.tokens.tolist() == [[0, 1, 0, 0], [3, 4, 5, 0]]
    assert batch.labels.tolist() == [[1, 2, -100, -100], [4, 5, 6, -100]]


@pytest.mark.parametrize(
    ("long_documents", "spans"),
    [("split", [(0, 2), (3, 4), (7, 4), (11, 1)]), ("truncate", [(0, 2), (3, 4)]), ("drop", [(0, 2)])],
)
def test_long_documents_are_split_truncated_or_dropped(long_documents, spans):
    # A document of one token has no target.
    starts, lengths, incomplete = split_documents(store_of([3, 10, 1]), 4, long_documents)
    assert incomplete == (1 if long_documents == "split" else 2)
    assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == spans


def test_incomplete_documents_and_spans_without_a_target_are_counted(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr("trainer.data.sampling.packing.console.warning", warnings.append)
    targets = np.zeros(18, np.uint8)
    targets[[2, 6]] = 1  # in the documents [0, 4) and [4, 8), but not in [8, 12)
    samples = packed(tmp_path, store_of([4, 4, 4, 1, 5], targets), 3, packing="none", long_documents="drop")
    assert len(samples) == 2
    assert complete(samples).labels.tolist() == [[-100, 2, -100], [-100, 6, -100]]
    assert warnings == [
        "2 documents are truncated or dropped, because each has a single token or is longer than training.seq_len 3",
        "1 document spans are not part of any sample, because they contain no target token",
    ]


def test_pairs_that_do_not_fit_into_a_sample_are_counted(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr("trainer.data.sampling.packing.console.warning", warnings.append)
    targets = np.ones(10, np.uint8)
    targets[[3, 8]] = SECOND_START  # of the pairs [0, 6) and [6, 10)
    pack(store_of([6, 4], targets), tmp_path / "packed", 3, DataConfig(packing="best-fit"), pairs=True)
    assert read_packing(tmp_path / "packed").starts[:].tolist() == [6, 8]
    reason = "because the two answers of each, with their prompts, are together longer than training.seq_len 3"
    assert warnings == [f"1 pairs are dropped, {reason}"]


def test_best_fit_fills_bins_like_its_definition():
    def by_definition(lengths, capacity):
        spaces = []
        for length in sorted(lengths.tolist(), reverse=True):
            fitting = [(space, i) for i, space in enumerate(spaces) if space >= length]
            if fitting:
                spaces[min(fitting)[1]] -= length
            else:
                spaces.append(capacity - length)
        return sorted(capacity - space for space in spaces)

    draw = np.random.default_rng(0)
    for _ in range(200):
        capacity = int(draw.integers(1, 40))
        lengths = draw.integers(1, capacity + 1, draw.integers(1, 60))
        filled = np.bincount(best_fit(lengths, capacity), lengths)
        assert sorted(filled) == by_definition(lengths, capacity)


def test_sample_minus_one_has_no_targets(tmp_path):
    for samples in (packed(tmp_path, store_of([5, 4]), 4), WrappedSamples(store_of([9]), 4, reset_positions=True)):
        assert (samples[np.array([-1, 0])].labels == IGNORE_INDEX).all(dim=1).tolist() == [True, False]


def test_positions_of_wrapped_documents_reset_and_boundaries_have_no_labels():
    batch = WrappedSamples(store_of([3, 4, 6]), 4, reset_positions=True)[np.arange(3)]
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert batch.positions.tolist() == [[0, 1, 2, 0], [0, 1, 2, 0], [0, 1, 2, 3]]
    assert batch.labels.tolist() == [[1, 2, -100, 4], [5, 6, -100, 8], [9, 10, 11, 12]]
    assert batch.documents.tolist() == [[0, 0, 0, 1], [1, 1, 1, 2], [2, 2, 2, 2]]


def test_a_packing_is_written_once_and_reused(tmp_path):
    store = store_of([5, 4, 3])
    first = complete(packed(tmp_path, store, 8)).tokens.tolist()
    mtimes = {p: p.stat().st_mtime_ns for p in (tmp_path / "packed").iterdir()}
    assert complete(packed(tmp_path, store, 8)).tokens.tolist() == first
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "packed").iterdir()} == mtimes


@pytest.mark.parametrize("file", ["starts.npy", "packing.json", "samples.npy"])
def test_a_damaged_packing_is_an_error(tmp_path, file):
    store = store_of([5, 4, 3])
    packed(tmp_path, store, 8)
    (tmp_path / "packed" / file).write_bytes(b"")
    with pytest.raises(ConfigError) as error:
        read_packing(tmp_path / "packed")
    assert error.value.message == f"{tmp_path}/packed cannot be read; delete this folder"


def of_files(folder, store, packing):
    """Return the type of the indices and all samples of a store whose arrays are read from files."""
    files = {"tokens": store.tokens, "documents": store.documents, "targets": store.targets}
    for name, array in files.items():
        array.tofile(folder / name)
        files[name] = FileArray.open(folder / name, array.dtype, len(array))
    opened = TokenStore(**files | {"documents": files["documents"].as_index()})
    if packing == "wrapped":
        return type(opened.documents), complete(WrappedSamples(opened, 100, reset_positions=True))
    samples = packed(folder, opened, 100, packing)
    return type(samples.index.starts), complete(samples)


@pytest.mark.parametrize("packing", ["wrapped", "best-fit", "none"])
def test_samples_do_not_depend_on_whether_an_index_is_in_memory(tmp_path, monkeypatch, packing):
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 250, 100)
    store = store_of(lengths, generator.integers(0, 2, lengths.sum(), dtype=np.uint8))
    kind, expected = of_files(tmp_path, store, packing)
    assert kind is np.ndarray and len(expected.tokens) > 50
    monkeypatch.setattr(arrays, "_SMALL", 0)
    kind, found = of_files(tmp_path, store, packing)
    assert kind is FileArray and all(map(torch.equal, expected[:4], found[:4]))  # the tensors of shape (batch, seq)

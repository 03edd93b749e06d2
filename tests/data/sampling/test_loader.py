"""The samples of a step and their content."""

import hashlib
from itertools import islice

import numpy as np
import pytest
import torch

from trainer.base.config import DataConfig
from trainer.batch import IGNORE_INDEX
from trainer.data.sampling.loader import BatchPartition, SampleOrder, evaluation_batches, training_batches
from trainer.data.sampling.mixture import CombinedSamples
from trainer.data.sampling.packing import pack, read_packing
from trainer.data.sampling.phases import parse_mixture
from trainer.data.sampling.samples import PackedSamples, WrappedSamples
from trainer.data.store.store import TokenStore

SEQ = 4
PHASES = parse_mixture((), ("data",))


def samples(num_samples=37):
    """Samples of a store in which token i is i, with documents of eleven tokens."""
    tokens = np.arange(num_samples * SEQ + 1)
    return WrappedSamples(
        TokenStore(tokens, np.append(np.arange(0, len(tokens), 11), len(tokens))), SEQ, reset_positions=False
    )


def partition(rank=0, ranks=1, local_batch_size=2):
    return BatchPartition(local_batch_size=local_batch_size, rank=rank, ranks=ranks)


def indices(batch):
    """Return the indices of the samples in a batch."""
    return (batch.tokens[:, 0] // SEQ).tolist()


def step_samples(ranks, cursor, step, prefetch=0):
    """Return the samples of a step, accumulation by accumulation, rank by rank."""
    order = SampleOrder((37,), PHASES, seed=3, shuffle=True)
    per_rank = []
    for rank in range(ranks):
        local = partition(rank, ranks)
        config = DataConfig(prefetch=prefetch)
        batches = training_batches(samples(), order, local, cursor, config, pin_memory=False)
        per_step = local.num_microbatches(12)
        per_rank.append(list(islice(batches, step * per_step, (step + 1) * per_step)))
    return [i for microbatches in zip(*per_rank, strict=True) for batch in microbatches for i in indices(batch)]


def test_every_tensor_of_a_batch_is_pinned(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.shape) or tensor)
    order = SampleOrder((37,), PHASES, seed=3, shuffle=True)
    batch = next(training_batches(samples(), order, partition(), 0, DataConfig(), pin_memory=True))
    assert batch.reference is None and pinned == [(2, SEQ)] * 4 + [(2,)]


def test_labels_are_the_next_tokens():
    batch = samples()[np.array([2, 0])]
    assert batch.tokens.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert batch.labels.tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.documents.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0]]


def test_samples_cover_every_token_once():
    assert len(samples(5)) == 5
    assert len(WrappedSamples(TokenStore(np.arange(5 * SEQ), np.array([0, 20])), SEQ, False)) == 4
    assert len(WrappedSamples(TokenStore(np.arange(0), np.array([0])), SEQ, False)) == 0
    labels = samples(5)[np.arange(5)].labels.flatten().tolist()
    assert labels == list(range(1, 21))


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_the_samples_of_a_step_do_not_depend_on_the_number_of_ranks(ranks):
    for step in range(7):
        assert step_samples(ranks, 0, step) == step_samples(1, 0, step)


def test_the_cursor_determines_the_batches_after_a_resume():
    assert step_samples(2, 24, 0) == step_samples(1, 0, 2)


def test_batches_do_not_depend_on_prefetching():
    assert step_samples(2, 12, 1, prefetch=2) == step_samples(2, 12, 1)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_samples_of_a_batch_are_their_cursor_positions_in_every_epoch(prefetch):
    order = SampleOrder((37,), PHASES, seed=3, shuffle=True)
    config = DataConfig(prefetch=prefetch)
    batches = training_batches(samples(), order, partition(rank=1, ranks=2), 36, config, pin_memory=False)
    found = [batch.samples.tolist() for batch in islice(batches, 4)]
    assert found == [[38, 39], [42, 43], [46, 47], [50, 51]]


def test_each_epoch_visits_every_sample_once_in_its_own_order():
    order = SampleOrder((37,), PHASES, seed=3, shuffle=True)
    epochs = [order(np.arange(e * 37, (e + 1) * 37)).tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    across = order(np.arange(30, 50)).tolist()
    assert across == epochs[0][30:] + epochs[1][:13]


def test_without_shuffling_samples_keep_the_order_of_the_store():
    assert SampleOrder((37,), PHASES, 3, shuffle=False)(np.arange(35, 40)).tolist() == [35, 36, 0, 1, 2]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_get_the_same_number_of_evaluation_batches(ranks):
    per_rank = [list(evaluation_batches(samples(), 7, partition(rank, ranks))) for rank in range(ranks)]
    assert len({len(batches) for batches in per_rank}) == 1
    targets = [
        label for batches in per_rank for b in batches for label in b.labels.flatten().tolist() if label != IGNORE_INDEX
    ]
    assert sorted(targets) == list(range(1, 7 * SEQ + 1))


def test_skipped_samples_are_missing_from_the_order():
    complete = SampleOrder((10,), PHASES, seed=1, shuffle=True)
    skipping = SampleOrder((10,), PHASES, seed=1, shuffle=True, skipped_samples=((3, 5), (8, 14)))
    kept = [i for i in range(40) if not (3 <= i < 5 or 8 <= i < 14)]
    assert skipping(np.arange(len(kept))).tolist() == complete(np.array(kept)).tolist()
    assert skipping.global_index(np.arange(len(kept))).tolist() == kept


# ------------------------------------------------------------ mixed and packed


LENGTHS = {"a": 5, "b": 3, "c": 6}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Three datasets, packed and mixed in two phases. No token occurs twice."""
    folder, datasets, first = tmp_path_factory.mktemp("packings"), [], 0
    for name, longest in LENGTHS.items():
        lengths = np.random.default_rng(longest).integers(2, 2 + longest, 400)
        store = TokenStore(first + np.arange(lengths.sum()), np.cumsum([0, *lengths]))
        pack(store, folder / name, 8, DataConfig(packing="best-fit"), pairs=False)
        datasets.append(PackedSamples(store, 8, read_packing(folder / name), reset_positions=True))
        first += int(lengths.sum())
    phases = parse_mixture(("0: a=0.5 b=0.3 c=0.2", "1500: a=0.1 c=0.9"), list(LENGTHS))
    samples = CombinedSamples(datasets)
    return samples, SampleOrder(tuple(map(len, datasets)), phases, seed=7, shuffle=True)


def read(mixed, ranks, first_step, last_step, prefetch=0):
    """Return a hash of the tokens of each step, accumulation by accumulation, rank by rank."""
    samples, order = mixed
    per_rank = []
    for rank in range(ranks):
        local = partition(rank, ranks)
        config = DataConfig(prefetch=prefetch)
        batches = training_batches(samples, order, local, (first_step - 1) * 16, config, pin_memory=False)
        per_rank.append(list(islice(batches, (last_step - first_step + 1) * local.num_microbatches(16))))
    microbatches = [batch.tokens for batches in zip(*per_rank, strict=True) for batch in batches]
    per_step = len(microbatches) // (last_step - first_step + 1)
    steps = [torch.cat(microbatches[i : i + per_step]) for i in range(0, len(microbatches), per_step)]
    return [hashlib.sha256(step.numpy().tobytes()).hexdigest() for step in steps]


@pytest.fixture(scope="module")
def two_hundred_steps(mixed):
    """Hashes of the steps on one rank without prefetching."""
    return read(mixed, 1, 1, 200)


@pytest.mark.parametrize(
    "runs",
    [
        [(2, 1, 200, 0)],
        [(4, 1, 200, 0)],
        [(1, 1, 200, 2)],
        [(2, 1, 200, 2)],
        [(1, 1, 40, 0), (1, 41, 111, 0), (1, 112, 200, 0)],
        [(2, 1, 76, 2), (4, 77, 150, 0), (1, 151, 200, 2)],
    ],
)
def test_two_hundred_steps_do_not_depend_on_ranks_prefetching_and_restarts(mixed, two_hundred_steps, runs):
    """runs: ranks, first and last step and microbatches loaded ahead of each; every run after the first one resumes."""
    assert len(set(two_hundred_steps)) == 200
    assert [step for run in runs for step in read(mixed, *run)] == two_hundred_steps


def test_an_epoch_of_mixed_packed_samples_has_each_document_once(mixed):
    samples, order = mixed
    indices = order(np.arange(4000))
    for i, dataset in enumerate(samples.datasets):
        size, first = len(dataset), int(samples.offsets[i])
        own = indices[(indices >= first) & (indices < first + size)] - first
        assert len(own) > 2 * size
        for epoch in range(len(own) // size):
            batch = dataset[own[epoch * size : (epoch + 1) * size]]
            targets = batch.labels[batch.labels != IGNORE_INDEX]
            assert len(targets) == len(dataset.store.tokens) - (len(dataset.store.documents) - 1)
            assert len(targets.unique()) == len(targets)

"""Which samples a step sees, and what is in them."""

import hashlib
from itertools import islice

import numpy as np
import pytest
import torch

from trainer.batch import IGNORE_INDEX
from trainer.config import DataConfig
from trainer.data.sampling.loader import BatchPartition, SampleOrder, held_out_batches, training_batches
from trainer.data.sampling.mixture import CombinedSamples, stages_of
from trainer.data.sampling.packing import pack, read_pieces
from trainer.data.sampling.samples import ConcatSamples, PackedSamples
from trainer.data.store.store import TokenStore

SEQ = 4
ONE = stages_of((), ("data",))


def samples(num_samples=37):
    """Token i is i; documents of eleven tokens."""
    tokens = np.arange(num_samples * SEQ + 1)
    return ConcatSamples(TokenStore(tokens, np.append(np.arange(0, len(tokens), 11), len(tokens))), SEQ, restart=False)


def cut(rank=0, ranks=1, global_batch_size=12, local_batch_size=2):
    return BatchPartition(
        global_batch_size=global_batch_size, local_batch_size=local_batch_size, rank=rank, ranks=ranks
    )


def numbers(batch):
    """Which samples are in a batch."""
    return (batch.tokens[:, 0] // SEQ).tolist()


def step_samples(ranks, cursor, step, num_workers=0):
    """The samples of a step, accumulation by accumulation, rank by rank."""
    order = SampleOrder((37,), ONE, seed=3, shuffle=True)
    per_rank = []
    for rank in range(ranks):
        mine = cut(rank, ranks)
        config = DataConfig(num_workers=num_workers)
        batches = training_batches(samples(), order, mine, cursor, config, pin_memory=False)
        per_rank.append(list(islice(batches, step * mine.grad_accum, (step + 1) * mine.grad_accum)))
    return [n for leaves in zip(*per_rank, strict=True) for batch in leaves for n in numbers(batch)]


def test_labels_are_the_next_tokens():
    batch = samples().batch(np.array([2, 0]))
    assert batch.tokens.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert batch.labels.tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.documents.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0]]


def test_samples_cover_every_token_once():
    assert len(samples(5)) == 5
    assert len(ConcatSamples(TokenStore(np.arange(5 * SEQ), np.array([0, 20])), SEQ, False)) == 4
    assert len(ConcatSamples(TokenStore(np.arange(0), np.array([0])), SEQ, False)) == 0
    labels = samples(5).batch(np.arange(5)).labels.flatten().tolist()
    assert labels == list(range(1, 21))


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_the_samples_of_a_step_do_not_depend_on_the_ranks(ranks):
    for step in range(7):
        assert step_samples(ranks, 0, step) == step_samples(1, 0, step)


def test_the_cursor_says_where_to_go_on():
    assert step_samples(2, 24, 0) == step_samples(1, 0, 2)


def test_workers_change_nothing():
    assert step_samples(2, 12, 1, num_workers=2) == step_samples(2, 12, 1)


def test_each_epoch_visits_every_sample_once_in_an_order_of_its_own():
    order = SampleOrder((37,), ONE, seed=3, shuffle=True)
    epochs = [order(np.arange(e * 37, (e + 1) * 37)).tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    across = order(np.arange(30, 50)).tolist()
    assert across == epochs[0][30:] + epochs[1][:13]


def test_without_shuffling_samples_come_as_stored():
    assert SampleOrder((37,), ONE, 3, shuffle=False)(np.arange(35, 40)).tolist() == [35, 36, 0, 1, 2]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_held_out_batches_come_even_on_all_ranks(ranks):
    per_rank = [list(held_out_batches(samples(), 7, cut(rank, ranks))) for rank in range(ranks)]
    assert len({len(batches) for batches in per_rank}) == 1
    targets = [
        label for batches in per_rank for b in batches for label in b.labels.flatten().tolist() if label != IGNORE_INDEX
    ]
    assert sorted(targets) == list(range(1, 7 * SEQ + 1))


def test_samples_that_are_passed_over_are_left_out_of_the_order():
    whole = SampleOrder((10,), ONE, seed=1, shuffle=True)
    some = SampleOrder((10,), ONE, seed=1, shuffle=True, skipped_samples=((3, 5), (8, 14)))
    places = [p for p in range(40) if not (3 <= p < 5 or 8 <= p < 14)]
    assert some(np.arange(len(places))).tolist() == whole(np.array(places)).tolist()
    assert some.place(np.arange(len(places))).tolist() == places


# ------------------------------------------------------------ mixed and packed


LENGTHS = {"a": 5, "b": 3, "c": 6}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Three datasets of documents, packed and mixed in two stages; each document has tokens of its own."""
    folder, parts, first = tmp_path_factory.mktemp("packings"), [], 0
    for name, longest in LENGTHS.items():
        lengths = np.random.default_rng(longest).integers(2, 2 + longest, 400)
        store = TokenStore(first + np.arange(lengths.sum()), np.cumsum([0, *lengths]))
        pack(store, folder / name, 8, DataConfig(packing="best-fit"))
        parts.append(PackedSamples(store, 8, read_pieces(folder / name), restart=True))
        first += int(lengths.sum())
    stages = stages_of(("0: a=0.5 b=0.3 c=0.2", "1500: a=0.1 c=0.9"), list(LENGTHS))
    samples = CombinedSamples(parts)
    return samples, SampleOrder(tuple(map(len, parts)), stages, seed=7, shuffle=True)


def read(mixed, ranks, first_step, last_step, workers=0):
    """Hash of the tokens of each step: accumulation by accumulation, rank by rank."""
    samples, order = mixed
    per_rank = []
    for rank in range(ranks):
        mine = cut(rank, ranks, global_batch_size=16)
        config = DataConfig(num_workers=workers)
        batches = training_batches(samples, order, mine, (first_step - 1) * 16, config, pin_memory=False)
        per_rank.append(list(islice(batches, (last_step - first_step + 1) * mine.grad_accum)))
    leaves = [batch.tokens for of_all in zip(*per_rank, strict=True) for batch in of_all]
    each = len(leaves) // (last_step - first_step + 1)
    steps = [torch.cat(leaves[i : i + each]) for i in range(0, len(leaves), each)]
    return [hashlib.sha256(step.numpy().tobytes()).hexdigest() for step in steps]


@pytest.mark.parametrize(
    "stretches",
    [
        [(2, 1, 200, 0)],
        [(4, 1, 200, 0)],
        [(1, 1, 200, 2)],
        [(2, 1, 200, 2)],
        [(1, 1, 40, 0), (1, 41, 111, 0), (1, 112, 200, 0)],
        [(2, 1, 76, 2), (4, 77, 150, 0), (1, 151, 200, 2)],
    ],
)
def test_two_hundred_steps_are_the_same_whoever_reads_them(mixed, stretches):
    """stretches: ranks, first and last step, workers; with every stretch the run is started again."""
    expected = read(mixed, 1, 1, 200)
    assert len(set(expected)) == 200
    assert [step for stretch in stretches for step in read(mixed, *stretch)] == expected


def test_mixed_and_packed_no_document_is_missing_or_comes_twice_in_an_epoch(mixed):
    samples, order = mixed
    numbers = order(np.arange(4000))
    for dataset, part in enumerate(samples.parts):
        first = int(samples.firsts[dataset])
        mine = numbers[(numbers >= first) & (numbers < first + len(part))] - first
        assert len(mine) > 2 * len(part)
        for epoch in range(len(mine) // len(part)):
            batch = part.batch(mine[epoch * len(part) : (epoch + 1) * len(part)])
            targets = batch.labels[batch.labels != IGNORE_INDEX]
            documents = part.store.documents
            assert len(targets) == len(part.store.tokens) - (len(documents) - 1)
            assert len(targets.unique()) == len(targets)

import numpy as np
import pytest

from trainer.data.sampling.permutation import permute, scatter


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 100, 1023, 4097])
def test_it_is_a_permutation(size):
    assert sorted(permute(np.arange(size), size, 7, 0)) == list(range(size))


def test_each_key_gives_another_order():
    orders = {tuple(permute(np.arange(50), 50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_single_places_do_not_need_the_others():
    whole = permute(np.arange(1000), 1000, 3)
    assert [int(permute(np.array([i]), 1000, 3)[0]) for i in (0, 17, 999)] == [whole[0], whole[17], whole[999]]


def test_the_order_is_part_of_the_format():
    """A run that resumes with a newer version must see the same batches."""
    assert permute(np.arange(10), 10, 1, 2).tolist() == [4, 5, 2, 9, 0, 8, 3, 1, 7, 6]


def test_it_is_mixed_well():
    """Neighbours land far apart, and every place is about equally often each image."""
    images = permute(np.arange(10_000), 10_000, 1)
    assert 3200 < np.abs(np.diff(images)).mean() < 3500  # a third of the range for a random order
    firsts = [int(permute(np.array([0]), 16, seed)[0]) for seed in range(1600)]
    assert np.bincount(firsts, minlength=16).min() > 60


def test_scattered_numbers_are_spread_evenly_and_differ_by_key():
    index = np.arange(40_000)
    numbers = scatter(index, 1, 2)
    assert numbers.dtype == np.uint64 and len(np.unique(numbers)) == len(numbers)
    counts = np.bincount((numbers >> np.uint64(60)).astype(np.int64), minlength=16)
    assert abs(counts - 2500).max() < 250  # five deviations
    assert not (scatter(index, 1, 3) == numbers).any()
    assert (scatter(index[10:], 1, 2) == numbers[10:]).all()

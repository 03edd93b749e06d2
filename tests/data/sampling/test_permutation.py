import numpy as np
import pytest

from trainer.data.sampling.permutation import hash_index, permute


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 100, 1023, 4097])
def test_images_of_a_range_are_a_permutation_of_it(size):
    assert sorted(permute(np.arange(size), size, 7, 0)) == list(range(size))


def test_each_key_gives_a_different_order():
    orders = {tuple(permute(np.arange(50), 50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_single_indices_are_permuted_without_the_others():
    images = permute(np.arange(1000), 1000, 3)
    assert [int(permute(np.array([i]), 1000, 3)[0]) for i in (0, 17, 999)] == [images[0], images[17], images[999]]


def test_each_index_may_have_its_own_key():
    index, epochs = np.arange(60) % 12, np.arange(60) // 7
    expected = [int(permute(index[i : i + 1], 12, 3, int(epochs[i]), 2)[0]) for i in range(60)]
    assert permute(index, 12, 3, epochs, 2).tolist() == expected


def test_the_order_is_part_of_the_format():
    """A run that resumes with a newer version of the trainer must see the same batches."""
    assert permute(np.arange(10), 10, 1, 2).tolist() == [4, 5, 2, 9, 0, 8, 3, 1, 7, 6]


def test_the_permutation_looks_random():
    """The images of neighbours are far apart, and all images of an index are about equally frequent over the keys."""
    images = permute(np.arange(10_000), 10_000, 1)
    assert 3200 < np.abs(np.diff(images)).mean() < 3500  # the mean is a third of the range in a random order
    firsts = [int(permute(np.array([0]), 16, seed)[0]) for seed in range(1600)]
    assert np.bincount(firsts, minlength=16).min() > 60


def test_hashes_are_uniform_and_differ_by_key():
    index = np.arange(40_000)
    hashes = hash_index(index, 1, 2)
    assert hashes.dtype == np.uint64 and len(np.unique(hashes)) == len(hashes)
    counts = np.bincount((hashes >> np.uint64(60)).astype(np.int64), minlength=16)
    assert abs(counts - 2500).max() < 250  # five standard deviations
    assert not (hash_index(index, 1, 3) == hashes).any()
    assert (hash_index(index[10:], 1, 2) == hashes[10:]).all()

"""Shares of several datasets: exact, and from any place on without history."""

import numpy as np
import pytest

from trainer.batch import Batch
from trainer.config import ConfigError
from trainer.data.sampling.loader import SampleOrder
from trainer.data.sampling.mixture import PERIOD, CombinedSamples, phases_of
from trainer.data.sampling.samples import ConcatSamples
from trainer.data.store.store import TokenStore

NAMES = ("web", "code", "math")


def order(*mixture, sizes=(1000, 700, 30), names=NAMES, shuffle=True):
    return SampleOrder(sizes, phases_of(mixture, names), seed=3, shuffle=shuffle)


def shares(numbers, sizes=(1000, 700, 30)):
    return np.histogram(numbers, np.cumsum([0, *sizes]))[0].tolist()


def test_any_stretch_has_the_shares_to_within_a_sample():
    mixed = order("0: web=0.5 code=0.3 math=0.2")
    draw = np.random.default_rng(0)
    for start, length in draw.integers(1, 3 * PERIOD, (50, 2)).tolist():
        found = shares(mixed(np.arange(start, start + length)))
        assert all(abs(f - w * length) <= 2 for f, w in zip(found, (0.5, 0.3, 0.2), strict=True)), (
            start,
            length,
            found,
        )
    assert shares(mixed(np.arange(PERIOD))) == [5000, 3000, 2000]


def test_each_dataset_goes_through_all_its_samples_before_one_comes_again():
    numbers = order("0: web=0.5 code=0.3 math=0.2")(np.arange(20_000))
    for first, size in ((0, 1000), (1000, 700), (1700, 30)):
        mine = numbers[(numbers >= first) & (numbers < first + size)] - first
        for epoch in range(len(mine) // size):
            assert sorted(mine[epoch * size : (epoch + 1) * size]) == list(range(size))
        assert len(mine) > 2 * size


def test_a_stage_changes_the_shares_and_goes_on_where_each_dataset_was():
    mixed = order("0: web=1 code=1", "1001: code=1 math=3", "30005: web=1")
    numbers = mixed(np.arange(40_000))
    assert shares(numbers[:1001]) in ([501, 500, 0], [500, 501, 0])
    assert shares(numbers[1001:30005])[0] == 0
    for first, size in ((0, 1000), (1000, 700), (1700, 30)):
        mine = numbers[(numbers >= first) & (numbers < first + size)] - first
        for epoch in range(len(mine) // size):
            assert sorted(mine[epoch * size : (epoch + 1) * size]) == list(range(size))
    for places in (np.array([39_999, 5, 1000, 1001, 20_000]), np.arange(29_990, 30_020)):
        assert (mixed(places) == numbers[places]).all()


def test_one_dataset_is_in_the_order_that_it_has_alone():
    alone = order(sizes=(37,), names=("a",))
    assert (
        order("0: web=1 code=0", sizes=(37, 5), names=("web", "code"))(np.arange(200)) == alone(np.arange(200))
    ).all()


@pytest.mark.parametrize(
    ("mixture", "problem"),
    [
        (("web=1",), "'web=1': expected 'START: NAME=WEIGHT ...', such as '0: web=0.7 code=0.3'"),
        (("-1: web=1",), "'-1: web=1': expected 'START: NAME=WEIGHT ...', such as '0: web=0.7 code=0.3'"),
        (("5: web=1",), "'5: web=1': the first stage must start at 0"),
        (("0: web=1", "0: code=1"), "'0: code=1': must start behind the one before"),
        (("0: wbe=1",), "'0: wbe=1': wbe is no dataset of [data] datasets; did you mean 'web'?"),
        (("0: web",), "'0: web': the weight of web must be a number from 0 on"),
        (("0: web=-1",), "'0: web=-1': the weight of web must be a number from 0 on"),
        (("0: web=nan",), "'0: web=nan': the weight of web must be a number from 0 on"),
        (("0: web=1 web=2",), "'0: web=1 web=2': a dataset is named twice"),
        (("0: web=0",), "'0: web=0': some weight must be above 0"),
        (("0:",), "'0:': some weight must be above 0"),
        (("0: web=1 code=1e-6",), "'0: web=1 code=1e-6': the weight of code is less than 1/10000 of all"),
    ],
)
def test_a_mixture_that_is_none_is_refused(mixture, problem):
    with pytest.raises(ConfigError) as error:
        phases_of(mixture, NAMES)
    assert (error.value.key, error.value.rule) == ("data.mixture", problem)


def test_combined_samples_are_those_of_each_dataset():
    def numbered(first, samples):
        tokens = np.arange(first, first + 4 * samples + 1)
        return ConcatSamples(TokenStore(tokens, np.array([0, len(tokens)])), 4, restart=False)

    both = CombinedSamples([numbered(0, 3), numbered(1000, 2)])
    assert len(both) == 5
    assert both.batch(np.array([4, 0, 3])).tokens[:, 0].tolist() == [1004, 0, 1000]
    assert both.batch(np.array([3, 4])).tokens[:, 0].tolist() == [1000, 1004]
    mixed = both.batch(np.array([-1, 4]))
    assert isinstance(mixed, Batch) and (mixed.labels[0] == -100).all() and mixed.labels[1, 0] == 1005

"""Mixtures of datasets: exact weights, and the same order from any global index without history."""

from dataclasses import replace

import numpy as np
import pytest

from trainer.base.config import ConfigError
from trainer.batch import Batch
from trainer.data.sampling import loader
from trainer.data.sampling.loader import SampleOrder
from trainer.data.sampling.mixture import CombinedSamples, require_unchanged_phases
from trainer.data.sampling.permutation import permute
from trainer.data.sampling.phases import PERIOD, parse_mixture, samples_of_epoch
from trainer.data.sampling.samples import WrappedSamples
from trainer.data.store.store import TokenStore

NAMES = ("web", "code", "math")


def order(*mixture, sizes=(1000, 700, 30), names=NAMES, shuffle=True):
    return SampleOrder(sizes, parse_mixture(mixture, names), seed=3, shuffle=shuffle)


def samples_per_dataset(indices, sizes=(1000, 700, 30)):
    return np.histogram(indices, np.cumsum([0, *sizes]))[0].tolist()


def test_weights_hold_over_any_span_to_within_two_samples():
    mixed = order("0: web=0.5 code=0.3 math=0.2")
    draw = np.random.default_rng(0)
    for start, length in draw.integers(1, 3 * PERIOD, (50, 2)).tolist():
        counts = samples_per_dataset(mixed(np.arange(start, start + length)))
        deviations = [abs(count - w * length) for count, w in zip(counts, (0.5, 0.3, 0.2), strict=True)]
        assert max(deviations) <= 2, (start, length, counts)
    assert samples_per_dataset(mixed(np.arange(PERIOD))) == [5000, 3000, 2000]


def test_each_dataset_is_exhausted_before_a_sample_repeats():
    indices = order("0: web=0.5 code=0.3 math=0.2")(np.arange(20_000))
    for first, size in ((0, 1000), (1000, 700), (1700, 30)):
        own = indices[(indices >= first) & (indices < first + size)] - first
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
        assert len(own) > 2 * size


def test_small_datasets_are_permuted_in_one_call_for_all_their_epochs(monkeypatch):
    """A call takes as long for one index as for hundreds. A dataset of one sample has an epoch for each of its indices."""
    calls = []
    monkeypatch.setattr(loader, "permute", lambda index, *key: calls.append(key) or permute(index, *key))
    indices = order(sizes=(1, 2, 1000))(np.arange(9000))
    assert len(calls) == 3 and samples_per_dataset(indices, (1, 2, 1000)) == [3000, 3000, 3000]
    epochs = indices[(indices == 1) | (indices == 2)].reshape(-1, 2)
    assert set(map(tuple, epochs.tolist())) == {(1, 2), (2, 1)}


def test_a_phase_changes_the_weights_and_continues_the_epoch_of_each_dataset():
    mixed = order("0: web=1 code=1", "1001: code=1 math=3", "30005: web=1")
    indices = mixed(np.arange(40_000))
    assert samples_per_dataset(indices[:1001]) in ([501, 500, 0], [500, 501, 0])
    assert samples_per_dataset(indices[1001:30005])[0] == 0
    for first, size in ((0, 1000), (1000, 700), (1700, 30)):
        own = indices[(indices >= first) & (indices < first + size)] - first
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
    for cursors in (np.array([39_999, 5, 1000, 1001, 20_000]), np.arange(29_990, 30_020)):
        assert (mixed(cursors) == indices[cursors]).all()


def test_a_mixture_of_one_dataset_has_the_order_of_that_dataset():
    alone = order(sizes=(37,), names=("a",))
    mixed = order("0: web=1 code=0", sizes=(37, 5), names=("web", "code"))
    assert (mixed(np.arange(200)) == alone(np.arange(200))).all()


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        (("web=1",), "'web=1': expected 'START: NAME=WEIGHT ...', such as '0: web=0.7 code=0.3'"),
        (("\u0660: web=1",), "'\u0660: web=1': expected 'START: NAME=WEIGHT ...', such as '0: web=0.7 code=0.3'"),
        (("-1: web=1",), "'-1: web=1': expected 'START: NAME=WEIGHT ...', such as '0: web=0.7 code=0.3'"),
        (("5: web=1",), "'5: web=1': the first phase must start at 0"),
        (("0: web=1", "0: code=1"), "'0: code=1': this phase must start after the previous phase"),
        (("0: wbe=1",), "'0: wbe=1': wbe is not defined in data.datasets; did you mean 'web'?"),
        (("0: web",), "'0: web': the weight of web must be a number from 0 to 1e+18"),
        (("0: web=-1",), "'0: web=-1': the weight of web must be a number from 0 to 1e+18"),
        (("0: web=nan",), "'0: web=nan': the weight of web must be a number from 0 to 1e+18"),
        (("0: web=1e308 code=1e308",), "'0: web=1e308 code=1e308': the weight of web must be a number from 0 to 1e+18"),
        (
            ("0: web=1", f"{10**30}: code=1"),
            f"'{10**30}: code=1': a phase must start at 1000000000000000000 or earlier",
        ),
        (("9" * 5000 + ":",), f"'{'9' * 5000}:': a phase must start at 1000000000000000000 or earlier"),
        (("0: web=1 web=2",), "'0: web=1 web=2': this phase names a dataset twice"),
        (("0: web=0",), "'0: web=0': at least one weight must be positive"),
        (("0:",), "'0:': at least one weight must be positive"),
        (("0: web=1 code=1e-6",), "'0: web=1 code=1e-6': the weight of code is less than 1/10000 of the total"),
    ],
)
def test_an_invalid_mixture_is_an_error(mixture, message):
    with pytest.raises(ConfigError) as error:
        parse_mixture(mixture, NAMES)
    assert (error.value.key, error.value.message) == ("data.mixture", message)


def test_a_phase_that_has_started_cannot_change():
    saved = [[phase.start, *phase.quotas] for phase in parse_mixture(("0: web=7 code=3", "100: math=1"), NAMES)]
    require_unchanged_phases(saved, parse_mixture(("0: web=7 code=3", "200: code=1"), NAMES), 100)
    with pytest.raises(ConfigError) as error:
        require_unchanged_phases(saved, parse_mixture(("0: web=0.6 code=0.4",), NAMES), 101)
    assert (error.value.key, error.value.message) == (
        "data.mixture",
        "phases that have already started cannot be changed (was web=0.7 code=0.3 from sample 0; math=1 from sample 100, now "
        "web=0.6 code=0.4 from sample 0); add a new phase starting at sample 101 or later",
    )


def test_combined_samples_index_the_datasets_one_after_the_other():
    def counting(first, num_samples):
        tokens = np.arange(first, first + 4 * num_samples + 1)
        return WrappedSamples(TokenStore(tokens, np.array([0, len(tokens)])), 4, reset_positions=False)

    both = CombinedSamples([counting(0, 3), counting(1000, 2)])
    assert len(both) == 5
    assert both[np.array([4, 0, 3])].tokens[:, 0].tolist() == [1004, 0, 1000]
    assert both[np.array([3, 4])].tokens[:, 0].tolist() == [1000, 1004]
    mixed = both[np.array([-1, 4])]
    assert isinstance(mixed, Batch) and (mixed.labels[0] == -100).all() and mixed.labels[1, 0] == 1005


@pytest.mark.parametrize("skipped", [(), ((10, 20),), ((0, 5), (990, 1010), (4000, 5000))])
def test_a_phase_starts_at_the_first_cursor_position_with_its_samples(skipped):
    mixed = replace(order("0: web=1", "1000: code=1", "4500: math=1"), skipped_samples=skipped)
    positions = mixed.global_index(np.arange(6000))
    assert mixed.phase_starts() == [(int(np.searchsorted(positions, phase.start)), phase) for phase in mixed.phases]


def test_a_phase_without_samples_does_not_start():
    mixed = replace(order("0: web=1", "1000: code=1", "1050: math=1"), skipped_samples=((990, 1060),))
    assert [(start, phase.weights) for start, phase in mixed.phase_starts()] == [
        (0, {"web": 1.0}),
        (990, {"math": 1.0}),
    ]


@pytest.mark.parametrize(
    "mixture", [("0: web=0.5 code=0.3 math=0.2",), ("0: web=1", "300: code=1 web=3", "12000: math=1"), ()]
)
def test_the_epoch_of_a_dataset_ends_in_the_phase_that_has_its_last_sample(mixture):
    mixed = order(*mixture)
    for i, (name, size) in enumerate(zip(NAMES, mixed.sizes, strict=True)):
        end = samples_of_epoch(mixed.phases, name, size)
        assert end is not None and abs(mixed.consumed(round(end))[i] - size) <= 2, name


def test_a_dataset_without_weight_has_no_epoch():
    assert samples_of_epoch(order("0: web=1 code=1", "100: web=1").phases, "code", 700) is None

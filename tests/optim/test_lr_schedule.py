"""Learning-rate schedules."""

import math

import pytest

from trainer.base.config import LrScheduleConfig
from trainer.optim.lr_schedule import lr_factor


def learning_rates(steps, **settings):
    return [lr_factor(LrScheduleConfig(**settings), step, steps) for step in range(1, steps + 1)]


def test_warm_up_rises_linearly_and_reaches_the_peak():
    assert learning_rates(10, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_ends_at_the_minimum():
    values = learning_rates(104, warmup_steps=4, min_lr_ratio=0.1)
    assert values[53] == pytest.approx(0.55)  # halfway between warm-up and end
    assert values[28] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert values[-1] == pytest.approx(0.1)
    assert values[4:] == sorted(values[4:], reverse=True)


def test_linear_decays_in_equal_steps():
    values = learning_rates(10, name="linear", warmup_steps=0, min_lr_ratio=0.0)
    assert values == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0])


def test_warmup_stable_decay_stays_at_the_peak_until_the_decay():
    values = learning_rates(10, name="warmup_stable_decay", warmup_steps=2, decay_steps=4, min_lr_ratio=0.2)
    assert values == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_constant_stays_at_exactly_the_peak_after_the_warm_up():
    assert learning_rates(6, name="constant", warmup_steps=2, min_lr_ratio=0.3) == [0.5, 1, 1, 1, 1, 1]


def test_a_run_shorter_than_its_warm_up_consists_of_warm_up():
    assert learning_rates(3, warmup_steps=10) == pytest.approx([0.1, 0.2, 0.3])
    assert learning_rates(1, warmup_steps=0) == pytest.approx([0.1])


def test_a_range_test_rises_by_equal_factors_to_the_peak():
    assert learning_rates(5, name="range_test", min_lr_ratio=1e-4) == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1.0])
    assert learning_rates(1, name="range_test", min_lr_ratio=1e-4) == pytest.approx([1e-4])

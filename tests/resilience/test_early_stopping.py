"""When the loss on an evaluation dataset, or the score of a task, no longer improves."""

import math

import pytest

from trainer.base.config import EvaluationConfig, TaskConfig
from trainer.resilience.early_stopping import EarlyStopping
from trainer.state import TrainState


def policy(patience, min_delta=0.0, identity="data"):
    settings = {"early_stopping_patience": patience, "early_stopping_min_delta": min_delta}
    return EarlyStopping(EvaluationConfig(keep_best_on="held_out", **settings), identity)


def first_reason(stopping, losses):
    """Return the number of evaluations after which the run ends, and why."""
    state = TrainState()
    for count, loss in enumerate(losses, 1):
        stopping.observe(state, "other", {"loss": 0.0})
        stopping.observe(state, "held_out", {"loss": loss})
        state = TrainState.from_json(state.to_json())
        if reason := stopping.reason(state):
            return count, reason
    return 0, ""


@pytest.mark.parametrize(
    ("patience", "min_delta", "losses", "count", "reason"),
    [
        (2, 0.0, [3.0, 2.0, 2.0, 2.5], 4, "has not fallen below 2.0000 in 2 evaluations"),
        (1, 0.0, [3.0, 2.0, 1.0, 1.5], 4, "has not fallen below 1.0000 in 1 evaluation"),
        (2, 0.1, [3.0, 2.95, 2.92, 1.0], 3, "has not fallen below 3.0000 by more than 0.1 in 2 evaluations"),
        (2, 0.1, [3.0, 2.95, 2.89, 2.88], 0, ""),
        (2, 0.0, [3.0, math.nan, 2.9, math.inf, math.nan], 5, "has not fallen below 2.9000 in 2 evaluations"),
        (2, 0.0, [math.nan, math.nan, 1.0], 2, "has not been finite in 2 evaluations"),
        (0, 0.0, [1.0, 2.0, 3.0, 4.0], 0, ""),
    ],
)
def test_a_run_ends_after_evaluations_without_a_falling_loss(patience, min_delta, losses, count, reason):
    expected = f"the loss on held_out {reason}" if reason else ""
    assert first_reason(policy(patience, min_delta), losses) == (count, expected)


@pytest.mark.parametrize(
    ("metric", "values", "count", "reason"),
    [
        ("acc", [0.2, 0.4, 0.3, 0.35], 4, "acc on arc has not risen above 0.4000 by more than 0.01 in 2 evaluations"),
        ("acc", [0.2, 0.25, 0.3, 0.35], 0, ""),
        ("bits_per_byte", [1.0, 0.9, 0.95, 1.2], 4, "has not fallen below 0.9000 by more than 0.01 in 2 evaluations"),
        ("bits_per_byte", [1.0, 0.9, 0.8, 0.7], 0, ""),
    ],
)
def test_a_score_rises_and_bits_per_byte_fall(metric, values, count, reason):
    tasks = {"arc": TaskConfig(path="arc.jsonl")}
    settings = {"early_stopping_patience": 2, "early_stopping_min_delta": 0.01, "tasks": tasks}
    stopping = EarlyStopping(EvaluationConfig(keep_best_on=f"arc/{metric}", **settings), "task")
    state, ended = TrainState(), 0
    for number, value in enumerate(values, 1):
        stopping.observe(state, "held_out", {"loss": 0.0})
        stopping.observe(state, "arc", {"acc": 0.0, "bits_per_byte": 0.0} | {metric: value})
        if not ended and stopping.reason(state):
            ended = number
    assert ended == count
    assert stopping.reason(state).endswith(reason)
    assert bool(stopping.reason(state)) == bool(reason)


def test_other_data_or_more_patience_continue_a_run_that_had_stopped():
    state = TrainState()
    for loss in (1.0, 2.0, 3.0):
        policy(2).observe(state, "held_out", {"loss": loss})
    assert policy(2).reason(state)
    assert not policy(3).reason(state)
    assert not policy(2, identity="other").reason(state)
    assert not policy(0).reason(state)


def test_a_rollback_restores_what_the_checkpoint_had_counted():
    saved, state = TrainState(), TrainState()
    policy(2).observe(saved, "held_out", {"loss": 1.0})
    for loss in (1.0, 2.0, 3.0):
        policy(2).observe(state, "held_out", {"loss": loss})
    state.resume_from(saved)
    assert state.early_stopping == ["data", 1.0, 0]
    policy(2).observe(state, "held_out", {"loss": 2.0})
    assert saved.early_stopping == ["data", 1.0, 0]


def test_a_checkpoint_of_an_earlier_version_has_counted_nothing():
    text = TrainState(step=3).to_json().replace(' "early_stopping": [],\n', "")
    assert "early_stopping" not in text
    assert TrainState.from_json(text) == TrainState(step=3)

"""The health of a run: losses that do not fall, and gradients that vanish, are said at its end."""

import json
import math

import pytest

from tests.training_runs import checkpoint_of, combine, in_folder, records, train
from trainer.resilience.health import observe, problem_at_end
from trainer.state import TrainState


@pytest.mark.parametrize(
    ("losses", "warned_at"),
    [
        ([10.0] * 10 + [16.0] * 200, 110),
        ([10.0] * 10 + [14.0] * 200, 0),  # above, but not far
        ([10.0] * 10 + ([16.0] * 99 + [9.0]) * 3, 0),  # returns each time
        ([10.0] * 10 + [math.nan, 16.0] * 120, 210),
        ([0.1] * 10 + [0.5] * 200, 0),
        ([-2.0] * 10 + [-0.5] * 200, 110),
        ([10.0 - 0.01 * n for n in range(300)], 0),
    ],
)
def test_a_run_whose_loss_stays_far_above_its_start_is_one_warning(losses, warned_at, monkeypatch):
    lines, state = [], TrainState()
    monkeypatch.setattr("trainer.base.system.console.warning", lines.append)
    for step, loss in enumerate(losses, 1):
        state = TrainState.from_json(state.to_json())  # each step in another process
        observe(state, step, loss, 1.0)
    assert [line.partition(":")[0] for line in lines] == [f"step {warned_at}"] * bool(warned_at)
    if losses[-1] == 16.0 and warned_at == 110:
        assert "the loss was 10 at the start and has been above 15 for 100 steps: the run diverges;" in lines[0]


def state_after(losses, norms=None):
    state = TrainState(step=len(losses))
    for step, loss in enumerate(losses, 1):
        observe(state, step, loss, 1.0 if norms is None else norms[step - 1])
    return state


ADVICE = "; a lower learning rate or a longer warm-up may help"
START = [10.0, 8.0, 11.0, 9.0, 10.0, 10.0, 10.0, 9.5, 10.5, 10.0]
FALLING = [10.0 - 0.1 * n for n in range(30)]


@pytest.mark.parametrize(
    ("losses", "norms", "problem"),
    [
        (FALLING, None, ""),
        (FALLING + [7.0] * 30, None, ""),  # it has stopped to fall, but far below
        (START + [10.0] * 30, None, "the loss was 10 at the start, and not below it in the last 30 steps"),
        (START + [12.0] * 9, None, ""),  # too few steps to tell
        (START + [12.0] * 10, None, "the loss was 10 at the start, and not below it in the last 10 steps"),
        (START + [9.0] * 70 + [12.0] * 20, None, ""),  # less than a quarter of the steps
        (START + [9.0] * 60 + [12.0] * 30, None, "the loss was 10 at the start, and not below it in the last 30 steps"),
        (START + [10.1, 9.9] * 50, None, ""),  # noise around a loss that cannot fall further
        (START + [math.nan, 10.5] * 20, None, "the loss was 10 at the start, and not below it in the last 20 steps"),
        (
            FALLING,
            [1.0] * 20 + [0.0] * 10,
            "the gradient was 0 in the last 10 steps, so that the model no longer learns",
        ),
        (FALLING, [0.0] * 20 + [1.0] * 10, ""),
        (
            FALLING,
            [1.0] * 10 + [1e-12] * 20,
            "the gradient was 0 in the last 20 steps, so that the model no longer learns",
        ),
        ([5.0] * 4, [0.0] * 4, ""),
        ([8.0] + [200.0] * 40, None, "the loss was 8.4 at the start, and not below it in the last 31 steps"),
    ],
)
def test_a_run_that_has_not_learned_says_so_at_its_end(losses, norms, problem):
    assert problem_at_end(state_after(losses, norms)) == (problem + ADVICE if problem else "")


@pytest.mark.parametrize("resumed", [False, True])
def test_a_dead_run_ends_with_a_warning_in_its_last_line_and_in_its_records(ranks, tiny, tmp_path, resumed):
    folder = tmp_path / "run"
    flags = ["--optimizer.lr", "10", "--lr_schedule.warmup_steps", "0", "--lr_schedule.min_lr_ratio", "1.0"]
    argv = [*tiny, *in_folder(folder), *flags, "--training.steps", "24"]
    if resumed:
        ranks(1).run(train, combine([*argv, "--training.steps", "12"]))
        assert json.loads((checkpoint_of(folder) / "train_state.json").read_text())["health"][0]
    ranks(1).run(train, combine(argv))
    log = (folder / "log.txt").read_text().splitlines()
    assert " warning: done: step 24, " in log[-1] and log[-1].endswith(ADVICE)
    *_, end = records(folder, "end")
    assert end["ending"] == "finished" and log[-1].endswith(end["problem"])


def test_a_run_that_learns_ends_without_a_warning(ranks, tiny, tmp_path):
    ranks(1).run(train, combine([*tiny, *in_folder(tmp_path / "run"), "--training.steps", "24"]))
    assert " done: step 24, " in (tmp_path / "run" / "log.txt").read_text().splitlines()[-1]
    (end,) = records(tmp_path / "run", "end")
    assert end["ending"] == "finished" and "problem" not in end

"""Epochs, early stopping, the best checkpoint, samples and dry runs: equal on every layout, after a resume and a rollback."""

import json
import shutil
from unittest import mock

import pytest
import torch.distributed as dist

from tests.tools.test_dry_run import dry
from tests.training_runs import checkpoint_of, combine, in_folder, largest_deviation, records, trainer_from
from trainer.base.config import EvaluationConfig
from trainer.base.config.checkpoints import best_step
from trainer.base.system import console
from trainer.base.system.run_files import step_of
from trainer.resilience.early_stopping import EarlyStopping
from trainer.state import TrainState
from trainer.tools.report.figures import figures_of
from trainer.tools.report.run import read_run

SETTINGS = {
    "training.epochs": "0.15",  # of 743 samples: 14 steps
    "optimizer.lr": "1.0",
    "lr_schedule.warmup_steps": "14",  # the rate rises until it degrades the model
    "evaluation.interval_steps": "2",
    "evaluation.max_samples": "16",
    "evaluation.keep_best_on": "held_out",
    "evaluation.early_stopping_patience": "2",
    "samples.prompts": '["the ", "of and", "to be"]',  # more than the rows of one rank's microbatch
    "samples.interval_steps": "2",
    "samples.max_new_tokens": "5",
    "checkpoint.interval_steps": "3",
    "checkpoint.keep": "1",
}
ARGV = [word for key, value in SETTINGS.items() for word in (f"--{key}", value)]
ROLLBACK = ["--resilience.max_consecutive_skips", "2", "--resilience.on_max_skips", "rollback"]
ROLLBACK += ["--checkpoint.interval_steps", "50"]  # a rollback returns to the best checkpoint
FAULTY = (5, 6)
"""Steps whose gradients are not finite."""
LAYOUTS = ["dp_shard", "tp", "pp", "cp"]


def train(argv, stop_after=0, faulty=()):
    """Train until the run ends by itself, or is asked to stop. Return its number of steps, the last one, and what it has
    logged in between.

    Args:
        argv: Command line.
        stop_after: Step after which the run is asked to stop; with faulty steps, after the rollback.
        faulty: Steps in which the gradients are not finite, until a rollback.
    """
    trainer = trainer_from(combine(argv))
    info = console.info
    engine, state, clip = trainer.engine, trainer.state, trainer.engine.optimizer.clip

    def faulty_clip(max_norm, vote):
        if state.step + 1 in faulty and dist.get_rank() == 0 and not state.rollbacks:
            next(iter(engine.parameters.values())).grad.mul_(float("nan"))
        asked = state.step + 1 == stop_after and (state.rollbacks or not faulty)
        return clip(max_norm, vote or asked)

    engine.optimizer.clip = faulty_clip
    with mock.patch.object(console, "info", side_effect=info) as logged:
        trainer.train()
    return trainer.config.training.steps, state.step, [call.args[0] for call in logged.call_args_list]


def saved_state(folder):
    return TrainState.from_json((checkpoint_of(folder) / "train_state.json").read_text())


def assert_state_follows_from_the_records(folder):
    """What the last checkpoint has counted is what the evaluations of the kept steps give."""
    state, evaluations = saved_state(folder), records(folder, "eval")
    expected = TrainState()
    settings = {"keep_best_on": "held_out", "early_stopping_patience": 2}
    policy = EarlyStopping(EvaluationConfig(**settings), state.early_stopping[0])
    for record in evaluations:
        policy.observe(expected, "held_out", record)
    assert state.early_stopping == expected.early_stopping
    assert policy.reason(state) and not policy.reason(TrainState(early_stopping=[*expected.early_stopping[:2], 1]))
    assert best_step(folder / "checkpoints") == min(evaluations, key=lambda record: record["loss"])["step"]
    assert step_of(checkpoint_of(folder)) == state.step == evaluations[-1]["step"]


@pytest.fixture(scope="module")
def on_one_rank(ranks, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    ((steps, last, _),) = ranks(1).run(train, [*tiny, *in_folder(folder), *ARGV])
    assert steps == 14 and last < 14
    assert [r["step"] for r in records(folder, "samples")] == list(range(2, last + 1, 2))
    assert_state_follows_from_the_records(folder)
    return folder


def assert_same_end(one, other):
    for kind in ("train", "eval"):
        assert largest_deviation(records(one, kind), records(other, kind), "loss") < 1e-4
    texts = [[(r["step"], r["samples"]) for r in records(folder, "samples")] for folder in (one, other)]
    assert texts[0] == texts[1]
    for key in ("learning_rate", "epochs_seen", "skipped_samples"):
        assert [r[key] for r in records(one)] == [r[key] for r in records(other)]
    assert best_step(one / "checkpoints") == best_step(other / "checkpoints")
    assert saved_state(one).early_stopping[2] == saved_state(other).early_stopping[2]
    assert_state_follows_from_the_records(other)


@pytest.mark.parametrize("axis", LAYOUTS)
def test_every_layout_ends_at_the_same_step_with_the_same_best_checkpoint(ranks, tiny, tmp_path, on_one_rank, axis):
    folder = tmp_path / "run"
    ranks(2).run(train, [*tiny, *in_folder(folder), *ARGV, f"--parallel.{axis}", "2"])
    assert_same_end(on_one_rank, folder)


def test_a_run_that_is_stopped_and_resumed_on_another_layout_ends_at_the_same_step(ranks, tiny, tmp_path, on_one_rank):
    argv = [*tiny, *in_folder(tmp_path / "run"), *ARGV]
    last = records(on_one_rank)[-1]["step"]
    ranks(1).run(train, argv, last - 3)
    assert saved_state(tmp_path / "run").step == last - 3
    ranks(2).run(train, [*argv, "--parallel.tp", "2"])
    assert_same_end(on_one_rank, tmp_path / "run")


def test_a_run_that_has_stopped_early_says_so_and_continues_with_more_patience(ranks, tiny, tmp_path):
    argv = [*tiny, *in_folder(tmp_path / "run"), *ARGV]
    ((_, last, lines),) = ranks(1).run(train, argv)
    folder = tmp_path / "run"
    reason = f"the loss on held_out has not fallen below {saved_state(folder).early_stopping[1]:.4f} in 2 evaluations"
    best = f"the best checkpoint is {folder}@best, of step {best_step(folder / 'checkpoints')}"
    assert lines[-2] == f"stopped early: {reason}"
    assert lines[-1].startswith(f"done: step {last}, ") and lines[-1].endswith(f"; {best}")
    before = (folder / "metrics.jsonl").read_bytes()
    advice = "raise --evaluation.early_stopping_patience, or set it to 0, to continue"
    expected = f"run already stopped early at step {last}: {reason}; {advice}"
    assert ranks(1).run(train, argv) == [(14, last, [expected])]
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert ranks(1).run(train, [*argv, "--evaluation.early_stopping_patience", "9"])[0][:2] == (14, 14)


@pytest.fixture(scope="module")
def rolled_back_on_one_rank(ranks, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rolled_back") / "run"
    ranks(1).run(train, [*tiny, *in_folder(folder), *ARGV, *ROLLBACK], 0, FAULTY)
    state = saved_state(folder)
    assert state.rollbacks == 1
    assert_state_follows_from_the_records(folder)
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"] == state.step
    return folder


def dry_of_each_layout(argv):
    """Return what a dry run says of a run on one rank, and in each layout, without what depends on the number of ranks."""
    outputs = [dry(combine(argv)), *(dry(combine([*argv, f"--parallel.{axis}", "2"]), size=2) for axis in LAYOUTS)]
    other = ("ranks", "checkpoints")  # free space of the disk
    lines = [[line for line in output.splitlines() if not line.startswith(other)] for output in outputs]
    return [[line.partition(" microbatches on")[0].rpartition(", in ")[0] or line for line in each] for each in lines]


@pytest.mark.parametrize("axis", LAYOUTS)
def test_every_layout_rolls_back_and_resumes_to_the_same_end(ranks, tiny, tmp_path, rolled_back_on_one_rank, axis):
    folder, last = tmp_path / "run", records(rolled_back_on_one_rank)[-1]["step"]
    argv = [*tiny, *in_folder(folder), *ARGV, *ROLLBACK, f"--parallel.{axis}", "2"]
    ranks(2).run(train, argv, last - 1, FAULTY)
    state = saved_state(folder)
    assert (state.step, state.rollbacks) == (last - 1, 1)
    ranks(2).run(train, argv)
    assert_same_end(rolled_back_on_one_rank, folder)


def test_a_dry_run_says_the_same_of_every_layout_before_and_after_a_rollback(
    ranks, tiny, tmp_path, rolled_back_on_one_rank
):
    argv = [*tiny, *ARGV, *ROLLBACK]
    shutil.copytree(rolled_back_on_one_rank, tmp_path / "run")
    patient = ["--evaluation.early_stopping_patience", "3"]
    folders = {"new": [], "run": patient}
    for name, more in folders.items():
        (said,) = ranks(1).run(dry_of_each_layout, [*argv, *in_folder(tmp_path / name), *more])
        assert all(lines == said[0] for lines in said)
        first = 1 if name == "new" else saved_state(tmp_path / name).step + 1
        assert f"steps         {first} to 14, each of 8 samples of 32 tokens" in said[0]
        assert [line for line in said[0] if line.startswith("epochs")] == ["epochs        0.151"]
        assert sum(line.startswith(("evaluation ", "early stop ", "samples ")) for line in said[0]) == 3


def test_the_page_shows_what_a_run_records_in_words(on_one_rank):
    figures = figures_of([read_run(on_one_rank, "run")], [None])
    shown = [*(figure.title for figure in figures.all()), *(title for title, _ in figures.constants)]
    assert len(shown) > 15 and not any("_" in title.replace("held_out", "") for title in shown), shown

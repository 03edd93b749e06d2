"""A run that is extended after its learning rate has decayed says that the rate rises, and how to avoid it."""

import pytest

from tests.training_runs import combine, in_folder, train

WSD = ["--lr_schedule.name", "warmup_stable_decay", "--lr_schedule.decay_steps", "4", "--training.steps", "10"]
COSINE = ["--training.steps", "10"]


@pytest.mark.parametrize(
    ("first", "second", "advice"),
    [
        (
            WSD,
            ["--training.steps", "20"],
            "; checkpoint.load_step = 6, or an earlier checkpoint before the decay, would avoid it",
        ),
        (WSD, ["--training.steps", "11"], ""),  # still in its decay
        (
            COSINE,
            ["--training.steps", "40"],
            "; a new run that begins with these weights (--from) and a lower optimizer.lr",
        ),
        (COSINE, ["--training.steps", "11"], ""),
        (COSINE, ["--training.steps", "11", "--optimizer.lr", "1.0"], "; a new run that begins"),
        ([*COSINE, "--lr_schedule.name", "constant"], ["--training.steps", "40"], ""),
        ([*COSINE, "--lr_schedule.warmup_steps", "20"], ["--training.steps", "40"], ""),  # it has not decayed yet
    ],
)
def test_a_rate_that_rises_after_its_decay_is_named(ranks, tiny, tmp_path, first, second, advice):
    folder = tmp_path / "run"
    argv = [*tiny, *in_folder(folder), "--lr_schedule.warmup_steps", "2", *first]
    ranks(1).run(train, combine(argv))
    ranks(1).run(train, combine([*argv, *second]))
    lines = [
        line for line in (folder / "log.txt").read_text().splitlines() if "the learning rate had decayed to" in line
    ]
    assert len(lines) == bool(advice)
    if advice:
        assert " warning: schedule: the learning rate had decayed to " in lines[0] and advice in lines[0]
        assert " in step 10, and rises to " in lines[0]

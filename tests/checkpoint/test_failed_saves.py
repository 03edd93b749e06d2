"""Runs in which a checkpoint cannot be written."""

import pytest

from tests.training_runs import train
from trainer.base.system import console
from trainer.base.system.run_files import latest_per_step, step_of
from trainer.checkpoint import commit
from trainer.checkpoint.commit import SaveFailed


def run_with_failing_saves(argv, failing_steps):
    """Train while the saves of some steps find no space. Return the message of SaveFailed, or "", and the warnings."""
    save, warnings, warning = commit.save, [], console.warning

    def full(request, *args):
        if request.step in failing_steps:
            raise SaveFailed(f"step {request.step} could not be saved: no space")
        save(request, *args)

    commit.save, console.warning = full, warnings.append
    try:
        train(argv)
        message = ""
    except SaveFailed as failure:
        message = str(failure)
    finally:
        commit.save, console.warning = save, warning
    return message, warnings


@pytest.mark.parametrize("mode", ["off", "thread"])
@pytest.mark.parametrize(
    ("failing_steps", "policy", "message", "saved"),
    [
        ((2,), "continue", "", [4, 6]),
        ((4,), "continue", "", [2, 6]),
        ((2,), "stop", "step 2 could not be saved: no space", []),
        ((6,), "continue", "step 6 could not be saved: no space", [2, 4]),
    ],
)
def test_a_failed_save_is_reported_and_stops_the_run_if_configured_or_if_it_was_the_last(
    ranks, tiny, tmp_path, mode, failing_steps, policy, message, saved
):
    argv = [*tiny, "--run.output_folder", str(tmp_path), "--run.name", "run", "--training.steps", "6"]
    argv += ["--checkpoint.interval_steps", "2", "--checkpoint.on_failure", policy, "--checkpoint.async_mode", mode]
    reason = f"step {failing_steps[0]} could not be saved: no space"
    warning = f"{reason}; previous checkpoints are intact, and the next save will be"
    for raised, warnings in ranks(2).run(run_with_failing_saves, argv, failing_steps):
        assert raised == message
        assert warnings == ([] if message else [f"{warning} attempted as scheduled"])
    steps = [step_of(path) for path in latest_per_step(tmp_path / "run" / "checkpoints")]
    assert sorted(steps) == saved

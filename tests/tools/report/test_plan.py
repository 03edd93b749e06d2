"""Planned memory of a run."""

import pytest

from tests.tools.report.run_folders import train_record, write_run
from trainer.tools.report.plan import plan_memory
from trainer.tools.report.run import read_run


def test_the_plan_is_the_planners_simulation_of_the_runs_settings(tmp_path):
    small = {
        "model.size": "debug",
        "training.seq_len": 32,
        "training.global_batch_size": 1,
        "training.local_batch_size": 1,
    }
    flags = [word for key, value in small.items() for word in (f"--{key}", str(value))]
    run = read_run(write_run(tmp_path / "run", [train_record(1)], flags), "run")
    plan = plan_memory(run)
    assert not plan.is_gpu and plan.peak_gib == pytest.approx(sum(plan.by_category.values()))
    fp32_state = 3 * 4 * 2_001_024 / 2**30  # parameters and two moments
    assert fp32_state < plan.peak_gib < 10 * fp32_state


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[optimizer]\nspeed = 3\n", "config.toml [optimizer] speed: unknown key"),
        ('[activation_checkpoint]\nmode = "budget"\n', "activation_checkpoint.mode"),
    ],
)
def test_a_run_that_cannot_be_planned_says_why(tmp_path, text, reason):
    run = read_run(write_run(tmp_path / "run", [train_record(1)]), "run")
    (run.folder / "config.toml").write_text(text)
    plan = plan_memory(run)
    assert isinstance(plan, str) and reason in plan and "\n" not in plan

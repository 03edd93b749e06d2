"""scripts/dev/sweep.py: runs of all combinations of some values."""

import math

import pytest

from scripts.dev.sweep import parse_vary
from tests.commands import run_script
from trainer.base.config import ConfigError


def test_each_combination_is_trained_and_a_run_that_diverges_is_shown_as_one(tiny, tmp_path):
    varied = ["--vary", "optimizer.name=adamw,muon", "--vary", "optimizer.lr=1e-3,1e30"]
    argv = [
        *tiny,
        "--run.output_folder",
        tmp_path / "runs",
        "--lr_schedule.warmup_steps",
        "0",
        "--metrics.interval_steps",
        "1",
    ]
    argv += ["--resilience.max_consecutive_skips", "1", "--training.steps", "3"]
    ended = run_script("scripts/dev/sweep.py", *argv, *varied, "--plot", tmp_path / "losses.png")
    assert ended.returncode == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines() if line.startswith(("adamw ", "muon "))]
    assert [row[:2] for row in rows] == [["adamw", "1e-3"], ["adamw", "1e30"], ["muon", "1e-3"], ["muon", "1e30"]]
    assert [math.isfinite(float(row[2])) for row in rows] == [True, False, True, False]
    assert (tmp_path / "losses.png").stat().st_size > 1000
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {f"tiny-{'-'.join(row[:2])}" for row in rows}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("lr=1", "expected section.key=VALUE,VALUE"),
        ("optimizer.lr=1,", "expected section.key=VALUE,VALUE"),
        ("optimizer.lr=1,1", "names a value twice"),
    ],
)
def test_a_wrong_option_is_one_line(text, reason):
    with pytest.raises(ConfigError, match=f"--vary {text}: {reason}"):
        parse_vary(text)

"""scripts/dev/plot_losses.py: its runs, its labels and its picture."""

import re

import pytest

from scripts.dev.plot_losses import BUG, label, relative_deviations
from tests.commands import run_script
from trainer.base.config.load import load_config


def test_layouts_deviate_less_than_the_limit_and_the_injected_bug_more(tiny, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "losses.svg"
    done = run_script("scripts/dev/plot_losses.py", *tiny, "--layout", "tp=2", "--steps", "2", "--output", picture)
    assert (done.returncode, done.stderr) == (0, "")
    printed = dict(re.findall(r"^(.+): loss .+, gradient norm (.+)$", done.stdout, re.MULTILINE))
    assert printed.keys() == {BUG, "2 ranks: tp 2"}
    assert float(printed["2 ranks: tp 2"]) < 1e-4 < float(printed[BUG])
    assert "<svg" in picture.read_text()


def test_a_label_names_the_degrees_above_one(tiny):
    degrees = ["--parallel.tp", "2", "--parallel.pp", "2", "--parallel.dp_replicate", "2", "--parallel.dp_shard", "1"]
    assert label(load_config([*tiny, *degrees])) == "8 ranks: tp 2, pp 2, dp 2"


def test_deviations_are_relative_to_the_reference():
    reference, records = [{"loss": 4.0}, {"loss": 2.0}], [{"loss": 5.0}, {"loss": 2.0}]
    assert relative_deviations(reference, records, "loss") == [0.25, 0.0]

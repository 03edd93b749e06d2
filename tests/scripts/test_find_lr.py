"""The learning-rate range test: its losses are those of a run with its rates; it suggests a rate only if it shows one."""

import json
import math
import signal
import sys
from unittest import mock

import numpy as np
import pytest

from scripts.find_lr import Curve, draw, read_curve, reason_to_stop, settings_of_test, suggest, with_lr
from tests.commands import run_script
from tests.training_runs import checkpoint_of, in_folder, records, train, trainer_from
from trainer import trainer as trainer_module
from trainer.base.config import OptimizerConfig
from trainer.base.config.load import load_config
from trainer.base.config.render import to_toml
from trainer.data.sampling.permutation import hash_index

STEPS = 20
OPTIONS = ["--min-lr", "1e-5", "--max-lr", "1e-1", "--steps", str(STEPS)]


def at_rates(argv):
    """Train with rates of a formula of this test."""
    rates = [1e-5 * (1e-1 / 1e-5) ** (i / (STEPS - 1)) for i in range(STEPS)]
    with mock.patch.object(trainer_module.Trainer, "_lr", lambda trainer, step: rates[step - 1]):
        train(argv)


def until(argv, steps):
    """Train a run, which is stopped after some steps."""
    trainer = trainer_from(argv)
    original = trainer.engine.step

    def step(*args):
        if trainer.state.step == steps - 1:
            trainer.stop.receive(signal.SIGTERM)
        return original(*args)

    with mock.patch.object(trainer.engine, "step", step):
        trainer.train()


def test_an_interrupted_range_test_continues_and_has_the_losses_of_a_run_with_its_rates(
    ranks, tiny, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("NGPU", "1")
    reference = [*tiny, *in_folder(tmp_path / "reference"), "--training.steps", str(STEPS)]
    ranks(1).run(at_rates, reference)
    expected = records(tmp_path / "reference")
    argv = [*tiny, *in_folder(tmp_path / "mine")]
    folder = tmp_path / "mine-find-lr"
    schedule = ["--training.batch_schedule.2", "16"]  # a range test has the first size
    (tmp_path / "test.toml").write_text(to_toml(settings_of_test(load_config([*argv, *schedule]), 1e-5, 1e-1, STEPS)))
    ranks(1).run(until, ["--config", str(tmp_path / "test.toml")], 7)
    stopped = checkpoint_of(folder).name

    other = run_script("scripts/find_lr.py", *argv, *OPTIONS[:-1], "30")
    assert other.returncode == 2 and other.stderr.startswith(
        f"{folder} has a range test with other settings (training.steps 20 -> 30"
    )
    done = run_script("scripts/find_lr.py", *argv, *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert [r["step"] for r in records(folder)] == list(range(1, STEPS + 1)) and stopped in (
        "step-00000007",
        "step-00000008",
    )
    result = json.loads((folder / "find_lr.json").read_text())
    assert result["losses"] == [r["loss"] for r in expected]
    assert result["rates"] == pytest.approx([r["learning_rate"] for r in expected])
    assert (folder / "find_lr.png").stat().st_size > 10_000 and not (folder / "checkpoints").exists()

    again = run_script("scripts/find_lr.py", *argv, *OPTIONS)
    assert again.returncode == 0 and again.stdout.startswith(f"{folder}/find_lr.json: this range test is complete; ")
    assert again.stdout.splitlines()[1:] == done.stdout.splitlines()[-2:]


def curve(low=1e-3, steps=100, fall=3.0, noise=0.05, rise=True):
    """A curve that falls around 1e-5 to `low` and then rises; noise: standard deviation."""
    rates = [1e-6 * 10 ** (6 * i / (steps - 1)) for i in range(steps)]
    random = hash_index(np.arange(steps), 1, 2) / 2**64 - 0.5
    losses = []
    for rate, r in zip(rates, random.tolist(), strict=True):
        progress = min(1.0, max(0.0, math.log10(rate / 1e-5) / math.log10(low / 1e-5)))
        above = max(0.0, math.log10(rate / low)) if rise else 0.0
        losses.append(8 - fall * progress + 4 * above**2 + noise * math.sqrt(12) * r)
    return Curve(rates, losses)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("low", [1e-4, 1e-3, 1e-2])
def test_the_suggestion_is_a_tenth_of_the_rate_with_the_lowest_loss(low, noise):
    suggestion = suggest(curve(low, noise=noise), "")
    assert suggestion.rate == pytest.approx(low / 10, rel=1.0)
    assert suggestion.reason.startswith("a tenth of ") and "the loss falls fastest at " in suggestion.reason


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (curve(low=1.0, rise=False), "and still falls at the largest rate, 1; set a larger --max-lr"),
        (curve(fall=0.0, noise=0.5, rise=False), "only, which its noise of "),
        (Curve([1e-3], [8.0]), "only 1 step with a finite loss; set a lower --min-lr, or more --steps"),
        (Curve([], []), "only 0 steps with a finite loss; "),
    ],
)
def test_a_curve_that_shows_no_rate_gives_no_suggestion_but_the_reason(shown, reason):
    suggestion = suggest(shown, "")
    assert suggestion.rate is None and reason in suggestion.reason


def test_a_loss_far_above_its_start_has_diverged():
    shown = curve()
    until_low = Curve(shown.rates[:60], shown.losses[:60])
    assert not until_low.has_diverged()
    assert Curve(shown.rates, [*until_low.losses, *[12.0] * 40]).has_diverged()
    one_spike = [*until_low.losses[:-1], 100.0]
    assert not Curve(until_low.rates, one_spike).has_diverged()


def test_a_loss_that_is_not_finite_or_far_above_its_start_ends_the_test(tmp_path):
    def reason(losses):
        lines = [json.dumps({"kind": "train", "learning_rate": 1e-3, "loss": loss}) for loss in losses]
        (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return reason_to_stop(*read_curve(tmp_path))

    assert reason([]) == reason([5.0] * 20) == ""
    assert reason([5.0, 4.0, None]) == "the loss is not finite"
    assert reason([5.0] * 20 + [12.0] * 5) == "the loss has risen far above its start"


def test_muon_keeps_the_ratio_of_its_rate():
    optimizer = with_lr(OptimizerConfig(name="muon", lr=1e-3, muon_lr=2e-2), 0.1)
    assert (optimizer.lr, optimizer.muon_lr) == (0.1, pytest.approx(2.0))
    assert with_lr(OptimizerConfig(), 0.1) == OptimizerConfig(lr=0.1)


def test_without_matplotlib_there_is_one_line_instead_of_a_picture(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = curve()
    draw(tmp_path / "x.png", shown, suggest(shown, ""), "mine")
    line = f"no picture: {tmp_path}/x.png: needs the package matplotlib: {sys.executable} -m pip install matplotlib\n"
    assert capsys.readouterr().out == line and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--min-lr", "1", "--max-lr", "0.1"], "--min-lr 1: must be below --max-lr 0.1"),
        (["--steps", "5"], "argument --steps: 5: expected an integer from 20 to 1000000"),
        (["--min-lr", "0"], "argument --min-lr: 0: expected a number from 1e-18 to 1e+18"),
    ],
)
def test_a_range_that_cannot_be_tested_is_one_line(words, message):
    done = run_script("scripts/find_lr.py", *words)
    assert (done.returncode, done.stderr) == (2, f"{message}\n")

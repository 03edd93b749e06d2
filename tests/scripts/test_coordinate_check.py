"""scripts/coordinate_check.py: activations over the width, with and without width transfer; its picture and exit codes."""

import sys

import pytest

from scripts import coordinate_check
from scripts.coordinate_check import verdict
from trainer.base.config.exits import run_to_end
from trainer.tools.testing.coordinates import ACTIVATIONS, AFTER, BEFORE, CHANGE, Curves


def main(monkeypatch, *argv):
    """Return the exit code, 0 if there is none."""
    monkeypatch.setattr(sys, "argv", ["coordinate_check.py", *map(str, argv)])
    try:
        run_to_end(coordinate_check.main)
    except SystemExit as exit:
        return exit.code
    return 0


KEYS = [(name, when) for name in ACTIVATIONS for when in (BEFORE, AFTER, CHANGE)]
RULES = {"adamw": ["--optimizer.lr", "3e-3"], "muon": ["--optimizer.name", "muon", "--optimizer.lr", "3e-3"]}


@pytest.mark.parametrize("rule", RULES)
def test_activations_are_flat_with_width_transfer_and_grow_without(monkeypatch, tiny, tmp_path, capsys, rule):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.svg"
    options = ["--widths", 32, 128, "--steps", 4, "--output", picture, *RULES[rule]]
    assert main(monkeypatch, *tiny, *options) == 0
    titles = "base_width 32", "without base_width"
    lines = capsys.readouterr().out.splitlines()
    flat, grown = (lines[lines.index(title) + 2 :][: 3 * len(ACTIVATIONS)] for title in titles)
    assert max(float(line.split()[-1]) for line in flat) < 0.25
    by_size = {key: float(line.split()[-1]) for key, line in zip(KEYS, grown, strict=True)}
    assert by_size["mixer", CHANGE] > 0.4 and by_size["feed-forward", CHANGE] > 0.4
    assert by_size["embedding", BEFORE] == pytest.approx(-0.5, abs=0.05)
    assert "<svg" in picture.read_text() and lines[-2:-1] == [f"wrote {picture}"]


def curves(*sizes):
    return Curves([1, 10], {("logits", CHANGE): sizes, ("embedding", BEFORE): (1.0, 1.0)})


def test_the_verdict_needs_a_flat_check_and_a_control_that_grows():
    flat, steep, nan = curves(2.0, 2.0), curves(2.0, 20.0), curves(2.0, float("nan"))
    assert verdict(flat, steep, 0.25) == verdict(flat, nan, 0.25) == ""
    assert verdict(steep, steep, 0.25) == (
        "logits, change: grows with the width to the power of 1.00, above --limit 0.25"
    )
    assert verdict(nan, steep, 0.25).startswith("logits, change: grows with the width to the power of nan")
    assert verdict(flat, flat, 0.25).startswith(
        "the check shows nothing: without base_width, no activation grows beyond --limit 0.25 either (largest power 0.00); "
    )


def test_growth_is_one_line_and_exit_code_1(monkeypatch, tiny, capsys):
    monkeypatch.setattr(Curves, "measure", classmethod(lambda *_: Curves([1, 10], dict.fromkeys(KEYS, (1.0, 10.0)))))
    assert main(monkeypatch, *tiny) == 1
    line = "embedding, before: grows with the width to the power of 1.00, above --limit 0.25"
    assert capsys.readouterr().err == f"{line}\n"


def test_loaded_weights_are_refused(monkeypatch, tiny, hf_model, capsys):
    assert main(monkeypatch, *tiny, "--checkpoint.init_from", hf_model) == 2
    message = "is incompatible with a comparison of widths: models of other widths start from random weights"
    assert capsys.readouterr().err == f"--checkpoint.init_from {hf_model}: {message}\n"


LINES = {
    "--widths 64": "--widths 64: needs two different widths",
    "--widths 64 0": "argument --widths: 0: expected an integer from 1 to 16777216",
    "--widths 6 64": "width 6: n_heads 8 x 6 / dim 32 must be an integer",
    "--limit x": "argument --limit: x: expected a number from 1e-18 to 1e+18",
    "--output x.txt": "--output x.txt: the file name must end in .png or .svg or .pdf",
    "--optimizer.base_width 3": (
        "width 64: optimizer.base_width: must be at least 4, the width of llama3/debug with one head instead of 16: heads keep "
        "their width"
    ),
}


@pytest.mark.parametrize("text", LINES)
def test_an_invalid_argument_is_one_line(monkeypatch, tiny, capsys, text):
    assert main(monkeypatch, *tiny, *text.split()) == 2
    assert capsys.readouterr().err.strip() == LINES[text]

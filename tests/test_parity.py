"""scripts/parity.py: what it prints, and how it ends."""

import sys

import pytest

from scripts import parity
from scripts.parity import Deviation, Layout


def main(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["parity.py", "--steps", "2", "--microbatches", "1", *argv])
    with pytest.raises(SystemExit) as exit:
        parity.main()
    return exit.value.code


def test_a_layout_passes_and_the_wrong_reduction_is_caught(monkeypatch, tiny, capsys):
    assert main(monkeypatch, *tiny, "--layout", "tp=2", "--layout", "dp_shard=2 training.compute_dtype=bf16") == 0
    header, tp, bf16, control, summary = capsys.readouterr().out.splitlines()
    assert header.split() == ["layout", "ranks", "micro", "loss", "grad", "norm"]
    assert tp.startswith("tp=2 ") and tp.endswith("pass")
    assert bf16.endswith("pass")
    assert control.endswith("caught") and "NOT" not in control
    assert summary.startswith("2 of 2 pass")


def test_a_deviation_above_the_limit_fails(monkeypatch, tiny, capsys):
    monkeypatch.setattr(parity, "LIMITS", {"fp32": {"loss": -1.0, "grad_norm": 1.0}})
    assert main(monkeypatch, *tiny, "--layout", "cp=2") == 1
    assert "FAIL" in capsys.readouterr().out


def test_a_control_that_is_not_caught_fails(monkeypatch, tiny, capsys):
    monkeypatch.setattr(parity, "LIMITS", {"fp32": {"loss": 1.0, "grad_norm": 1.0}})
    assert main(monkeypatch, *tiny, "--layout", "dp_shard=1") == 1
    assert "NOT CAUGHT" in capsys.readouterr().out


def test_what_does_not_fit_is_told(monkeypatch, tiny, capsys):
    monkeypatch.setattr(parity, "MATRIX", ["tp=16", "dp_shard=1"])
    assert main(monkeypatch, *tiny) == 0
    assert "tp=16" in (line := capsys.readouterr().out.splitlines()[1])
    assert line.endswith("does not fit: --parallel.tp 16: must divide n_heads 8 of llama3/debug")


LINES = {
    ("--layout", "tp=16"): "--layout 'tp=16': --parallel.tp 16: must divide n_heads 8 of llama3/debug",
    ("--layout", "tp"): "--layout 'tp': tp: expected name=value",
    ("--layout", "ttp=2"): "--layout 'ttp=2': ttp: no setting of [parallel]; did you mean 'tp'?",
    (
        "--layout",
        "model.n_layers=2",
    ): "--layout 'model.n_layers=2': --model.n_layers: unknown setting; did you mean '--model.name'?",
    ("--layout", "dp_shard=3"): "--layout 'dp_shard=3': training.global_batch_size: cannot be cut into 3 microbatches",
    ("--layout", "dp_shard=-1"): "--layout 'dp_shard=-1': dp_shard must be a number of ranks here (1 unless given)",
    ("--training.stps", "5"): "--training.stps: unknown setting; did you mean '--training.steps'?",
    ("--steps", "0"): "--training.steps 0: must be at least 1",
}


@pytest.mark.parametrize("words", LINES, ids=str)
def test_a_wrong_word_is_one_line(monkeypatch, tiny, capsys, words):
    words = [*words] if words[0] != "--steps" else [*words, "--layout", "tp=2"]
    assert main(monkeypatch, *tiny, *words) == 2
    assert capsys.readouterr().err.strip().endswith(LINES[tuple(words[:2])])


def test_deviations_are_relative_and_the_largest_of_all_steps():
    one = [{"step": 1, "loss": 2.0, "grad_norm": 1.0}, {"step": 2, "loss": 4.0, "grad_norm": 1.0}]
    other = [{"step": 1, "loss": 2.0, "grad_norm": 1.5}, {"step": 2, "loss": 4.4, "grad_norm": 1.0}]
    deviation = Deviation.between(one, other)
    assert (deviation.loss, deviation.grad_norm) == (pytest.approx(0.1), pytest.approx(0.5))
    assert not deviation.within({"loss": 0.2, "grad_norm": 0.4})
    assert deviation.within({"loss": 0.2, "grad_norm": 0.6})
    nan = Deviation.between(one, [other[0], dict(other[1], loss=float("nan"))])
    assert not nan.within({"loss": 1.0, "grad_norm": 1.0})


def test_the_run_on_one_rank_shares_what_is_no_layout():
    layout = Layout.parse("tp=2 compile.enabled=true model.overrides.n_layers=4 training.compute_dtype=bf16")
    assert layout.of_one_rank == {"model.overrides.n_layers": "4", "training.compute_dtype": "bf16"}

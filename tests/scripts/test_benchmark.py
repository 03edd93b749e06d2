"""The figures of scripts/dev/benchmark.py can be made; what they are is not looked at."""

import sys

import pytest

from scripts.dev import benchmark
from scripts.dev.benchmark import main


def lines_of(monkeypatch, capsys, *words) -> list[list[str]]:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *map(str, words)])
    main()
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_saves_are_timed_in_every_mode(monkeypatch, capsys, tmp_path):
    _, *table = lines_of(monkeypatch, capsys, "checkpoint", "--gib", "0.02", "--repeats", "1", "--folder", tmp_path)
    assert [line[0] for line in table] == ["off", "thread", "process"]
    assert all(float(line[1]) > 0 for line in table)
    assert list(tmp_path.iterdir()) == []


def test_preparing_and_loading_stand_beside_what_they_are_built_on(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "LOADED_TOKENS", 2**14)
    small = ("--mib", "1", "--seq", "64", "--local-batch", "4", "--repeats", "1")
    _, *table = lines_of(monkeypatch, capsys, "data", *small)
    assert [line[-1] for line in table] == ["%"] * 4
    assert table[0][-2] == table[2][-2] == "100"


def test_ranks_that_take_over_a_model_tell_their_memory(monkeypatch, capsys, hf_model):
    _, *table = lines_of(monkeypatch, capsys, "initial", hf_model, "--ranks", "2")
    assert [line[:2] for line in table] == [["rank", "0"], ["rank", "1"]]


def test_what_cannot_be_measured_is_one_line(monkeypatch, capsys, tmp_path):
    for words, line in (
        (("initial", tmp_path), f"{tmp_path}: is neither a checkpoint"),
        (("loss", "--vocab", "9", "--tp", "8"), "--tp 8: leaves a rank without a row"),
    ):
        with pytest.raises(SystemExit) as end:
            lines_of(monkeypatch, capsys, *words)
        assert end.value.code == 2
        assert line in capsys.readouterr().err

"""The short version of tests/faults/fault_matrix.py: one trial, on real runs, of the cases that no other test covers."""

import json

import pytest

from tests.commands import run_script
from tests.faults import fault_matrix
from tests.faults.cases import CASES
from tests.faults.fault_matrix import run_trial
from tests.faults.harness import Failed, FaultHarness, SeededRandom
from tests.faults.saves import POINTS, crash


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    return FaultHarness(tmp_path_factory.mktemp("harness"), steps=30, interval=3)


@pytest.mark.parametrize(("case", "trial"), [(1, 0), (9, 0), (9, 2), (19, 0), (25, 0), (49, 0), (49, 1)])
def test_one_trial_passes(harness, case, trial):
    assert run_trial(harness, case, trial=999 + trial, seed=0) == ("", "")


@pytest.mark.parametrize(("point", "mode"), [(POINTS[4], "off"), (POINTS[8], "thread"), (POINTS[10], "thread")])
def test_a_run_killed_during_a_save_is_resumed_without_a_difference(harness, point, mode):
    crash(harness, point, mode, 2, SeededRandom(0, 15, 0))


def test_runs_that_differ_are_reported(harness):
    """The comparison itself: a run with another seed is not the same."""
    flags = ["--training.steps", "10"]
    assert harness.run(harness.fresh("other"), 1, [*flags, "--run.seed", "1"]).wait().code == 0
    with pytest.raises(Failed, match="content differs from the reference run"):
        harness.assert_same_final_state("other", 1, flags)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read (Is a directory)"),
        (b"\xff", "a line is not a JSON object"),
        (b"{", "a line is not a JSON object"),
        (b"{}", "a line is not a result of this script"),
    ],
)
def test_a_file_without_results_is_an_error_of_one_line(content, problem, tmp_path):
    path = tmp_path / "results"
    path.write_bytes(content) if content is not None else path.mkdir()
    done = run_script("tests/faults/fault_matrix.py", "--report", "--results", path)
    assert (done.returncode, done.stderr) == (2, f"--results {path}: {problem}\n")


def test_results_accumulate_and_failures_are_reported(tmp_path, capsys, monkeypatch):
    path = tmp_path / "results.jsonl"
    outcomes = iter([("", ""), ("lost", ""), ("", "3 faults")])
    monkeypatch.setattr(fault_matrix, "run_trial", lambda *args: next(outcomes))
    fault_matrix.run_case(None, 5, 2, 0, path)
    fault_matrix.run_case(None, 5, 1, 0, path)
    assert [json.loads(line)["trial"] for line in path.read_text().splitlines()] == [0, 1, 2]
    capsys.readouterr()
    assert not fault_matrix.report(path)
    out = capsys.readouterr().out
    assert f"  5        2 of 3  {CASES[5][0]}" in out
    assert "trial 1, seed 0: lost" in out
    assert "trial 2, seed 0: 3 faults" in out

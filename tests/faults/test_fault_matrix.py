"""The short form of tests/faults/fault_matrix.py: one trial of the rows that no other test has, on real runs."""

import json

import pytest

from tests.faults import fault_matrix
from tests.faults.cases import CASES
from tests.faults.fault_matrix import trial
from tests.faults.harness import Failed, FaultHarness, SeededRandom
from tests.faults.saves import POINTS, crash


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    return FaultHarness(tmp_path_factory.mktemp("harness"))


@pytest.mark.parametrize(("row", "number"), [(1, 0), (4, 0), (9, 0), (9, 2), (19, 0), (25, 0)])
def test_one_trial(harness, row, number):
    assert trial(harness, row, number=999 + number, seed=0) == ("", "")


@pytest.mark.parametrize(("point", "mode"), [(POINTS[4], "off"), (POINTS[8], "thread"), (POINTS[10], "process")])
def test_killed_in_a_save(harness, point, mode):
    crash(harness, point, mode, 2, SeededRandom(0, 15, 0))


def test_a_difference_of_one_bit_is_noticed(harness):
    """The comparison itself: a run with another seed is not the same."""
    more = ["--training.steps", "10"]
    assert harness.run(harness.fresh("other"), 1, [*more, "--run.seed", "1"]).wait().code == 0
    with pytest.raises(Failed, match="other content than undisturbed"):
        harness.assert_same_final_state("other", 1, more)


def test_results_add_up_and_failures_show(tmp_path, capsys, monkeypatch):
    results = tmp_path / "r.jsonl"
    problems = iter([("", ""), ("lost", ""), ("", "as told")])
    monkeypatch.setattr(fault_matrix, "trial", lambda *given: next(problems))
    fault_matrix.run_case(None, 5, 2, 0, results)
    fault_matrix.run_case(None, 5, 1, 0, results)
    assert [json.loads(line)["trial"] for line in results.read_text().splitlines()] == [0, 1, 2]
    capsys.readouterr()
    assert not fault_matrix.show(results)
    out = capsys.readouterr().out
    assert f"  5        2 of 3  {CASES[5][0]}" in out
    assert "trial 1, seed 0: lost" in out
    assert "trial 2, seed 0: as told" in out

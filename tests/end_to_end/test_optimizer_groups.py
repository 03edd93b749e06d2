"""Parameter groups and Muon in complete runs: resumed, on other layouts, and with changed groups."""

import shutil

import pytest

from tests.training_runs import checkpoint_of, combine, error_line, in_folder, largest_deviation, records, train

MUON = ["--optimizer.name", "muon", "--optimizer.lr", "0.01", "--optimizer.groups.*.wo.weight", "{ lr = 0.5 }"]


@pytest.fixture(scope="module")
def trained(ranks, tiny, tmp_path_factory):
    """Folder and result of a run of four steps with Muon on two ranks."""
    folder = tmp_path_factory.mktemp("groups") / "run"
    return folder, ranks(2).run(train, [*tiny, *MUON, "--checkpoint.interval_steps", "2", *in_folder(folder)])


@pytest.fixture
def interrupted(trained, tmp_path):
    """Folder of the run as it was after two steps."""
    shutil.copytree(trained[0], tmp_path / "run")
    shutil.rmtree(checkpoint_of(tmp_path / "run"))
    return tmp_path / "run"


def test_a_run_with_muon_resumes_bitwise_on_the_same_ranks(ranks, tiny, trained, interrupted):
    resumed = ranks(2).run(train, [*tiny, *MUON, *in_folder(interrupted)])
    assert [r.weights for r in resumed] == [r.weights for r in trained[1]]


@pytest.mark.parametrize("size, layout", [(1, ""), (4, "--parallel.tp 2"), (2, "--parallel.pp 2")])
def test_a_run_with_muon_resumes_on_other_layouts(ranks, tiny, trained, interrupted, size, layout):
    ranks(size).run(
        train, combine([*tiny, *MUON, *in_folder(interrupted), "--training.local_batch_size", "1", *layout.split()])
    )
    for key, limit in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert largest_deviation(records(trained[0]), records(interrupted), key) < limit


def test_rates_and_decays_of_groups_may_change_when_a_run_resumes(ranks, tiny, trained, interrupted):
    changed = combine([*MUON[:4], "--optimizer.groups.*.wo.weight", "{ lr = 0.1, decay = 0 }", *in_folder(interrupted)])
    resumed = ranks(2).run(train, [*tiny, *changed])
    assert [r["step"] for r in records(interrupted)] == [1, 2, 3, 4]
    assert [r.weights for r in resumed] != [r.weights for r in trained[1]]


def test_the_rule_of_a_parameter_may_not_change_when_a_run_resumes(ranks, tiny, interrupted):
    argv = [*tiny, *MUON[:4], *in_folder(interrupted)]
    (line, _) = ranks(2).run(error_line, [*argv, "--optimizer.groups.*.wo.weight", '{ optimizer = "adamw" }'])
    key, names = (
        "number of matrices that [optimizer] groups gives to adamw",
        "layers.0.attention.wo.weight (ba0bd62e762676a0)",
    )
    reason = f'{key} was "0", is "2, such as {names}"'
    assert line == f"cannot resume from {checkpoint_of(interrupted)}: {reason}; set another --run.name for a new run"
    (line, _) = ranks(2).run(error_line, combine([*argv, "--optimizer.name", "adamw"]))
    assert 'optimizer.name was "muon", is "adamw"' in line

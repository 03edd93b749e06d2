import json

import pytest

from scripts.compare_runs import compare_losses, losses
from tests.commands import run_script
from tests.training_runs import checkpoint_of, train


def script(*args):
    done = run_script("scripts/compare_runs.py", *args)
    return done.returncode, done.stdout.splitlines(), done.stderr.strip()


@pytest.fixture(scope="module")
def runs(ranks, tiny, tmp_path_factory):
    """Two equal runs, one with another learning rate from the first step on."""
    folder = tmp_path_factory.mktemp("runs")
    for name, more in (("a", []), ("b", []), ("c", ["--optimizer.lr", "0.02"])):
        argv = [*tiny, "--run.output_folder", str(folder), "--run.name", name, "--metrics.interval_steps", "1"]
        ranks(1).run(train, [*argv, *more])
    return folder


def test_equal_runs_have_identical_losses(runs):
    code, lines, _ = script(runs / "a", runs / "b")
    assert code == 0
    assert lines[0] == 'run.name "a" -> "b"'
    assert lines[-1] == "losses are identical at all 4 steps that both runs logged, up to step 4"


def test_the_first_different_loss_is_reported_with_the_settings_that_differ(runs):
    code, lines, _ = script(runs / "a", runs / "c")
    assert code == 1
    assert "optimizer.lr 0.0003 -> 0.02" in lines
    assert lines[-1].startswith("losses differ first at step 2: ")


def test_environment_records_what_reproduces_a_run(runs):
    record = json.loads((runs / "a" / "environment.json").read_text())
    assert {"command", "git_commit", "git_clean", "python", "platform", "cpu", "device", "driver", "world_size"} <= set(
        record
    )
    assert record["packages"]["torch"].startswith("2.") and record["world_size"] == 1


def test_an_incomplete_last_line_is_ignored(tmp_path):
    lines = [json.dumps({"kind": "train", "step": 1, "loss": 2.0}), '{"kind": "train", "st']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert losses(tmp_path) == {1: 2.0}
    assert compare_losses({1: 2.0}, {2: 2.0}) == ("no step was logged by both runs", False)


def test_what_is_not_a_run_is_one_line(runs, tmp_path):
    cases = {
        tmp_path: f"{tmp_path} is not the folder of a run: it has no metrics.jsonl",
        tmp_path / "no": f"{tmp_path}/no: no such folder",
        runs
        / "a@best": f"{runs}/a/checkpoints has no best checkpoint: the run had no [evaluation] keep_best_on, or no "
        "evaluation yet",
        checkpoint_of(runs / "a"): f"{checkpoint_of(runs / 'a')} is a checkpoint, but whole runs are compared, such as "
        f"{runs}/a",
    }
    for path, line in cases.items():
        assert script(runs / "a", path) == (2, [], line)

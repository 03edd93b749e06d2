"""scripts/checkpoint.py, run as a command."""

import re
import shutil

import pytest

from tests.commands import run_script
from tests.training_runs import train


@pytest.fixture(scope="module")
def trained(ranks, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    settings = ["--checkpoint.interval_steps", "2", "--checkpoint.async_mode", "off"]
    ranks(2).run(train, [*tiny, *settings, "--run.output_folder", str(folder), "--run.name", "run"])
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(trained, tmp_path / "run")


def script(name, path):
    done = run_script("scripts/checkpoint.py", name, path)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def test_list_prints_the_newest_step_first(trained):
    code, lines, _ = script("list", trained)
    assert code == 0
    expected = [
        rf"step-0000000{step}  +[\d.]+ MiB  \d+-\d\d-\d\d \d\d:\d\d  {tokens} tokens, 2 ranks"
        for step, tokens in ((4, "1,024"), (2, "512"))
    ]
    assert [bool(re.fullmatch(e, line)) for e, line in zip(expected, lines, strict=True)] == [True, True], lines


def test_inspect_prints_metadata_and_tensors(trained):
    code, lines, _ = script("inspect", trained / "checkpoints" / "step-00000004")
    assert code == 0
    assert "step: 4" in lines
    assert any(line.startswith('train_state.json: {"step": 4,') for line in lines)
    assert any(
        line.startswith("model/tok_embeddings.weight  float32  ") and line.endswith("in 2 files") for line in lines
    )


def test_only_verify_detects_changed_content(run):
    state = run / "checkpoints" / "step-00000004" / "train_state.json"
    state.write_text(state.read_text().replace('"cursor": 3', '"cursor": 4'))
    assert [script(name, run)[0] for name in ("list", "inspect", "verify")] == [0, 0, 1]
    lines = script("verify", run)[1]
    assert lines[0] == f"{state.parent}: train_state.json does not match its hash"
    assert lines[1].endswith("step-00000002: intact")


def test_inspect_reports_invalid_json_and_continues(run):
    state = run / "checkpoints" / "step-00000004" / "train_state.json"
    state.write_text("\x1b" + state.read_text()[1:])
    code, lines, _ = script("inspect", run)
    assert (code, f"{state.parent}: train_state.json is not JSON" in lines, "step: 2" in lines) == (1, True, True)


def test_every_command_reports_a_missing_file(run):
    folder = run / "checkpoints" / "step-00000004"
    (folder / "rank-00001.safetensors").unlink()
    for name in ("list", "verify", "inspect"):
        code, lines, _ = script(name, run)
        assert code == 1
        assert lines[0].endswith("rank-00001.safetensors is missing"), name


def test_a_path_without_a_checkpoint_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    for path, problem in (
        ("no", "no such folder"),
        ("file", "is a file, not a folder"),
        (".", "contains no checkpoint"),
    ):
        assert script("list", tmp_path / path) == (2, [], [f"{tmp_path / path}: {problem}"])

"""The examples of docs/python.md run as they stand, in a process without torchrun's environment variables."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.faults.harness import CONFIG
from tests.training_runs import records

PAGE = (ROOT / "docs" / "python.md").read_text()
EXAMPLES = dict(re.findall(r"^## ([^\n]+)\n.*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
EXPECTED = {
    "Logits": r"^('.*'\n|\".*\"\n){3}$",
    "Hidden states": r"^0 \(1, \d+, 32\) [\d.]+\n1 \(1, \d+, 32\) [\d.]+\n$",
    "Your own loop and your own loss": r"^0 [\d.]+\n(?:.*\n)*4 [\d.]+\n$",
    "Your own loss and metric in the built trainer": r"(?s)step 3/3 .*done: step 3, .*outputs/smoothed",
    "Your own model under another name": r"^149,664 parameters, logits \[1, 3, 2048\]\n$",
    "Reading a token store": r"^\{'train': .*\}\n(\d+ '.*'\n){3}$",
}


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """A folder in which the debug run, with a tiny configuration, has been trained."""
    folder = tmp_path_factory.mktemp("python")
    (folder / "train_configs").mkdir()
    settings = {"steps": 2, "interval_steps": 0, "global_batch_size": 4, "stores": "outputs/token_stores"}
    (folder / "train_configs" / "debug.toml").write_text(CONFIG.format(corpus=corpus, **settings))
    result = run(folder, str(ROOT / "train.py"), "--config", "train_configs/debug.toml")
    assert result.returncode == 0, result.stderr
    return folder


def run(folder, *arguments):
    environment = {name: value for name, value in os.environ.items() if name not in OF_TORCHRUN}
    environment |= {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_every_example_has_an_expectation():
    assert EXAMPLES.keys() == EXPECTED.keys() and PAGE.count("```python") == len(EXPECTED)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_it_stands(folder, name):
    result = run(folder, "-c", EXAMPLES[name])
    assert result.returncode == 0, result.stderr
    assert re.search(EXPECTED[name], result.stdout), result.stdout
    assert not result.stderr


def test_the_metric_of_an_objective_is_recorded(folder):
    run(folder, "-c", EXAMPLES["Your own loss and metric in the built trainer"])
    assert [0 <= record["accuracy"] <= 1 for record in records(folder / "outputs" / "smoothed")] == [True] * 3


def test_a_file_that_lacks_the_guard_of_its_main_part_is_told_so(folder):
    """The processes that prepare data import it again."""
    code = EXAMPLES["Your own loss and metric in the built trainer"]
    (folder / "large").mkdir()
    for i in range(4):  # several chunks
        (folder / "large" / f"{i}.txt").write_text("some words\n" * 500_000)
    settings = '"--data.path", "large", "--data.prepare_workers", "2", "--run.name", "unguarded"'
    (folder / "unguarded.py").write_text(code.replace('"--run.name", "smoothed"', settings))
    result = run(folder, "unguarded.py")
    assert result.returncode != 0
    assert "put the code that starts a run under if __name__ == '__main__'" in result.stderr

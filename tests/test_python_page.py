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
    "Texts": r"^('.*'|\".*\") ('.*'|\".*\") (token|string|length)\n(.*\n){2}$",
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


GROUP = """import torch.distributed as dist
dist.init_process_group({backend!r}, store={store}, rank=0, world_size=1)
"""
TRAINS = "Your own loss and metric in the built trainer"


def test_a_cell_that_is_run_again_continues_the_run(folder):
    code = EXAMPLES[TRAINS].replace('"smoothed"', '"again"')
    more = code[code.index("config = ") :].replace('"--training.steps", "3"', '"--training.steps", "5"')
    result = run(folder, "-c", f"{code}\n{code}\n{more}")
    assert result.returncode == 0, result.stderr
    assert "again already finished at step 3; raise --training.steps to continue" in result.stdout
    assert [record["step"] for record in records(folder / "outputs" / "again")] == [1, 2, 3, 4, 5]
    log = (folder / "outputs" / "again" / "log.txt").read_text().splitlines()
    assert [line[20:] for line in log if " warning: " not in line] == [
        line[9:] for line in result.stdout.splitlines()
    ], "the log has each line once"


def test_a_program_with_a_process_group_of_its_own_trains_in_it(folder):
    code = EXAMPLES[TRAINS].replace('"smoothed"', '"in_group"')
    result = run(folder, "-c", GROUP.format(backend="gloo", store="dist.HashStore()") + code)
    assert result.returncode == 0 and "done: step 3" in result.stdout, result.stderr
    store = "__import__('torch.testing._internal.distributed.fake_pg', fromlist=['FakeStore']).FakeStore()"
    result = run(folder, "-c", GROUP.format(backend="fake", store=store) + code)
    message = r"this process has a process group with .*fake.*, but a run on this device needs gloo; create it with this backend"
    assert re.search(message, result.stderr.splitlines()[-1]), result.stderr
    result = run(
        folder,
        "-c",
        GROUP.format(backend="gloo", store="dist.HashStore()") + f"import os; os.environ['RANK'] = '1'\n{code}",
    )
    assert "this process is rank 0 of 1 of its process group, but WORLD_SIZE and RANK do not say so" in result.stderr


def test_the_folder_of_a_built_run_belongs_to_its_process(folder):
    code = EXAMPLES[TRAINS].replace('"smoothed"', '"locked"').replace("trainer.train()", "")
    words = ["--config", "train_configs/debug.toml", "--run.name", "locked"]
    beside = f"import subprocess, sys; print(subprocess.run([sys.executable, {str(ROOT / 'train.py')!r}, *{words}]).returncode)"
    result = run(folder, "-c", f"{code}\n{beside}\ntrainer.train()\n{beside}\ntrainer.train()")
    assert re.search(r"outputs/locked is in use by process \d+ on .*; choose another --run.name", result.stderr)
    lines = result.stdout.splitlines()
    assert result.returncode == 0, "a second call finds the run finished"
    assert [line for line in lines if line in "02"] == ["2", "0"], "the folder is free once the run has ended"


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

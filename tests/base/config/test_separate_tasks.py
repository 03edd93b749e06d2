"""Tasks that a launcher starts without saying how they form one run."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from trainer.base.config import ConfigError, separate_tasks
from trainer.base.config.exits import one_line_errors
from trainer.base.config.separate_tasks import refuse_separate_tasks

SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}


@pytest.fixture
def variables(monkeypatch):
    """Function that sets environment variables, after those of a cluster are removed."""
    for name in ("WORLD_SIZE", "NNODES", *separate_tasks._TASK_COUNTS):
        monkeypatch.delenv(name, raising=False)
    return lambda values: [monkeypatch.setenv(*pair) for pair in values.items()]


@pytest.mark.parametrize(
    ("launcher", "count", "index"),
    [
        ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("mpirun", "PMI_SIZE", "PMI_RANK"),  # MPICH and Intel MPI
        ("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),  # MVAPICH2
        ("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ],
)
def test_several_tasks_without_a_rendezvous_are_refused(variables, monkeypatch, launcher, count, index, capsys):
    line = (
        f"{count}=2: {launcher} has started 2 tasks of this command, but the run has 1 node. For one run, start one task per "
        "node and set NNODES, NODE_RANK and MASTER_ADDR (docs/multi_node.md). For separate runs, start each task with "
        f"env -u {count}\n"
    )
    monkeypatch.setattr(separate_tasks.time, "sleep", lambda _: None)
    for task, expected in (("0", line), ("1", "")):  # the first task prints the line for all
        variables({count: "2", index: task})
        with pytest.raises(SystemExit) as exit, one_line_errors():
            refuse_separate_tasks()
        assert (exit.value.code, capsys.readouterr().err) == (2, expected)


def test_more_tasks_than_nodes_are_refused_and_the_line_names_all_variables_to_remove(variables):
    variables({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "PMI_SIZE": "4", "NNODES": "2"})
    with pytest.raises(ConfigError) as error:
        refuse_separate_tasks(2)
    line = str(error.value)
    assert line.startswith(
        "SLURM_STEP_NUM_TASKS=4: srun has started 4 tasks of this command, but the run has 2 nodes. "
    )
    assert line.endswith(" start each task with env -u SLURM_STEP_NUM_TASKS -u PMI_SIZE")


@pytest.mark.parametrize("command", ["train.py", "trainer/launch.py"])
def test_nnodes_1_does_not_allow_several_tasks(command):
    """A script may set it as a matter of course. train.py ignores it."""
    variables = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"} | SRUN | {"NNODES": "1"}
    done = subprocess.run([sys.executable, ROOT / command], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("SLURM_STEP_NUM_TASKS=2: srun has started 2 tasks")


@pytest.mark.parametrize(
    "values",
    [
        {
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": "0",
            "SLURM_JOB_ID": "7",
        },  # a batch script, or the shell of an allocation
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},  # srun --pty
        MPIRUN | {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "node-a"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {},
    ],
)
def test_one_task_or_tasks_with_a_rendezvous_are_not_refused(variables, values):
    variables(values)
    refuse_separate_tasks()


@pytest.mark.parametrize("nodes", [2, 4])  # all nodes, and two of an elastic run
def test_one_task_per_node_is_not_refused(variables, nodes):
    variables(SRUN)
    refuse_separate_tasks(nodes)

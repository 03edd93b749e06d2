"""Tasks of one command that srun, mpirun or flux has started, and that would not form one run."""

import os
import sys
import time

from trainer.base.config.errors import ConfigError
from trainer.base.system.spelling import counted

_TASK_COUNTS = {
    "SLURM_STEP_NUM_TASKS": ("srun", "SLURM_PROCID"),
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "OMPI_COMM_WORLD_RANK"),
    "PMI_SIZE": ("mpirun", "PMI_RANK"),
    "MV2_COMM_WORLD_SIZE": ("mpirun", "MV2_COMM_WORLD_RANK"),
    "FLUX_JOB_SIZE": ("flux run", "FLUX_TASK_RANK"),
}
"""Variable with the number of tasks that a launcher has started -> this launcher, variable with the index of the task.
SLURM_NTASKS is not among them: it is also set in the shell of an allocation, which is one process."""


def refuse_separate_tasks(nodes: int = 1) -> None:
    """Raise ConfigError if a launcher has started more tasks of this command than the run has nodes. They would be separate runs,
    because nothing says how they form one run. Only the first task says so. nodes: maximum number of nodes."""
    if "WORLD_SIZE" in os.environ:  # this task is a rank of its own
        return
    counts = {name: os.environ.get(name, "") for name in _TASK_COUNTS}
    names = [name for name, count in counts.items() if count.isdecimal() and int(count) > nodes]
    if not names:
        return
    name = names[0]
    launcher, index = _TASK_COUNTS[name]
    if os.environ.get(index, "0") != "0":
        time.sleep(5)  # as in `one_line_errors`
        sys.exit(2)
    unset = " ".join(f"-u {name}" for name in names)
    raise ConfigError(
        "",
        f"{name}={counts[name]}: {launcher} has started {counts[name]} tasks of this command, but the run has "
        f"{counted(nodes, 'node')}. For one run, start one task per node and set NNODES, NODE_RANK and MASTER_ADDR "
        f"(docs/multi_node.md). For separate runs, start each task with env {unset}",
    )

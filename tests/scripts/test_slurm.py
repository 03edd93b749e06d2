"""scripts/slurm/train.sbatch, with stubs of Slurm's commands."""

import os
import signal
import subprocess
import time

import pytest

from tests.conftest import ROOT

STUBS = {
    "scontrol": 'echo "scontrol $*" >> calls; echo node-a; echo node-b',
    "scancel": 'echo "scancel $*" >> calls; touch stopped',
    "srun": 'shift; echo "$SRUN_CPUS_PER_TASK $NNODES $MASTER_ADDR $MASTER_PORT" >> calls; SLURM_NODEID=1 "$@"',
}
TRAINER = """#!/bin/bash
if [ "$1" = --help ]; then exit 0; fi
echo "node $NODE_RANK: $*" >> calls
touch started
until [ -e stopped ] || [ -e finished ]; do sleep 0.05; done
exit "$EXIT_CODE"
"""


@pytest.fixture
def start(tmp_path):
    """start(exit_code): submit the script with a trainer that runs until the file `stopped` or `finished` exists."""
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
    (tmp_path / "run_llama_train.sh").write_text(TRAINER)
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]"}
    processes = []
    variables |= {"SLURM_JOB_ID": "12345", "SLURM_CPUS_PER_TASK": "96", "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def submit(exit_code):
        command = ["bash", str(ROOT / "scripts" / "slurm" / "train.sbatch"), "--config", "my file.toml"]
        process = subprocess.Popen(command, env=os.environ | variables | {"EXIT_CODE": str(exit_code)})
        processes.append(process)
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        return process

    yield submit
    (tmp_path / "finished").touch()  # ends a trainer that a failed test has left
    for process in processes:
        process.kill()
        process.wait()


STARTED = ["scontrol show hostnames node-[a-b]", "96 2 node-a 32345", "node 1: --config my file.toml"]


@pytest.mark.parametrize("code", [0, 1])
def test_the_exit_code_of_the_run_is_that_of_the_job(start, tmp_path, code):
    process = start(code)
    (tmp_path / "finished").touch()
    assert process.wait(60) == code
    assert (tmp_path / "calls").read_text().splitlines() == STARTED


@pytest.mark.parametrize(("code", "requeued"), [(0, ["scontrol requeue 12345"]), (1, [])])
def test_a_stopped_run_that_has_saved_is_queued_again(start, tmp_path, code, requeued):
    process = start(code)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == code
    assert (tmp_path / "calls").read_text().splitlines() == [*STARTED, "scancel --signal=TERM 12345", *requeued]


def test_a_cancelled_job_waits_for_the_run_and_is_not_queued_again(start, tmp_path):
    process = start(0)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    (tmp_path / "stopped").touch()  # Slurm has stopped the steps
    assert process.wait(60) == 0
    assert (tmp_path / "calls").read_text().splitlines() == STARTED

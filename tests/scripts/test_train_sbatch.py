"""What scripts/slurm/train.sbatch computes. tests/slurm/ submits it to a real cluster."""

import re
import subprocess

import pytest

from tests.conftest import ROOT


@pytest.mark.parametrize("job_id", [1, 12_767, 19_999, 20_000, 4_000_000])
def test_the_port_of_every_job_is_below_those_that_linux_assigns_to_connections(job_id):
    """The first thousands of a cluster's jobs would not show that the ports of later ones are too high."""
    text = (ROOT / "scripts" / "slurm" / "train.sbatch").read_text()
    (expression,) = re.findall(r'MASTER_PORT=("[^"]*")', text)
    script = f"unset MASTER_PORT; SLURM_JOB_ID={job_id}; echo {expression}"
    port = int(subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout)
    assert 1024 < port < 32_768

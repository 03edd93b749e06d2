import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.slurm.cluster import running_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A Slurm cluster of two nodes."""
    path = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"needs Slurm, such as Debian's packages slurm-wlm and munge: no {', '.join(missing)}")
    with running_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="session")
def clone(tmp_path_factory):
    """A clone in a folder whose name has a blank. Its .venv runs the Python of the tests."""
    folder = tmp_path_factory.mktemp("shared") / "my clone"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if not name.startswith(("docs/", "tests/")) and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder

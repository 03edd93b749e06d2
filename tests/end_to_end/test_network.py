"""Network devices that are absent or down are one line, within seconds."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.end_to_end.test_commands import SCRIPT, environment


def run(tiny, folder, ranks, prefix=(), **variables):
    command = [*prefix, SCRIPT, *tiny, "--run.output_folder", str(folder)]
    variables = environment(NGPU=str(ranks), **variables)
    return subprocess.run(list(map(str, command)), env=variables, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("names", ["nosuch0", "lo,nosuch0"])
def test_a_device_that_the_node_lacks_is_named(tiny, tmp_path, ranks, names):
    done = run(tiny, tmp_path, ranks, GLOO_SOCKET_IFNAME=names)
    line = f"GLOO_SOCKET_IFNAME={names}: this node has no network device nosuch0, but "
    assert done.returncode == 2 and done.stderr.startswith(line) and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loopback_device_that_is_down_is_named(tiny, tmp_path, ranks):
    prefix = [] if os.geteuid() == 0 else ["--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run(["unshare", *prefix, "--net", "true"]).returncode:
        pytest.skip("this machine allows no new network")
    done = run(tiny, tmp_path, ranks, prefix=["unshare", *prefix, "--net"])
    line = "the network device lo of this node is down; an administrator can start it with: ip link set lo up\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.parametrize("script", ["train.py", "scripts/prepare_data.py"])
def test_a_safe_path_of_python_changes_nothing(tiny, tmp_path, script):
    """PYTHONSAFEPATH=1 and python -P leave the folder of the script out of the module path."""
    command = [SCRIPT] if script == "train.py" else [sys.executable, ROOT / script]
    steps = [] if script == "scripts/prepare_data.py" else ["--training.steps", "1"]
    words = [*command, *tiny, "--run.output_folder", tmp_path, "--data.dataset", "chat", "--data.path", "", *steps]
    done = subprocess.run(
        list(map(str, words)),
        env=environment(NGPU="1", PYTHONSAFEPATH="1"),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr

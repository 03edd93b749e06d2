"""Two nodes with addresses of their own: network namespaces that are connected by a virtual cable."""

import os
import shutil
import subprocess
import time

import pytest

from tests.end_to_end.test_commands import SCRIPT, start
from tests.training_runs import records, train

FIRST, SECOND = "10.213.0.1", "10.213.0.2"


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces():
    """The names of two connected network namespaces."""
    names = [f"node{i}-{os.getpid()}" for i in range(2)]
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, (FIRST, SECOND), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"cannot connect network namespaces: {error.stderr.strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def start_nodes(namespaces):
    """start_nodes(flags, port): start a launcher with two ranks in each namespace."""
    started = []

    def start_both(flags, port):
        common = {"NNODES": "2", "NGPU": "2", "MASTER_ADDR": FIRST, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "cable"}
        command = [SCRIPT, *flags]
        both = [
            start("ip", "netns", "exec", name, *command, NODE_RANK=str(i), **common)
            for i, name in enumerate(namespaces)
        ]
        started.extend(both)
        return both

    yield start_both
    for launcher in started:
        launcher.kill()
        launcher.wait()


def test_a_lost_link_ends_the_run_which_resumes_with_the_losses_of_one_node(
    namespaces, start_nodes, tiny, tmp_path, ranks
):
    common = [*tiny, "--training.global_batch_size", "8", "--lr_schedule.min_lr_ratio", "1.0"]
    two_nodes = [*common, "--run.output_folder", str(tmp_path / "two"), "--checkpoint.interval_steps", "5"]
    two_nodes += ["--checkpoint.keep", "3"]  # 100,000 steps would need 33 GiB otherwise
    endless = ["--training.steps", "100000", "--resilience.hang_timeout_s", "10"]
    running = start_nodes([*two_nodes, *endless], "29500")
    metrics = tmp_path / "two" / "tiny" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or len(records(metrics.parent)) < 12:
        ended = [node for node in running if node.poll() is not None]
        assert not ended, "\n".join(
            f"{node.args} ended with {node.returncode}: {node.communicate()[1]}" for node in ended
        )
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ip("-n", namespaces[1], "link", "set", "cable", "down")
    last_words = ("sends no heartbeat; its last one was at step", "the node of rank 0 does not answer")
    for node, words in zip(running, last_words, strict=True):
        _, err = node.communicate(timeout=120)
        assert node.returncode == 1
        for line in ("no step has completed for", "waiting in gloo:", words):
            assert line in err

    steps = max(record["step"] for record in records(metrics.parent)) + 5
    ip("-n", namespaces[1], "link", "set", "cable", "up")
    for node in start_nodes([*two_nodes, "--training.steps", str(steps)], "29501"):
        _, err = node.communicate(timeout=120)
        assert node.returncode == 0, err
    ranks(4).run(train, [*common, "--run.output_folder", str(tmp_path / "one"), "--training.steps", str(steps)])
    losses = [
        {record["step"]: record["loss"] for record in records(tmp_path / name / "tiny")} for name in ("two", "one")
    ]
    assert len(losses[0]) == steps and losses[0] == losses[1]

"""Two nodes with addresses of their own: network namespaces that are connected by a virtual cable."""

import os
import shutil
import subprocess
import time

import pytest

from tests.end_to_end.test_commands import SCRIPT, start
from tests.training_runs import records, train

FIRST, SECOND = "10.213.0.1", "10.213.0.2"
STEPS = 40


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces():
    """The names of two connected network namespaces."""
    names = [f"node{i}-{os.getpid()}" for i in range(2)]
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip")
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"may not create network namespaces: {error.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, (FIRST, SECOND), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def start_nodes(namespaces, flags, port):
    variables = {"NNODES": "2", "NGPU": "2", "MASTER_ADDR": FIRST, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "cable"}
    nodes = enumerate(namespaces)
    return [start("ip", "netns", "exec", name, SCRIPT, *flags, NODE_RANK=str(i), **variables) for i, name in nodes]


def test_a_lost_link_ends_the_run_which_resumes_with_the_losses_of_one_node(namespaces, tiny, tmp_path, ranks):
    flags = [*tiny, "--training.steps", str(STEPS), "--training.global_batch_size", "8", "--run.output_folder"]
    two_nodes = [*flags, str(tmp_path / "two"), "--checkpoint.interval_steps", "5"]
    running = start_nodes(namespaces, [*two_nodes, "--resilience.hang_timeout_s", "4"], "29500")
    metrics = tmp_path / "two" / "tiny" / "metrics.jsonl"
    while not metrics.exists() or len(records(metrics.parent)) < 12:
        assert all(node.poll() is None for node in running), [node.communicate() for node in running if node.poll()]
        time.sleep(0.05)
    ip("-n", namespaces[1], "link", "set", "cable", "down")
    last_words = ("sends no heartbeat; its last one was at step", "the node of rank 0 does not answer")
    for node, words in zip(running, last_words, strict=True):
        _, err = node.communicate(timeout=120)
        assert node.returncode == 1
        assert "no step has completed for" in err and words in err

    ip("-n", namespaces[1], "link", "set", "cable", "up")
    for node in start_nodes(namespaces, two_nodes, "29501"):
        _, err = node.communicate(timeout=120)
        assert (node.returncode, err) == (0, "")
    ranks(4).run(train, [*flags, str(tmp_path / "one")])
    losses = [
        {record["step"]: record["loss"] for record in records(tmp_path / name / "tiny")} for name in ("two", "one")
    ]
    assert len(losses[0]) == STEPS and losses[0] == losses[1]

"""Local ranks whose function succeeds leave no semaphores or descriptors. If one fails, the others are killed at once."""

import multiprocessing
import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from trainer.tools.testing.ranks import LocalRanks

PROGRAM = """
from tests.tools.testing.test_ranks import create_semaphore
from trainer.tools.testing.ranks import LocalRanks
print(LocalRanks(2).run(create_semaphore))
"""
SEMAPHORES = []


def create_semaphore():
    SEMAPHORES.append(multiprocessing.get_context("spawn").Lock())


def test_semaphores_of_ranks_are_removed_before_the_ranks_are_killed():
    process = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    # Python's resource tracker would warn about leaked semaphores after the program has ended.
    assert (process.returncode, process.stdout, process.stderr) == (0, "[None, None]\n", "")


def some_tensors():
    return [torch.full((4,), float(i)) for i in range(50)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_results_hold_no_descriptors():
    """Many systems allow a process 1,024, and tests keep the results of hundreds of runs."""
    before = len(os.listdir("/proc/self/fd"))
    (first,), (second,) = (LocalRanks(1).run(some_tensors) for _ in range(2))
    assert [t.tolist() for t in first] == [t.tolist() for t in second] == [[float(i)] * 4 for i in range(50)]
    assert (
        len(os.listdir("/proc/self/fd")) < before + 25
    )  # those of the fork server, if this test is the first to start it

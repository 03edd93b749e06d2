"""Local ranks whose function succeeds leave no semaphores. If one fails, the others are killed at once."""

import multiprocessing
import subprocess
import sys

from tests.conftest import ROOT

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

"""Local ranks leave nothing behind."""

import multiprocessing
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PROGRAM = """
from tests.testing.test_ranks import create_semaphore
from trainer.testing.ranks import LocalRanks, RankError
try:
    print(LocalRanks(2).run(create_semaphore, {fails}))
except RankError:
    print("failed")
"""
SEMAPHORES = []


def create_semaphore(fails):
    SEMAPHORES.append(multiprocessing.get_context("spawn").Lock())
    if fails:
        raise ValueError


@pytest.mark.parametrize(("fails", "printed"), [(False, "[None, None]\n"), (True, "failed\n")])
def test_semaphores_of_ranks_are_removed_before_the_ranks_are_killed(fails, printed):
    command = [sys.executable, "-c", PROGRAM.format(fails=fails)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    # Python's resource tracker would warn about leaked semaphores after the program has ended.
    assert (process.returncode, process.stdout, process.stderr) == (0, printed, "")

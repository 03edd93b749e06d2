"""The crash points of a save that tests/faults injects by the names of functions."""

import multiprocessing
import signal
import sys

import pytest
import torch

from tests.faults import sitecustomize
from tests.faults.saves import POINTS
from trainer.checkpoint import commit, manifest, tensor_files
from trainer.checkpoint.commit import SaveRequest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")
MODULES = {module.__name__: module for module in (commit, tensor_files, manifest)}


def save_with_crash(folder, point):
    """Save a step twice with the fault, in a process without a process group."""
    sitecustomize.FAULT = {"kind": "crash", "point": point}
    commit.run_on_rank_0 = lambda work: work()
    for name, change in sitecustomize.KINDS["crash"].items():
        change(MODULES[name])
    tensors = {"model/w": torch.zeros(4), "model/b": torch.zeros(4)}
    for value in (b"1", b"2"):
        request = SaveRequest(folder, 1, {"train_state.json": value}, {}, 0, 0, 0)
        staging_dir = commit.make_staging_dir(request.final)
        commit.save(request, staging_dir, tensor_files.local_save_plan(tensors), tensors, None)


@pytest.mark.parametrize("point", [*POINTS, "old renamed"])
def test_every_crash_point_of_a_save_kills_the_process(tmp_path, point):
    folder = tmp_path / "checkpoints"
    process = multiprocessing.get_context("fork").Process(target=save_with_crash, args=(folder, point))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    for checkpoint in commit.latest_per_step(folder):
        assert manifest.find_damage(checkpoint) == ""

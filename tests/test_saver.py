"""Saving beside training: the same files, the state of the moment, and no failure swallowed."""

import errno
import os
import signal

import pytest
import torch

from scripts.gloo_pool import RankError
from tests.test_checkpoint import load, names
from trainer import checkpoint, shards
from trainer.config import CheckpointConfig
from trainer.saver import LostWriter, Saver
from trainer.shards import read_index

MODES = ["off", "thread", "process"]
FILES = {"train_state.json": b'{"step": 1, "cursor": 0, "identity": {}}'}


def saver_of(mode, folder):
    return Saver(CheckpointConfig(async_mode=mode), folder, torch.device("cpu"))


def two_saves(mode, folder):
    """The tensors change as soon as a save lets them; returns what the saves hold and what was reported."""
    saver = saver_of(mode, folder)
    tensors = {"model/w": torch.full((4,), 1.0), "model/b": torch.arange(3)}
    reported = []
    for step in (1, 2):
        reported += saver.save(step, tensors, FILES, {})
        saver.before_update()
        tensors["model/w"] += 1
        tensors["model/b"] += 1
    reported += saver.wait()
    saver.close()
    stored = [load(folder / f"step-0000000{step}") for step in (1, 2)]
    return stored, [finished.path.name for finished in reported]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_save_holds_the_state_of_its_moment(ranks, tmp_path, mode, size):
    for stored, reported in ranks(size).run(two_saves, mode, tmp_path):
        assert stored == [
            {"model/w": [1.0] * 4, "model/b": [0, 1, 2]},
            {"model/w": [2.0] * 4, "model/b": [1, 2, 3]},
        ]
        assert reported == ["step-00000001", "step-00000002"]
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def odd_tensors(mode, folder):
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "half": torch.ones(3, 5, dtype=torch.bfloat16),
        "turned": torch.arange(12.0).view(3, 4).t(),
    }
    saver = saver_of(mode, folder)
    saver.save(1, tensors, FILES, {})
    saver.wait()
    saver.close()
    index = read_index(folder / "step-00000001")
    loaded = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    checkpoint.load(folder / "step-00000001", loaded, set(tensors))
    return all(torch.equal(loaded[name], t) for name, t in tensors.items()) and set(index) == set(tensors)


@pytest.mark.parametrize("mode", MODES)
def test_every_shape_and_type_comes_back(ranks, tmp_path, mode):
    assert ranks(1).run(odd_tensors, mode, tmp_path) == [True]


def no_space(*args):
    raise OSError(errno.ENOSPC, "No space left on device", "shard")


def failing(folder):
    """A save in a thread fails; the next call tells it, and the one after that works."""
    saver = saver_of("thread", folder)
    tensors = {"model/w": torch.ones(4), "model/b": torch.arange(3)}
    original, shards.write_safetensors = shards.write_safetensors, no_space
    try:
        saver.save(1, tensors, FILES, {})
        told = ""
        saver.running[3].exception()
    finally:
        shards.write_safetensors = original
    try:
        saver.finished()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    saver.save(1, tensors, FILES, {})
    after = [finished.path.name for finished in saver.wait()]
    saver.close()
    return told, after


@pytest.mark.parametrize("size", [1, 2])
def test_a_failure_in_the_background_is_told_and_the_next_save_is_made(ranks, tmp_path, size):
    told = "SaveFailed: step 1 could not be saved: rank 0: shard: No space left on device"
    assert ranks(size).run(failing, tmp_path) == [(told, ["step-00000001"])] * size


def killed(folder):
    saver = saver_of("process", folder)
    tensors = {"model/w": torch.ones(4)}
    os.kill(saver.writer.process.pid, signal.SIGKILL)
    try:
        saver.save(1, tensors, FILES, {})
        saver.wait()
    except LostWriter as error:
        return str(error)


def test_a_killed_writer_is_told(ranks, tmp_path):
    told = "step 1 could not be saved: the process that writes checkpoints was ended by SIGKILL"
    assert ranks(1).run(killed, tmp_path) == [told]


def bug(folder):
    saver = saver_of("off", folder)
    saver.save(1, {"model/w": torch.ones(4, dtype=torch.complex64)}, FILES, {})


def test_a_bug_is_no_failed_save(ranks, tmp_path):
    with pytest.raises(RankError, match="complex64"):
        ranks(1).run(bug, tmp_path)

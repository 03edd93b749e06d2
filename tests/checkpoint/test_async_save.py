"""Saving beside training: the same files, the state of the moment, and no failure swallowed."""

import errno
import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.test_commit import load, names
from trainer.checkpoint import commit, storage
from trainer.checkpoint.async_save import AsyncCheckpointer, WriterDied
from trainer.checkpoint.storage import read_index
from trainer.config import CheckpointConfig
from trainer.testing.ranks import RankError

MODES = ["off", "thread", "process"]
FILES = {"train_state.json": b'{"step": 1, "cursor": 0, "fingerprint": {}}'}


def saver_of(mode, folder, tensors):
    return AsyncCheckpointer(CheckpointConfig(async_mode=mode), folder, torch.device("cpu"), tensors)


def two_saves(mode, folder):
    """The tensors change as soon as a save lets them; returns what the saves hold and what was reported."""
    tensors = {"model/w": torch.full((4,), 1.0), "model/b": torch.arange(3)}
    saver = saver_of(mode, folder, tensors)
    reported = []
    for step in (1, 2):
        saver.save(step, tensors, FILES, {})
        reported += saver.poll()
        saver.before_update()
        tensors["model/w"] += 1
        tensors["model/b"] += 1
    reported += saver.wait()
    saver.close()
    stored = [load(folder / f"step-0000000{step}") for step in (1, 2)]
    return stored, [(ended.step, ended.failure) for ended in reported]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_save_holds_the_state_of_its_moment(ranks, tmp_path, mode, size):
    for stored, reported in ranks(size).run(two_saves, mode, tmp_path):
        assert stored == [
            {"model/w": [1.0] * 4, "model/b": [0, 1, 2]},
            {"model/w": [2.0] * 4, "model/b": [1, 2, 3]},
        ]
        assert reported == [(1, None), (2, None)]
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def odd_tensors(mode, folder):
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "half": torch.ones(3, 5, dtype=torch.bfloat16),
        "turned": torch.arange(12.0).view(3, 4).t(),
    }
    saver = saver_of(mode, folder, tensors)
    saver.save(1, tensors, FILES, {})
    saver.wait()
    saver.close()
    index = read_index(folder / "step-00000001")
    loaded = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    commit.load(folder / "step-00000001", loaded, set(tensors))
    return all(torch.equal(loaded[name], t) for name, t in tensors.items()) and set(index) == set(tensors)


@pytest.mark.parametrize("mode", MODES)
def test_every_shape_and_type_comes_back(ranks, tmp_path, mode):
    assert ranks(1).run(odd_tensors, mode, tmp_path) == [True]


def no_space(*args):
    raise OSError(errno.ENOSPC, "No space left on device", "shard")


def failing(mode, folder, known_before):
    """A save fails, known to this rank or not when the next begins, which works."""
    tensors = {"model/w": torch.ones(4), "model/b": torch.arange(3)}
    saver = saver_of(mode, folder, tensors)
    original, storage.write_safetensors = storage.write_safetensors, no_space
    told = []
    try:
        saver.save(1, tensors, FILES, {})
        saver.pending.end.exception()
    finally:
        storage.write_safetensors = original
    if known_before == dist.get_rank():
        told = saver.poll()
    saver.save(1, tensors, FILES, {})
    told += saver.wait()
    saver.close()
    return [(ended.step, str(ended.failure)) for ended in told]


@pytest.mark.parametrize("mode", ["off", "thread"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_failure_is_told_and_the_next_save_is_made(ranks, tmp_path, size, mode):
    told = [(1, "step 1 could not be saved: rank 0: shard: No space left on device"), (1, "None")]
    assert ranks(size).run(failing, mode, tmp_path, 0) == [told] * size
    assert names(tmp_path) == ["step-00000001"]


def killed(folder):
    tensors = {"model/w": torch.ones(4)}
    saver = saver_of("process", folder, tensors)
    saver.save(1, tensors, FILES, {})
    assert saver.wait()[0].failure is None
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(saver.writer.process.pid, signal.SIGKILL)
        saver.writer.process.join()
    try:
        saver.before_update()
        before = ""
    except WriterDied as error:
        before = str(error)
    saver.save(2, tensors, FILES, {})
    (ended,) = saver.wait()
    saver.close()
    return before, type(ended.failure).__name__, str(ended.failure)


@pytest.mark.parametrize("size", [1, 2])
def test_a_killed_writer_is_told_by_all_ranks(ranks, tmp_path, size):
    *others, last = ranks(size).run(killed, tmp_path)
    how = "the process that writes checkpoints was ended by SIGKILL"
    assert last == (f"no step can be saved any more: {how}", "WriterDied", f"step 2 could not be saved: {how}")
    for before, kind, failure in others:
        assert (before, kind) == ("", "WriterDied")
        assert failure.startswith("step 2 could not be saved: ")


def bug(folder):
    tensors = {"model/w": torch.ones(4, dtype=torch.complex64)}
    saver = saver_of("off", folder, tensors)
    saver.save(1, tensors, FILES, {})


def test_a_bug_is_no_failed_save(ranks, tmp_path):
    with pytest.raises(RankError, match="complex64"):
        ranks(1).run(bug, tmp_path)

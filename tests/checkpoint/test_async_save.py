"""Asynchronous saves: content, results and failures of every mode."""

import errno

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.test_commit import load, names
from trainer.checkpoint import commit, tensor_files
from trainer.checkpoint.async_save import WRITERS
from trainer.checkpoint.commit import SaveRequest
from trainer.checkpoint.tensor_files import read_index
from trainer.tools.testing.ranks import RankError

MODES = list(WRITERS)
FILES = {"train_state.json": b'{"step": 1, "cursor": 0, "fingerprint": {}}'}


def saver_of(mode, tensors):
    return WRITERS[mode](torch.device("cpu"), tensors)


def request_of(folder, step):
    return SaveRequest(folder, step, FILES, {}, keep=0, keep_interval_steps=0, keep_best=0)


def two_saves(mode, folder):
    """Change the tensors as soon as a save allows it; return the stored tensors and the results."""
    tensors = {"model/w": torch.full((4,), 1.0), "model/b": torch.arange(3)}
    saver = saver_of(mode, tensors)
    reported = []
    for step in (1, 2):
        reported += saver.wait()
        saver.save(request_of(folder, step), tensors)
        saver.before_update()
        tensors["model/w"] += 1
        tensors["model/b"] += 1
    reported += saver.wait()
    saver.close()
    stored = [load(folder / f"step-0000000{step}") for step in (1, 2)]
    return stored, [(result.step, result.failure) for result in reported]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_save_contains_the_state_when_it_started(ranks, tmp_path, mode, size):
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
        "transposed": torch.arange(12.0).view(3, 4).t(),
    }
    saver = saver_of(mode, tensors)
    saver.save(request_of(folder, 1), tensors)
    saver.wait()
    saver.close()
    index = read_index(folder / "step-00000001")
    loaded = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    commit.load(folder / "step-00000001", loaded, set(tensors))
    return all(torch.equal(loaded[name], t) for name, t in tensors.items()) and set(index) == set(tensors)


@pytest.mark.parametrize("mode", MODES)
def test_every_shape_and_dtype_round_trips(ranks, tmp_path, mode):
    assert ranks(1).run(odd_tensors, mode, tmp_path) == [True]


def no_space(*args):
    raise OSError(errno.ENOSPC, "No space left on device", "shard")


def failing(mode, folder, known_before):
    """Fail one save and succeed with the next. known_before: the rank that polls the failure before the next save starts."""
    tensors = {"model/w": torch.ones(4), "model/b": torch.arange(3)}
    saver = saver_of(mode, tensors)
    original, tensor_files.write_safetensors = tensor_files.write_safetensors, no_space
    results = []
    try:
        saver.save(request_of(folder, 1), tensors)
        saver.pending[-1].exception()
    finally:
        tensor_files.write_safetensors = original
    if known_before == dist.get_rank():
        results = saver.poll()
    results += saver.wait()
    saver.save(request_of(folder, 1), tensors)
    results += saver.wait()
    saver.close()
    return [(result.step, str(result.failure)) for result in results]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2])
def test_failure_is_reported_and_the_next_save_succeeds(ranks, tmp_path, size, mode):
    expected = [(1, "step 1 could not be saved: rank 0: shard: No space left on device"), (1, "None")]
    assert ranks(size).run(failing, mode, tmp_path, 0) == [expected] * size
    assert names(tmp_path) == ["step-00000001"]


def bug(folder):
    tensors = {"model/w": torch.ones(4, dtype=torch.complex64)}
    saver = saver_of("off", tensors)
    saver.save(request_of(folder, 1), tensors)


def test_unexpected_exceptions_are_not_reported_as_failed_saves(ranks, tmp_path):
    with pytest.raises(RankError, match="complex64"):
        ranks(1).run(bug, tmp_path)

"""What a run needs for certain, against what there is."""

from collections import namedtuple

import pytest
import torch

from tests.optim.test_offload import EARLY
from tests.training_runs import Result, train
from trainer.config import ConfigError
from trainer.config.load import load_config
from trainer.planning.estimate import plan
from trainer.run.preflight import MemoryNeed, check_memory, minimum_memory, remaining_checkpoints, state_bytes
from trainer.run.resolve import resolve
from trainer.runtime.accelerators import ACCELERATORS, SHORT_NAMES

Usage = namedtuple("Usage", ["total", "used", "free"])


def refusal(argv, returns, function=train) -> str | Result:
    """What is said on a rank where functions return something else; or the run."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in returns.items():
            patch.setattr(name, lambda *_, value=value: value)
        try:
            return function(argv)
        except ConfigError as error:
            return load_config(argv).explain(error)


def size_of(argv):
    """Bytes of a checkpoint."""
    config = load_config(argv)
    return resolve(config, 1).num_parameters * state_bytes(config.training, config.optimizer)


def disk(tiny, checkpoints):
    return {"shutil.disk_usage": Usage(0, 0, int(checkpoints * size_of(tiny)))}


def line_of(ranks, argv, returns, function=train):
    (line,) = set(ranks(2).run(refusal, argv, returns, function))
    return line


def test_checkpoints_that_will_find_no_room_are_refused_before_the_first_step(ranks, tiny, tmp_path):
    size = size_of(tiny) / 2**30
    words = [*tiny, "--run.output_folder", str(tmp_path)]
    every_step = [*words, "--checkpoint.interval_steps", "1"]
    line = line_of(ranks, every_step, disk(tiny, 3.5))
    assert line.startswith(
        f"[checkpoint] keep = 0 (default): 4 checkpoints of {size:.3g} GiB will be there at a time, and "
    )
    assert line.endswith(f"has {3.5 * size:.3g} GiB left; keep = 2 needs {3 * size:.3g} GiB")
    line = line_of(ranks, [*every_step, "--checkpoint.keep", "2"], disk(tiny, 2.5))
    assert line.startswith("--checkpoint.keep 2: 3 checkpoints") and f"; keep = 1 needs {2 * size:.3g} GiB" in line
    line = line_of(ranks, words, disk(tiny, 0.9))
    assert line.startswith(f"--run.output_folder {tmp_path}: a checkpoint takes {size:.3g} GiB, and ")
    assert all(isinstance(end, Result) for end in ranks(2).run(refusal, every_step, disk(tiny, 4.1)))


def test_checkpoints_that_stay_are_counted_where_they_are_due(ranks, tiny, tmp_path):
    """Of steps 2, 4, ..., 12: two are kept, one is written, and of those that are older 6 stays; not 3, which is not saved."""
    words = [*tiny, "--run.output_folder", str(tmp_path), "--training.steps", "12", "--checkpoint.interval_steps", "2"]
    words += ["--checkpoint.keep", "2", "--checkpoint.keep_interval_steps", "3"]
    assert line_of(ranks, words, disk(tiny, 3.9)).startswith("--checkpoint.keep 2: 4 checkpoints of ")
    assert all(isinstance(end, Result) for end in ranks(2).run(refusal, words, disk(tiny, 4.1)))


def test_a_run_that_goes_on_needs_room_for_what_it_will_write_alone(ranks, tiny, tmp_path):
    words = [*tiny, "--run.output_folder", str(tmp_path), "--checkpoint.interval_steps", "1", "--checkpoint.keep", "2"]
    ranks(1).run(train, [*words, "--training.steps", "2"])
    for room_for, goes_on in ((0.9, False), (1.1, True)):
        (ended,) = ranks(1).run(refusal, [*words, "--training.steps", "6"], disk(tiny, room_for))
        assert isinstance(ended, Result) == goes_on, ended


ADVICE = "scripts/plan.py shows where memory goes, docs/memory.md what gives some back"


def test_host_memory_that_is_not_there_is_refused(ranks, tiny, tmp_path):
    """16 bytes a parameter on two ranks of one machine."""
    need = size_of(tiny) * 16 / 12
    returns = {"trainer.run.preflight.node_id": "node7", "trainer.run.preflight.memory_available": int(0.9 * need)}
    line = line_of(ranks, [*tiny, "--run.output_folder", str(tmp_path)], returns)
    assert line == (
        f"parameters, gradients and optimizer alone need {need / 2**30:.3g} GiB up to rank 1, more than the "
        f"{0.9 * need / 2**30:.3g} GiB of host memory that node7 has left; {ADVICE}"
    )


def on_a_gpu(argv):
    config = load_config(argv)
    shard = torch.empty(2**20, device="meta")
    check_memory([shard], config.training, config.optimizer, config.parallel, torch.device("cuda"))


def test_memory_of_the_device_that_is_not_there_is_refused(ranks, tiny):
    line = line_of(ranks, tiny, {"trainer.runtime.device.memory_free": 2**23}, function=on_a_gpu)
    assert line == (
        f"parameters, gradients and optimizer alone need 0.0156 GiB on rank 0, whose device has 0.00781 GiB left; {ADVICE}"
    )
    assert line_of(ranks, tiny, {"trainer.runtime.device.memory_free": 2**24}, function=on_a_gpu) is None


@pytest.mark.parametrize("more", [[], ["--optimizer.state_dtype", "bf16", "--optimizer.offload", "state"]])
def test_a_checkpoint_is_as_large_as_planned(tiny, more):
    made = plan(load_config([*tiny, *more]), 1, ACCELERATORS[SHORT_NAMES["h100"]], 0.0, on_gpu=True)
    assert made.checkpoint == pytest.approx(size_of([*tiny, *more]), rel=1e-3)


def test_checkpoints_are_written_at_every_interval_and_at_the_end():
    def to_come(interval, step, steps):
        words = ["--checkpoint.interval_steps", str(interval)]
        return remaining_checkpoints(load_config(words).checkpoint, step, steps)

    assert [to_come(5, 0, 20), to_come(5, 0, 21), to_come(5, 15, 20), to_come(0, 0, 20), to_come(50, 0, 20)] == [
        4,
        5,
        1,
        1,
        1,
    ]


@pytest.mark.parametrize(
    ("words", "need"),
    [
        ([], MemoryNeed(16, 0)),
        (["--training.parameter_dtype", "bf16", "--optimizer.state_dtype", "bf16"], MemoryNeed(8, 0)),
        (["--optimizer.in_backward", "true", *EARLY], MemoryNeed(12, 0)),
        (["--optimizer.offload", "state"], MemoryNeed(8, 16)),
        (["--optimizer.offload", "state_and_gradients", "--training.parameter_dtype", "bf16"], MemoryNeed(2, 16)),
        (["--parallel.cpu_offload", "true"], MemoryNeed(0, 16)),
    ],
)
def test_bytes_of_a_parameter(words, need):
    config = load_config(words)
    assert minimum_memory(1, config.training, config.optimizer, config.parallel) == need

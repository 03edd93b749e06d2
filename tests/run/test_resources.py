"""Preflight checks: minimum requirements of a run, compared with available memory and disk space."""

from collections import namedtuple

import pytest
import torch

from tests.optim.test_offload import IN_BACKWARD
from tests.training_runs import Result, train
from trainer.base.config import ConfigError
from trainer.base.config.load import load_config
from trainer.run.resolve import resolve
from trainer.run.resources import OwnParameters, check_memory, checkpoint_bytes, minimum_memory, remaining_checkpoints
from trainer.runtime.accelerators import ACCELERATORS, SHORT_NAMES
from trainer.tools.planner.estimate import Hardware, estimate

Usage = namedtuple("Usage", ["total", "used", "free"])


def error_or_result(argv, returns, function=train) -> str | Result:
    """Run a function while the functions in `returns` return these values. Return the error line or the result."""
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
    return checkpoint_bytes(config, resolve(config, 1))


def disk(tiny, checkpoints):
    return {"shutil.disk_usage": Usage(0, 0, int(checkpoints * size_of(tiny)))}


def line_of(ranks, argv, returns, function=train):
    (line,) = set(ranks(2).run(error_or_result, argv, returns, function))
    return line


def test_checkpoints_that_exceed_the_disk_are_an_error_before_the_first_step(ranks, tiny, tmp_path):
    size = size_of(tiny) / 2**30
    words = [*tiny, "--run.output_folder", str(tmp_path)]
    every_step = [*words, "--checkpoint.interval_steps", "1"]
    line = line_of(ranks, every_step, disk(tiny, 3.5))
    assert line.startswith(
        f"[checkpoint] keep = 0 (default): up to 4 checkpoints of {size:.3g} GiB will exist at a time, but "
    )
    assert line.endswith(f"has {3.5 * size:.3g} GiB free; keep = 2 needs {3 * size:.3g} GiB")
    line = line_of(ranks, [*every_step, "--checkpoint.keep", "2"], disk(tiny, 2.5))
    assert (
        line.startswith("--checkpoint.keep 2: up to 3 checkpoints") and f"; keep = 1 needs {2 * size:.3g} GiB" in line
    )
    line = line_of(ranks, words, disk(tiny, 0.9))
    assert line.startswith(f"--run.output_folder {tmp_path}: a checkpoint needs {size:.3g} GiB, but ")
    assert all(isinstance(end, Result) for end in ranks(2).run(error_or_result, every_step, disk(tiny, 4.1)))


def test_checkpoints_that_are_kept_at_an_interval_count(ranks, tiny, tmp_path):
    """Saved at steps 2, 4, ..., 12: the two newest and step 6 are kept while one is written; step 3 is not saved."""
    words = [*tiny, "--run.output_folder", str(tmp_path), "--training.steps", "12", "--checkpoint.interval_steps", "2"]
    words += ["--checkpoint.keep", "2", "--checkpoint.keep_interval_steps", "3"]
    assert line_of(ranks, words, disk(tiny, 3.9)).startswith("--checkpoint.keep 2: up to 4 checkpoints of ")
    assert all(isinstance(end, Result) for end in ranks(2).run(error_or_result, words, disk(tiny, 4.1)))


def test_a_resumed_run_needs_disk_only_for_its_remaining_checkpoints(ranks, tiny, tmp_path):
    words = [*tiny, "--run.output_folder", str(tmp_path), "--checkpoint.interval_steps", "1", "--checkpoint.keep", "2"]
    ranks(1).run(train, [*words, "--training.steps", "2"])
    for checkpoints, fits in ((0.9, False), (1.1, True)):
        (ended,) = ranks(1).run(error_or_result, [*words, "--training.steps", "6"], disk(tiny, checkpoints))
        assert isinstance(ended, Result) == fits, ended


ADVICE = "scripts/plan.py estimates the memory of a run, and docs/memory.md describes how to reduce it"


def test_too_little_host_memory_is_an_error(ranks, tiny, tmp_path):
    """20 bytes per parameter on two ranks of one node, which accumulate gradients that are not sharded."""
    need = size_of(tiny) * 20 / 12
    returns = {"trainer.run.resources.node_id": "node7", "trainer.run.resources.memory_available": int(0.9 * need)}
    line = line_of(ranks, [*tiny, "--run.output_folder", str(tmp_path)], returns)
    assert line == (
        f"parameters, gradients and optimizer state alone need {need / 2**30:.3g} GiB of host memory on node7, but "
        f"only {0.9 * need / 2**30:.3g} GiB are free; {ADVICE}"
    )


def on_a_gpu(argv):
    config = load_config(argv)
    part = torch.nn.ModuleDict({"output": torch.nn.Linear(2**10, 2**10, bias=False, device="meta")})
    check_memory(config, resolve(config, 1), [part], torch.device("cuda"))


def test_too_little_device_memory_is_an_error(ranks, tiny):
    line = line_of(ranks, tiny, {"trainer.runtime.device.memory_free": 2**23}, function=on_a_gpu)
    assert line == (
        f"parameters, gradients and optimizer state alone need 0.0156 GiB of device memory on rank 0, but "
        f"only 0.00781 GiB are free; {ADVICE}"
    )
    assert line_of(ranks, tiny, {"trainer.runtime.device.memory_free": 2**24}, function=on_a_gpu) is None


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--optimizer.state_dtype", "bf16", "--optimizer.offload", "state"],
        ["--optimizer.state_dtype", "8bit", "--model.overrides.dim", "256"],  # w2 has fp32 moments
    ],
)
def test_the_size_of_a_checkpoint_equals_the_plan(tiny, more):
    result = estimate(load_config([*tiny, *more]), Hardware(1, ACCELERATORS[SHORT_NAMES["h100"]]))
    assert result.checkpoint_bytes == pytest.approx(size_of([*tiny, *more]), rel=1e-3)


def test_checkpoints_are_written_at_every_interval_and_at_the_end():
    def remaining(interval, step, steps):
        words = ["--checkpoint.interval_steps", str(interval)]
        return remaining_checkpoints(load_config(words).checkpoint, step, steps)

    assert [
        remaining(5, 0, 20),
        remaining(5, 0, 21),
        remaining(5, 15, 20),
        remaining(0, 0, 20),
        remaining(50, 0, 20),
    ] == [
        4,
        5,
        1,
        1,
        1,
    ]


def of_one_parameter(config, ranks):
    """Bytes of device and host memory that a rank needs for one trained parameter."""
    resolved = resolve(config, ranks)
    return minimum_memory(config, resolved, OwnParameters(trained=1, state_bytes=resolved.optimizer.state_bytes))


@pytest.mark.parametrize(
    ("words", "need"),
    [
        ([], (16, 0)),
        (["--training.parameter_dtype", "bf16", "--optimizer.state_dtype", "bf16"], (8, 0)),
        (["--optimizer.in_backward", "true", *IN_BACKWARD], (12, 0)),
        (["--optimizer.offload", "state"], (8, 16)),
        (["--optimizer.offload", "state_and_gradients", "--training.parameter_dtype", "bf16"], (2, 16)),
        (["--parallel.cpu_offload", "true"], (0, 16)),
    ],
)
def test_bytes_of_a_parameter(words, need):
    config = load_config([*words, "--training.global_batch_size", "1", "--training.local_batch_size", "1"])
    assert of_one_parameter(config, 1) == need


@pytest.mark.parametrize(
    ("global_batch_size", "words", "need"),
    [
        (2, [], 16),
        (8, [], 12 + 2 * 4),
        (8, ["--parallel.reduce_dtype", "bf16"], 12 + 2 * 2),
        (8, ["--training.reduce_every_microbatch", "true"], 16),
        (8, ["--parallel.dp_shard", "1", "--parallel.dp_replicate", "2"], 16),
        (
            8,
            ["--training.parameter_dtype", "bf16", "--parallel.dp_shard", "1", "--parallel.dp_replicate", "2"],
            2 + 8 + 4,
        ),
    ],
)
def test_gradients_that_two_ranks_have_not_reduced_yet_are_not_sharded(global_batch_size, words, need):
    batch = ["--training.local_batch_size", "1", "--training.global_batch_size", str(global_batch_size)]
    config = load_config([*batch, *words])
    assert of_one_parameter(config, 2) == (need, 0)

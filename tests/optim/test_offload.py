"""Whole runs whose update is in host memory, in backward, or in another precision."""

import pytest

from tests.training_runs import records, train
from trainer.config import ConfigError
from trainer.config.load import load_config
from trainer.testing.ranks import RankError

EARLY = ("--training.max_norm", "none", "--resilience.max_consecutive_skips", "1")
"""What an update in backward needs."""
NOT_IN_BACKWARD = [
    (
        ["--training.reduce_every_microbatch", "true"],
        "[training] reduce_every_microbatch: gradients are complete after the last one",
    ),
    (["--optimizer.offload", "state"], "[optimizer] offload; state_and_gradients also frees gradients in backward"),
    (["--parallel.cpu_offload", "true"], "[parallel] cpu_offload, which copies gradients to the host late"),
    (["--resilience.on_loss_spike", "skip"], "[resilience] on_loss_spike, which skips complete steps"),
]


def argv(tiny, folder, name, *more, interval=2):
    schedule = ("--lr_schedule.warmup_steps", "2", "--checkpoint.interval_steps", str(interval))
    return [*tiny, "--run.output_folder", str(folder), "--run.name", name, *schedule, *more]


@pytest.mark.parametrize("offload", ["state", "state_and_gradients"])
@pytest.mark.parametrize("layout", [[], ["--parallel.tp", "2", "--training.local_batch_size", "2"]])
def test_a_run_with_its_state_on_the_host_is_the_same_run_resumed_and_resharded(ranks, tiny, tmp_path, offload, layout):
    """Two steps on 2 ranks, two on 4, and the learning rates of all; gradients are clipped."""
    results, rates = [], []
    for name, more in (("plain", []), ("offloaded", ["--optimizer.offload", offload])):
        words = argv(
            tiny, tmp_path, name, *layout, *more, "--training.max_norm", "0.5", "--metrics.interval_steps", "1"
        )
        ranks(2).run(train, [*words, "--training.steps", "2"])
        results.append(ranks(4).run(train, [*words, "--training.steps", "4"])[0].weights)
        rates.append([record["learning_rate"] for record in records(tmp_path / name)])
    assert results[0] == results[1]
    assert rates[0] == rates[1] and len(rates[0]) == 4


@pytest.mark.parametrize(
    "layout", [["--parallel.tp", "2"], ["--parallel.pp", "2"], ["--checkpoint.async_mode", "thread"]]
)
def test_a_run_that_updates_in_backward_is_the_same_run(ranks, tiny, tmp_path, layout):
    """Two steps on 2 ranks, two on 4, with two microbatches or more, saved beside training."""
    results = []
    for name, more in (("plain", []), ("early", ["--optimizer.in_backward", "true"])):
        words = argv(tiny, tmp_path, name, *layout, *more, *EARLY, interval=1)
        ranks(2).run(train, [*words, "--training.steps", "2"])
        results.append(ranks(4).run(train, [*words, "--training.steps", "4"])[0].weights)
    assert results[0] == results[1]


def test_a_run_may_change_where_its_state_is(ranks, tiny, tmp_path):
    ends = []
    for name, offload in (("stays", "none"), ("moves", "state")):
        words = argv(tiny, tmp_path, name)
        ranks(1).run(train, [*words, "--training.steps", "2"])
        ends.append(ranks(1).run(train, [*words, "--training.steps", "4", "--optimizer.offload", offload])[0].weights)
    assert ends[0] == ends[1]


def test_an_fp32_copy_of_bf16_parameters_outlives_the_process(ranks, tiny, tmp_path):
    more = ["--training.parameter_dtype", "bf16", "--optimizer.offload", "state"]
    whole = ranks(1).run(train, [*argv(tiny, tmp_path, "whole", *more), "--training.steps", "4"])[0]
    ranks(1).run(train, [*argv(tiny, tmp_path, "halves", *more), "--training.steps", "2"])
    with pytest.raises(RankError, match=r"an fp32 copy of the parameters \(\[optimizer\] offload\) was true, is false"):
        ranks(1).run(train, [*argv(tiny, tmp_path, "halves", *more[:2]), "--training.steps", "4"])
    halves = ranks(1).run(train, [*argv(tiny, tmp_path, "halves", *more), "--training.steps", "4"])[0]
    assert halves.weights == whole.weights


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--activation_checkpoint.offload_inputs", "true", "--activation_checkpoint.mode", "selective"],
            "--activation_checkpoint.offload_inputs true: needs mode = full, because only inputs of blocks are offloaded",
        ),
        *(
            (
                ["--optimizer.in_backward", "true", *EARLY, *more],
                f"--optimizer.in_backward true: incompatible with {rule}",
            )
            for more, rule in NOT_IN_BACKWARD
        ),
        (
            ["--optimizer.in_backward", "true"],
            "--optimizer.in_backward true: incompatible with [training] max_norm, which needs all gradients at once; set it to none",
        ),
        (
            ["--optimizer.in_backward", "true", "--training.max_norm", "none"],
            "--optimizer.in_backward true: incompatible with [resilience] max_consecutive_skips > 1: a step cannot be skipped",
        ),
        (
            ["--optimizer.offload", "state", "--parallel.cpu_offload", "true"],
            "--optimizer.offload state: incompatible with [parallel] cpu_offload, which already keeps the optimizer state on the host",
        ),
        (
            ["--optimizer.offload", "state_and_gradients", "--training.reduce_every_microbatch", "true"],
            "--optimizer.offload state_and_gradients: incompatible with [training] reduce_every_microbatch: gradients "
            "must be complete when they are offloaded",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(words, line):
    with pytest.raises(ConfigError) as error:
        load_config(words)
    assert str(error.value) == line

"""Complete runs whose update runs in host memory, in backward, or in another precision."""

import pytest

from tests.training_runs import records, train
from trainer.tools.testing.ranks import RankError

IN_BACKWARD = ("--training.max_norm", "none", "--resilience.max_consecutive_skips", "1")
"""Settings that an update in backward requires."""


def argv(tiny, folder, name, *more, interval=2):
    schedule = ("--lr_schedule.warmup_steps", "2", "--checkpoint.interval_steps", str(interval))
    return [*tiny, "--run.output_folder", str(folder), "--run.name", name, *schedule, *more]


@pytest.mark.parametrize("layout", [[], ["--parallel.tp", "2", "--training.local_batch_size", "2"]])
def test_runs_with_offloaded_state_equal_one_without_after_resuming_on_other_ranks(ranks, tiny, tmp_path, layout):
    """Two steps on 2 ranks and two on 4, with clipped gradients. The learning rates are compared too."""
    results, learning_rates = {}, {}
    for offload in ("none", "state", "state_and_gradients"):
        args = argv(tiny, tmp_path, offload, *layout, "--optimizer.offload", offload, "--training.max_norm", "0.5")
        args += ["--metrics.interval_steps", "1"]
        ranks(2).run(train, [*args, "--training.steps", "2"])
        results[offload] = ranks(4).run(train, [*args, "--training.steps", "4"])[0].weights
        learning_rates[offload] = [record["learning_rate"] for record in records(tmp_path / offload)]
    assert results["none"] == results["state"] == results["state_and_gradients"]
    assert learning_rates["none"] == learning_rates["state"] == learning_rates["state_and_gradients"]
    assert len(learning_rates["none"]) == 4


@pytest.mark.parametrize(
    "layout", [["--parallel.tp", "2"], ["--parallel.pp", "2"], ["--checkpoint.async_mode", "thread"]]
)
def test_a_run_that_updates_in_backward_equals_one_that_updates_after_it(ranks, tiny, tmp_path, layout):
    """Two steps on 2 ranks and two on 4, with at least two microbatches, saved in the background."""
    results = []
    for name, more in (("plain", []), ("in_backward", ["--optimizer.in_backward", "true"])):
        args = argv(tiny, tmp_path, name, *layout, *more, *IN_BACKWARD, interval=1)
        ranks(2).run(train, [*args, "--training.steps", "2"])
        results.append(ranks(4).run(train, [*args, "--training.steps", "4"])[0].weights)
    assert results[0] == results[1]


def test_a_run_may_be_resumed_with_another_offload_setting(ranks, tiny, tmp_path):
    weights = []
    for name, offload in (("unchanged", "none"), ("changed", "state")):
        args = argv(tiny, tmp_path, name)
        ranks(1).run(train, [*args, "--training.steps", "2"])
        weights.append(ranks(1).run(train, [*args, "--training.steps", "4", "--optimizer.offload", offload])[0].weights)
    assert weights[0] == weights[1]


def test_fp32_master_weights_of_bf16_parameters_are_resumed(ranks, tiny, tmp_path):
    flags = ["--training.parameter_dtype", "bf16", "--optimizer.offload", "state"]
    complete = ranks(1).run(train, [*argv(tiny, tmp_path, "complete", *flags), "--training.steps", "4"])[0]
    ranks(1).run(train, [*argv(tiny, tmp_path, "resumed", *flags), "--training.steps", "2"])
    with pytest.raises(RankError, match=r"fp32 copy of the parameters \(\[optimizer\] offload\) was true, is false"):
        ranks(1).run(train, [*argv(tiny, tmp_path, "resumed", *flags[:2]), "--training.steps", "4"])
    resumed = ranks(1).run(train, [*argv(tiny, tmp_path, "resumed", *flags), "--training.steps", "4"])[0]
    assert resumed.weights == complete.weights

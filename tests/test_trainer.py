"""Whole runs: the same on any number of ranks, after any stop."""

import shutil

import pytest

from scripts.gloo_pool import RankError
from tests.runs import largest_deviation, leaves_of_step, records, train

TIED = ["--model.overrides.tied_embeddings", "true"]


def run(ranks, size, argv, folder, *more):
    return ranks(size).run(train, [*argv, "--run.output_folder", str(folder.parent), "--run.name", folder.name, *more])


def assert_same_run(one, other):
    """The same losses and gradient norms, but for rounding in fp32."""
    for key, limit in (("loss", 5e-6), ("grad_norm", 1e-4)):
        assert largest_deviation(records(one), records(other), key) < limit


@pytest.mark.parametrize("more", [[], TIED], ids=["untied", "tied"])
def test_losses_and_gradient_norms_do_not_depend_on_the_number_of_ranks(ranks, tiny, tmp_path, more):
    for size in (1, 2, 4):
        run(ranks, size, tiny, tmp_path / str(size), "--training.steps", "10", *more)
    for size in ("2", "4"):
        assert_same_run(tmp_path / "1", tmp_path / size)


def test_hybrid_sharding_gives_the_same_losses(ranks, tiny, tmp_path):
    run(ranks, 1, tiny, tmp_path / "one")
    run(ranks, 4, tiny, tmp_path / "hybrid", "--parallel.dp_replicate", "2")
    assert_same_run(tmp_path / "one", tmp_path / "hybrid")


def test_losses_do_not_depend_on_the_microbatches(ranks, tiny, tmp_path):
    run(ranks, 1, tiny, tmp_path / "eight")
    run(ranks, 1, tiny, tmp_path / "one", "--training.local_batch_size", "16")
    run(ranks, 2, tiny, tmp_path / "reduced", "--training.reduce_every_microbatch", "true")
    for other in ("one", "reduced"):
        assert_same_run(tmp_path / "eight", tmp_path / other)


def test_a_different_seed_gives_different_losses(ranks, tiny, tmp_path):
    run(ranks, 1, tiny, tmp_path / "a")
    run(ranks, 1, tiny, tmp_path / "b", "--run.seed", "1")
    assert largest_deviation(records(tmp_path / "a"), records(tmp_path / "b"), "loss") > 1e-4


@pytest.mark.parametrize("size", [1, 2])
def test_two_runs_are_bit_identical(ranks, tiny, tmp_path, size):
    first = run(ranks, size, tiny, tmp_path / "a")
    second = run(ranks, size, tiny, tmp_path / "b")
    assert first[0].weights == second[0].weights
    assert largest_deviation(records(tmp_path / "a"), records(tmp_path / "b"), "loss") == 0


def test_bf16_computes_in_bf16_on_one_rank_and_stays_near_fp32(ranks, tiny, tmp_path):
    run(ranks, 1, tiny, tmp_path / "fp32")
    run(ranks, 1, tiny, tmp_path / "bf16", "--training.compute_dtype", "bf16")
    run(ranks, 2, tiny, tmp_path / "bf16_2", "--training.compute_dtype", "bf16")
    assert 1e-6 < largest_deviation(records(tmp_path / "fp32"), records(tmp_path / "bf16"), "loss") < 1e-2
    assert largest_deviation(records(tmp_path / "bf16"), records(tmp_path / "bf16_2"), "loss") < 1e-2


def stop_after(folder, step):
    """What a run that was killed after this checkpoint leaves behind."""
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


def test_a_stopped_and_resumed_run_ends_bit_identical(ranks, tiny, tmp_path):
    more = ["--training.steps", "6", "--checkpoint.interval_steps", "3"]
    whole = run(ranks, 2, tiny, tmp_path / "run", *more)
    before = records(tmp_path / "run")
    stop_after(tmp_path / "run", 3)
    resumed = run(ranks, 2, tiny, tmp_path / "run", *more)
    assert [len(r.leaves) for r in resumed] == [3, 3]
    assert resumed[0].weights == whole[0].weights
    assert [r.random for r in resumed] == [r.random for r in whole]
    assert resumed[0].random != resumed[1].random
    assert [r["loss"] for r in records(tmp_path / "run")] == [r["loss"] for r in before]


@pytest.mark.parametrize("size", [1, 4])
def test_resume_on_another_world_size_sees_the_same_batches(ranks, tiny, tmp_path, size):
    more = ["--training.steps", "6", "--checkpoint.interval_steps", "3"]
    whole = run(ranks, 2, tiny, tmp_path / "run", *more)
    before = records(tmp_path / "run")
    stop_after(tmp_path / "run", 3)
    resumed = run(ranks, size, tiny, tmp_path / "run", *more)
    for step in range(3):
        assert leaves_of_step(resumed, step) == leaves_of_step(whole, 3 + step)
    assert largest_deviation(before, records(tmp_path / "run"), "loss") < 5e-6


def test_a_run_can_be_extended(ranks, tiny, tmp_path):
    more = ["--lr_schedule.name", "warmup_stable_decay", "--lr_schedule.decay_steps", "1"]
    run(ranks, 1, tiny, tmp_path / "run", "--training.steps", "3", *more)
    run(ranks, 1, tiny, tmp_path / "run", "--training.steps", "5", *more)
    assert [r["step"] for r in records(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_resuming_with_another_meaning_is_refused_with_every_difference(ranks, tiny, tmp_path):
    run(ranks, 1, tiny, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    with pytest.raises(RankError) as error:
        run(ranks, 1, tiny, tmp_path / "run", "--training.steps", "8", "--run.seed", "3", "--data.shuffle", "false")
    assert (
        f"cannot resume from {checkpoint}: data.shuffle was true, is false; run.seed was 0, is 3; "
        "another --run.name starts a new run" in str(error.value)
    )


def test_a_refused_resume_leaves_the_record_of_the_run_as_it_was(ranks, tiny, tmp_path):
    run(ranks, 1, tiny, tmp_path / "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    with pytest.raises(RankError, match="data was"):
        run(ranks, 1, tiny, tmp_path / "run", "--training.steps", "8", "--data.held_out_fraction", "0.3")
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()} == before


def test_evaluation_is_the_same_on_any_number_of_ranks_and_leaves_training_as_it_was(ranks, tiny, tmp_path):
    # 11 held-out samples do not come out even on four ranks with microbatches of two.
    more = ["--evaluation.interval_steps", "2", "--evaluation.max_samples", "11"]
    run(ranks, 1, tiny, tmp_path / "without")
    for size in (1, 4):
        run(ranks, size, tiny, tmp_path / str(size), *more)
    one, four = records(tmp_path / "1", "eval"), records(tmp_path / "4", "eval")
    assert [(r["step"], r["num_targets"]) for r in one] == [(2, 11 * 32), (4, 11 * 32)]
    assert [r["num_targets"] for r in four] == [11 * 32, 11 * 32]
    assert largest_deviation(one, four, "loss") < 5e-6
    assert largest_deviation(records(tmp_path / "without"), records(tmp_path / "1"), "loss") == 0


def test_the_first_recorded_rate_is_not_zero_and_the_last_is_the_lowest(ranks, tiny, tmp_path):
    run(ranks, 1, tiny, tmp_path / "run", "--optimizer.lr", "1e-3")
    rates = [r["learning_rate"] for r in records(tmp_path / "run")]
    assert rates == pytest.approx([5e-4, 1e-3, 5.5e-4, 1e-4])

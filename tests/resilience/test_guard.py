"""Skipped steps, rollbacks and stops."""

import json
from itertools import repeat
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.training_runs import (
    hash_of,
    microbatch_hashes,
    microbatches_of_step,
    recorded_batches,
    records,
    trainer_from,
)
from trainer.base.config import ResilienceConfig
from trainer.base.system.run_files import latest_per_step, step_of
from trainer.resilience.guard import (
    WINDOW,
    StabilityGuard,
    StepMonitor,
    StepOutcome,
    TrainingDiverged,
    should_roll_back,
)
from trainer.state import TrainState
from trainer.tools.testing.ranks import RankError

CPU = torch.device("cpu")


def outcomes_of(config, pairs):
    """Yield the outcome of each (loss, gradient norm)."""
    guard, monitor = StabilityGuard(config, CPU), StepMonitor(config, CPU)
    for step, (loss, norm) in enumerate(pairs, start=1):
        skipped, outcome = guard.decide(torch.tensor(loss), torch.tensor(norm), torch.tensor(0.0))
        read = monitor.observe(TrainState(step=step), outcome, now=False).outcome
        assert read.skipped == skipped.item()
        yield read


def test_non_finite_steps_are_skipped_and_counted():
    nan, inf = float("nan"), float("inf")
    pairs = [(1.0, 1.0), (nan, 1.0), (1.0, inf), (1.0, 1.0), (-inf, nan)]
    outcomes = list(outcomes_of(ResilienceConfig(), pairs))
    assert [v.skipped for v in outcomes] == [False, True, True, False, True]
    assert [(v.consecutive_skips, v.total_skips) for v in outcomes] == [(0, 0), (1, 1), (2, 2), (0, 2), (1, 3)]
    assert not any(v.spike for v in outcomes)


def test_spikes_match_a_reference_implementation():
    draw = np.random.default_rng(0)
    pairs = [(float(a), float(b)) for a, b in zip(draw.normal(3, 0.1, 400), draw.normal(1, 0.05, 400), strict=True)]
    for i in (10, 150, 151, 300):
        pairs[i] = (pairs[i][0], 1e4)
    pairs[200] = (9.0, 1.0)
    accepted, expected = [], []
    for pair in pairs:
        pair = np.float32(pair)
        recent = np.array(accepted[-WINDOW:])
        high = len(accepted) >= 32 and bool((pair > recent.mean(0) + 6 * recent.std(0)).any())
        expected.append(high)
        if not high:
            accepted.append(pair)
    outcomes = list(outcomes_of(ResilienceConfig(on_loss_spike="skip"), pairs))
    assert [v.spike for v in outcomes] == expected
    assert [i for i, v in enumerate(outcomes) if v.spike] == [150, 151, 200, 300]


def outcome(**fields):
    counts = {"step": 9, "cursor": 0, "consecutive_skips": 1, "total_skips": 1}
    return StepOutcome(**counts | {"stop": False, "loss": 2.0, "grad_norm": float("nan")} | fields)


def test_skips_and_spikes_stop_or_roll_back_as_configured():
    stop = ResilienceConfig(max_consecutive_skips=3)
    roll_back = ResilienceConfig(max_consecutive_skips=3, on_max_skips="rollback")
    assert not should_roll_back(stop, outcome(consecutive_skips=2), 0)
    message = "step 9: loss 2, gradient norm nan; 3 steps in a row were skipped: training stops"
    with pytest.raises(TrainingDiverged, match=message):
        should_roll_back(stop, outcome(consecutive_skips=3), 0)
    assert should_roll_back(roll_back, outcome(consecutive_skips=3), 2)
    with pytest.raises(
        TrainingDiverged, match="gradient norm nan; the maximum of 3 rollbacks is reached: training stops"
    ):
        should_roll_back(roll_back, outcome(consecutive_skips=3), 3)
    assert should_roll_back(ResilienceConfig(on_loss_spike="rollback"), outcome(grad_norm=1e4), 0)
    assert not should_roll_back(ResilienceConfig(on_loss_spike="skip"), outcome(grad_norm=1e4), 0)


def test_late_outcomes_are_read_one_step_late():
    monitor = StepMonitor(ResilienceConfig(), CPU)
    monitor.late = True
    outcome = StepOutcome.pack(*torch.zeros(5))
    observed = [monitor.observe(TrainState(step=step), outcome, now=step == 3).outcome for step in (1, 2, 3)]
    assert [latest and latest.step for latest in observed] == [None, 1, 3]


def skip(ranges, start, stop):
    state = TrainState(skipped_samples=ranges)
    state.skip(start, stop)
    return state.skipped_samples


def test_ranges_that_touch_are_merged():
    assert skip([], 3, 5) == [(3, 5)]
    assert skip([(3, 5), (9, 12)], 5, 7) == [(3, 7), (9, 12)]
    assert skip([(3, 5), (9, 12)], 4, 10) == [(3, 12)]
    assert skip([(3, 5)], 0, 1) == [(0, 1), (3, 5)]


# ------------------------------------------------------------ complete runs


def train(argv, faulty_steps=(), scale=float("nan"), skipped_steps=(), late=False):
    """Train to the end. faulty_steps: gradients are scaled on the last rank. skipped_steps: finite steps that are skipped.
    late: read outcomes one step late, as on a GPU."""
    trainer = trainer_from(argv)
    trainer.monitor.late |= late
    engine, state = trainer.engine, trainer.state
    clip, decide = engine.optimizer.clip, engine.guard.decide

    def faulty_clip(max_norm, vote):
        if state.step + 1 in faulty_steps and dist.get_rank() == dist.get_world_size() - 1 and not state.rollbacks:
            next(iter(engine.parameters.values())).grad.mul_(scale)
        return clip(max_norm, vote)

    def faulty_decide(loss, grad_norm, votes):
        skipped, outcome = decide(loss, grad_norm, votes)
        return skipped | (state.step + 1 in skipped_steps), outcome

    engine.optimizer.clip, engine.guard.decide = faulty_clip, faulty_decide
    with recorded_batches() as batches:
        trainer.train()
    tensors = {name: tensor for name, tensor in engine.tensors().items() if not name.startswith("stability/")}
    hashes = microbatch_hashes(batches, repeat(trainer.data.partition.num_microbatches(8)))
    return hash_of(tensors), hashes, state.skipped_samples


def run(ranks, size, tiny, folder, *flags, **faults):
    argv = [*tiny, "--run.output_folder", str(folder.parent), "--run.name", folder.name, *flags]
    return ranks(size).run(train, argv, *faults.values())


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_with_nan_on_one_rank_equals_a_skipped_update(ranks, tiny, tmp_path, size):
    flags = ["--training.steps", "5"]
    with_nan = run(ranks, size, tiny, tmp_path / "nan", *flags, faulty_steps=(3,))
    skipped = run(ranks, size, tiny, tmp_path / "skipped", *flags, faulty_steps=(), scale=1.0, skipped_steps=(3,))
    assert with_nan[0][0] == skipped[0][0]
    assert [r["grad_norm"] is None for r in records(tmp_path / "nan")] == [False, False, True, False, False]
    assert records(tmp_path / "nan")[-1]["skipped_steps"] == 1


def test_a_checkpoint_due_at_a_non_finite_step_is_saved_at_the_next_finite_one(ranks, tiny, tmp_path):
    run(
        ranks, 1, tiny, tmp_path / "run", "--training.steps", "6", "--checkpoint.interval_steps", "3", faulty_steps=(3,)
    )
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000006"]


ROLLBACK = ["--training.steps", "6", "--resilience.max_consecutive_skips", "2", "--resilience.on_max_skips", "rollback"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_rollback_skips_the_samples_of_the_failed_steps(ranks, tiny, tmp_path, size):
    results = run(
        ranks, size, tiny, tmp_path / "run", *ROLLBACK, "--checkpoint.interval_steps", "2", faulty_steps=(4, 5)
    )
    plain = run(ranks, size, tiny, tmp_path / "plain", "--training.steps", "8")

    def steps(results_of_ranks, indices):
        results = [SimpleNamespace(microbatches=microbatches) for _, microbatches, _ in results_of_ranks]
        return [microbatches_of_step(results, i) for i in indices]

    # Steps 1 to 5 run, and 4 and 5 fail. The run rolls back to step 2 and continues with the samples of steps 3, 6, 7, 8.
    assert steps(results, range(9)) == steps(plain, [0, 1, 2, 3, 4, 2, 5, 6, 7])
    assert results[0][2] == [(24, 40)]
    # scripts/inspect_samples.py computes the samples of each step from these values.
    consumed = [(r["step"], r["first_step"], r["cursor"], r["skipped_samples"]) for r in records(tmp_path / "run")]
    before, after = [(n, n, 8 * n, []) for n in (1, 2)], [(n, n, 8 * n, [[24, 40]]) for n in (3, 4, 5, 6)]
    assert consumed == before + after
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000006" / "train_state.json").read_text())
    assert (state["skipped_samples"], state["cursor"]) == ([[24, 40]], 48)


def test_a_rollback_skips_the_samples_of_failed_steps_of_different_batch_sizes(ranks, tiny, tmp_path):
    flags = [*ROLLBACK, "--checkpoint.interval_steps", "2", "--training.batch_schedule.4", "16"]
    ((*_, skipped),) = run(ranks, 1, tiny, tmp_path / "run", *flags, faulty_steps=(4, 5))
    assert skipped == [(24, 48)]  # 8 samples of step 4, and 16 of step 5
    assert [r["cursor"] for r in records(tmp_path / "run")] == [8, 16, 24, 32, 48, 64]


def test_the_run_fails_if_the_last_two_steps_are_non_finite_but_not_for_one(ranks, tiny, tmp_path):
    keep = ["--checkpoint.interval_steps", "1", "--checkpoint.keep", "1"]
    run(ranks, 1, tiny, tmp_path / "one", "--training.steps", "4", *keep, faulty_steps=(4,))
    steps = [step_of(path) for path in latest_per_step(tmp_path / "one" / "checkpoints")]
    assert steps == [4, 3]  # the older one is kept: it may be the better one
    with pytest.raises(RankError, match=r"step 4: .* training stops, and this state is not saved"):
        run(ranks, 1, tiny, tmp_path / "two", "--training.steps", "4", faulty_steps=(3, 4))


def test_a_failed_step_read_one_step_late_is_rolled_back_too(ranks, tiny, tmp_path):
    """Outcomes are read two at a time, as on a GPU, and the first of them counts."""
    flags = [*ROLLBACK, "--checkpoint.interval_steps", "3", "--metrics.interval_steps", "3"]
    faults = {"faulty_steps": (4, 5), "scale": float("nan"), "skipped_steps": (), "late": True}
    results = run(ranks, 1, tiny, tmp_path / "run", *flags, **faults)
    assert len(results[0][1]) == 6 + 3 and results[0][2] == [(24, 40)]


def test_a_policy_switched_on_later_uses_the_earlier_history(ranks, tiny, tmp_path):
    flags = ["--checkpoint.interval_steps", "40", "--metrics.interval_steps", "100"]
    flags += ["--training.local_batch_size", "8", "--training.steps"]
    run(ranks, 1, tiny, tmp_path / "run", *flags, "40")
    run(ranks, 1, tiny, tmp_path / "run", *flags, "45", "--resilience.on_loss_spike", "skip")
    assert records(tmp_path / "run")[-1]["skipped_steps"] == 0


def test_a_run_without_a_checkpoint_to_roll_back_to_stops(ranks, tiny, tmp_path):
    with pytest.raises(RankError, match="no checkpoint to roll back to"):
        run(ranks, 1, tiny, tmp_path / "run", *ROLLBACK, faulty_steps=(1, 2))


def test_a_spike_is_skipped_or_rolled_back(ranks, tiny, tmp_path):
    flags = ["--training.steps", "40", "--checkpoint.interval_steps", "10", "--metrics.interval_steps", "100"]
    flags += ["--training.local_batch_size", "4"]
    skipped = run(
        ranks, 2, tiny, tmp_path / "s", *flags, "--resilience.on_loss_spike", "skip", faulty_steps=(38,), scale=1e4
    )
    assert len(skipped[0][1]) == 40 and records(tmp_path / "s")[-1]["skipped_steps"] == 1
    back = run(
        ranks, 2, tiny, tmp_path / "b", *flags, "--resilience.on_loss_spike", "rollback", faulty_steps=(38,), scale=1e4
    )
    assert len(back[0][1]) == 48 and back[0][2] == [(37 * 8, 38 * 8)]

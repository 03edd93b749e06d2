"""Updates that are left out, and what follows."""

import json
import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.training_runs import hash_of, leaves_of_step, microbatch_hashes, recorded_batches, records, trainer_from
from trainer.checkpoint import commit
from trainer.checkpoint.commit import SaveFailed, latest_per_step, step_of
from trainer.config import ResilienceConfig
from trainer.resilience import guard
from trainer.resilience.guard import (
    WINDOW,
    OutcomeReader,
    StabilityGuard,
    StepOutcome,
    TrainingDiverged,
    should_roll_back,
)
from trainer.resilience.stop_signals import StopRequest
from trainer.resilience.watchdog import Watchdog, parse_collectives
from trainer.state import TrainState
from trainer.system import logging
from trainer.testing.ranks import RankError

CPU = torch.device("cpu")


def judged(config, pairs):
    """Whether each (loss, norm) is left out, by the guard."""
    guard, outcomes = StabilityGuard(config, CPU), OutcomeReader(late=False)
    for step, (loss, norm) in enumerate(pairs, start=1):
        skipped, outcome = guard.decide(torch.tensor(loss), torch.tensor(norm), torch.tensor(0.0))
        outcomes.put(step, 0, outcome)
        (read,) = outcomes.read(now=False)
        assert read.skipped == skipped.item()
        yield read


def test_what_is_no_number_is_left_out_and_counted():
    nan, inf = float("nan"), float("inf")
    pairs = [(1.0, 1.0), (nan, 1.0), (1.0, inf), (1.0, 1.0), (-inf, nan)]
    outcomes = list(judged(ResilienceConfig(), pairs))
    assert [v.skipped for v in outcomes] == [False, True, True, False, True]
    assert [(v.consecutive_skips, v.total) for v in outcomes] == [(0, 0), (1, 1), (2, 2), (0, 2), (1, 3)]
    assert not any(v.spike for v in outcomes)


def test_spikes_are_those_of_the_definition():
    draw = np.random.default_rng(0)
    pairs = [(float(a), float(b)) for a, b in zip(draw.normal(3, 0.1, 400), draw.normal(1, 0.05, 400), strict=True)]
    for place in (10, 150, 151, 300):
        pairs[place] = (pairs[place][0], 1e4)
    pairs[200] = (9.0, 1.0)
    accepted, expected = [], []
    for pair in pairs:
        pair = np.float32(pair)
        recent = np.array(accepted[-WINDOW:])
        high = len(accepted) >= 32 and bool((pair > recent.mean(0) + 6 * recent.std(0)).any())
        expected.append(high)
        if not high:
            accepted.append(pair)
    outcomes = list(judged(ResilienceConfig(on_loss_spike="skip"), pairs))
    assert [v.spike for v in outcomes] == expected
    assert [n for n, v in enumerate(outcomes) if v.spike] == [150, 151, 200, 300]


def outcome(**given):
    usual = {
        "step": 9,
        "cursor": 0,
        "stop": False,
        "skipped": True,
        "spiked": False,
        "consecutive_skips": 1,
        "total": 1,
    }
    return StepOutcome(**usual | {"loss": 2.0, "grad_norm": float("nan")} | given)


def test_what_follows_is_as_set():
    stop, back = (
        ResilienceConfig(max_consecutive_skips=3),
        ResilienceConfig(max_consecutive_skips=3, on_max_skips="rollback"),
    )
    assert not should_roll_back(stop, outcome(consecutive_skips=2), 0)
    with pytest.raises(
        TrainingDiverged, match="step 9: loss 2, gradient norm nan; 3 updates in a row were left out: stopped"
    ):
        should_roll_back(stop, outcome(consecutive_skips=3), 0)
    assert should_roll_back(back, outcome(consecutive_skips=3), 2)
    with pytest.raises(TrainingDiverged, match="again, after 3 rollbacks: stopped"):
        should_roll_back(back, outcome(consecutive_skips=3), 3)
    assert should_roll_back(ResilienceConfig(on_loss_spike="rollback"), outcome(spike=True), 0)
    assert not should_roll_back(ResilienceConfig(on_loss_spike="skip"), outcome(spike=True), 0)


def test_a_late_reader_reads_all_but_the_last_step():
    outcomes = OutcomeReader(late=True)
    for step in (1, 2, 3):
        outcomes.put(step, 0, torch.zeros(7, dtype=torch.float64))
    assert [v.step for v in outcomes.read(now=False)] == [1, 2]
    assert [v.step for v in outcomes.read(now=True)] == [3]


def skip(ranges, start, stop):
    state = TrainState(skipped_samples=ranges)
    state.skip(start, stop)
    return state.skipped_samples


def test_ranges_that_touch_become_one():
    assert skip([], 3, 5) == [(3, 5)]
    assert skip([(3, 5), (9, 12)], 5, 7) == [(3, 7), (9, 12)]
    assert skip([(3, 5), (9, 12)], 4, 10) == [(3, 12)]
    assert skip([(3, 5)], 0, 1) == [(0, 1), (3, 5)]


def watched():
    """A watchdog without its thread, and how overdue it finds the run at some moments."""
    clock = [100.0]
    guard.time = SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)
    try:
        dog = Watchdog(0.0)
        dog.timeout_s = 30.0
        told = []

        def later(seconds):
            clock[0] += seconds
            told.append(dog.overdue_s())

        later(1000)  # the first step
        dog.after_step(1)
        later(10)
        dog.after_step(2)
        later(49)
        later(2)
        with dog.paused():
            later(1000)
        later(29)
        dog.after_step(3)
        later(146)
        return told
    finally:
        guard.time = time


def test_only_steps_are_timed_and_none_by_less_than_five_of_the_longest(ranks):
    # The longest step before the pause takes 10 s; 29 s of the next one come after it.
    assert ranks(1).run(watched) == [[0.0, 0.0, 0.0, 51.0, 0.0, 0.0, 146.0]]


def test_a_collective_that_has_not_ended_is_named():
    trace = {
        "pg_status": {
            "0": {"last_enqueued_collective": "7", "last_completed_collective": "6"},
            "1": {"last_enqueued_collective": "3", "last_completed_collective": "3"},
        },
        "entries": [{"pg_id": 0, "collective_seq_id": 7, "profiling_name": "gloo:all_reduce"}],
    }
    assert parse_collectives(json.dumps(trace)) == ["waiting in gloo:all_reduce, number 7 of process group 0"]
    assert parse_collectives("") == []


# ------------------------------------------------------------ whole runs


def train(argv, injured=(), scale=float("nan"), removed=(), late=False):
    """Train to the end. injured: steps whose gradients are scaled on the last rank. removed: steps that are skipped although they
    are good. late: read outcomes one step late, as on a GPU."""
    trainer = trainer_from(argv)
    trainer.monitor.reader.late |= late
    engine, state = trainer.engine, trainer.state
    clip, decide = engine.optimizer.clip, engine.guard.decide

    def clip_injured(max_norm, vote):
        if state.step + 1 in injured and dist.get_rank() == dist.get_world_size() - 1 and not state.rollbacks:
            next(iter(engine.parameters.values())).grad.mul_(scale)
        return clip(max_norm, vote)

    def decide_removed(loss, grad_norm, votes):
        skipped, outcome = decide(loss, grad_norm, votes)
        return skipped | (state.step + 1 in removed), outcome

    engine.optimizer.clip, engine.guard.decide = clip_injured, decide_removed
    with recorded_batches() as batches:
        trainer.train()
    tensors = {name: tensor for name, tensor in engine.tensors().items() if not name.startswith("stability/")}
    hashes = microbatch_hashes(batches, trainer.data.partition.grad_accum)
    return hash_of(tensors), hashes, state.skipped_samples


def run(ranks, size, tiny, folder, *more, **injury):
    argv = [*tiny, "--run.output_folder", str(folder.parent), "--run.name", folder.name, *more]
    return ranks(size).run(train, argv, *injury.values())


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_with_nan_on_one_rank_is_as_if_its_update_were_removed(ranks, tiny, tmp_path, size):
    more = ["--training.steps", "5"]
    one = run(ranks, size, tiny, tmp_path / "nan", *more, injured=(3,))
    other = run(ranks, size, tiny, tmp_path / "removed", *more, injured=(), scale=1.0, removed=(3,))
    assert one[0][0] == other[0][0]
    assert [r["grad_norm"] is None for r in records(tmp_path / "nan")] == [False, False, True, False, False]
    assert records(tmp_path / "nan")[-1]["skipped_steps"] == 1


def test_a_checkpoint_that_is_due_at_a_bad_step_is_written_at_the_next_good_one(ranks, tiny, tmp_path):
    run(ranks, 1, tiny, tmp_path / "run", "--training.steps", "6", "--checkpoint.interval_steps", "3", injured=(3,))
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000006"]


ROLLBACK = ["--training.steps", "6", "--resilience.max_consecutive_skips", "2", "--resilience.on_max_skips", "rollback"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_rollback_passes_over_the_samples_of_the_bad_steps(ranks, tiny, tmp_path, size):
    results = run(ranks, size, tiny, tmp_path / "run", *ROLLBACK, "--checkpoint.interval_steps", "2", injured=(4, 5))
    plain = run(ranks, size, tiny, tmp_path / "plain", "--training.steps", "8")

    class Seen:
        def __init__(self, leaves):
            self.leaves = leaves

    def steps(of_ranks, numbers):
        seen = [Seen(leaves) for _, leaves, _ in of_ranks]
        return [leaves_of_step(seen, number) for number in numbers]

    # Steps 1 to 5 are made, 4 and 5 are bad; back to step 2; what follows has the samples of steps 3, 6, 7, 8.
    assert steps(results, range(9)) == steps(plain, [0, 1, 2, 3, 4, 2, 5, 6, 7])
    assert results[0][2] == [(48, 80)]
    assert [r["step"] for r in records(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000006" / "train_state.json").read_text())
    assert (state["skipped_samples"], state["cursor"]) == ([[48, 80]], 96)


def failing_saves(argv, failing):
    """How a run ends whose saves of some steps find no space, what it has saved and of what it warned."""
    write, told, warning = commit.save, [], logging.warning

    def full(request, *given):
        if request.step in failing:
            raise SaveFailed(f"step {request.step} could not be saved: no space")
        write(request, *given)

    commit.save, logging.warning = full, told.append
    try:
        train(argv)
        end = ""
    except SaveFailed as failure:
        end = str(failure)
    finally:
        commit.save, logging.warning = write, warning
    return end, told


@pytest.mark.parametrize("mode", ["off", "thread"])
@pytest.mark.parametrize(
    ("failing", "policy", "end", "saved"),
    [
        ((2,), "continue", "", [4, 6]),
        ((4,), "continue", "", [2, 6]),
        ((2,), "stop", "step 2 could not be saved: no space", []),
        ((6,), "continue", "step 6 could not be saved: no space", [2, 4]),
    ],
)
def test_a_failed_save_is_told_and_ends_the_run_as_set_or_at_its_end(
    ranks, tiny, tmp_path, mode, failing, policy, end, saved
):
    argv = [*tiny, "--run.output_folder", str(tmp_path), "--run.name", "run", "--training.steps", "6"]
    argv += ["--checkpoint.interval_steps", "2", "--checkpoint.on_failure", policy, "--checkpoint.async_mode", mode]
    for ended, told in ranks(2).run(failing_saves, argv, failing):
        assert ended == end
        warned = (
            [f"step {failing[0]} could not be saved: no space; the checkpoints before are whole"] if not end else []
        )
        assert [line.partition(", and the next")[0] for line in told] == warned
    steps = [step_of(path) for path in latest_per_step(tmp_path / "run" / "checkpoints")]
    assert sorted(steps) == saved


def test_one_bad_step_at_the_end_does_not_fail_the_run_and_two_do(ranks, tiny, tmp_path):
    keep = ["--checkpoint.interval_steps", "1", "--checkpoint.keep", "1"]
    run(ranks, 1, tiny, tmp_path / "one", "--training.steps", "4", *keep, injured=(4,))
    steps = [step_of(path) for path in latest_per_step(tmp_path / "one" / "checkpoints")]
    assert steps == [4, 3]  # for the older may be the better one
    with pytest.raises(RankError, match=r"step 4: .* stopped, and this state is not saved"):
        run(ranks, 1, tiny, tmp_path / "two", "--training.steps", "4", injured=(3, 4))


def test_what_was_bad_a_step_ago_is_gone_back_behind_too(ranks, tiny, tmp_path):
    """OutcomeReader that are read two at a time, as on a GPU: the first of them counts too."""
    more = [*ROLLBACK, "--checkpoint.interval_steps", "3", "--metrics.interval_steps", "3"]
    results = run(ranks, 1, tiny, tmp_path / "run", *more, injured=(4, 5), scale=float("nan"), removed=(), late=True)
    assert len(results[0][1]) == 6 + 3 and results[0][2] == [(48, 80)]


def test_a_policy_that_is_switched_on_later_knows_what_was_before(ranks, tiny, tmp_path):
    more = ["--checkpoint.interval_steps", "40", "--metrics.interval_steps", "100", "--training.steps"]
    run(ranks, 1, tiny, tmp_path / "run", *more, "40")
    run(ranks, 1, tiny, tmp_path / "run", *more, "45", "--resilience.on_loss_spike", "skip")
    assert records(tmp_path / "run")[-1]["skipped_steps"] == 0


def test_only_orders_to_stop_stop(tmp_path):
    """Other signals arrive at the same place: of a child that ended, where its end is handled."""

    def asked(*numbers):
        request = StopRequest.__new__(StopRequest)
        request.requested = False
        read, write = os.pipe()
        os.write(write, bytes(numbers))
        os.close(write)
        with pytest.raises(ValueError, match="unpack"):  # the end of the pipe
            request._read(read)
        return request.requested

    assert not asked(signal.SIGCHLD, signal.SIGCHLD)
    assert asked(signal.SIGCHLD, signal.SIGTERM)


def test_a_run_without_a_checkpoint_to_go_back_to_stops(ranks, tiny, tmp_path):
    with pytest.raises(RankError, match="there is no checkpoint to go back to"):
        run(ranks, 1, tiny, tmp_path / "run", *ROLLBACK, injured=(1, 2))


def test_a_spike_is_left_out_or_rolled_back(ranks, tiny, tmp_path):
    more = ["--training.steps", "40", "--checkpoint.interval_steps", "10", "--metrics.interval_steps", "100"]
    skipped = run(ranks, 2, tiny, tmp_path / "s", *more, "--resilience.on_loss_spike", "skip", injured=(38,), scale=1e4)
    assert len(skipped[0][1]) == 40 and records(tmp_path / "s")[-1]["skipped_steps"] == 1
    back = run(
        ranks, 2, tiny, tmp_path / "b", *more, "--resilience.on_loss_spike", "rollback", injured=(38,), scale=1e4
    )
    assert len(back[0][1]) == 48 and back[0][2] == [(37 * 16, 38 * 16)]

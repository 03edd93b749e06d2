"""Detection of hangs."""

import sys
import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch.distributed as dist
from torch.distributed.pipelining.schedules import _wait_batch_p2p

from trainer.resilience import watchdog
from trainer.resilience.watchdog import Watchdog, waits_for_stage


@contextmanager
def simulated_clock():
    """Context manager that replaces the watchdog's clock. It yields a watchdog without its thread, with a timeout of 30 s, and a
    function that advances the clock and returns overdue_s."""
    clock = [100.0]
    dog = Watchdog(0.0)
    dog.clock = SimpleNamespace(now=lambda: clock[0])
    dog.timeout_s = 30.0

    def overdue_after(seconds):
        clock[0] += seconds
        return dog.overdue_s()

    yield dog, overdue_after


def overdue_times():
    """Return overdue_s at several moments of a run."""
    overdue = []
    with simulated_clock() as (dog, overdue_after):

        def advance(seconds):
            overdue.append(overdue_after(seconds))

        advance(10_000)  # training has not started
        with dog.loading(never):
            advance(29)
        advance(3500)  # the first step
        dog.after_step(1)
        advance(10)
        dog.after_step(2)
        advance(49)
        advance(2)
        with dog.paused():
            advance(1000)
        advance(29)
        dog.after_step(3)
        advance(146)
        return overdue


def never():
    return False


def test_a_hang_exceeds_five_times_the_longest_step_that_did_not_compile(ranks):
    # The longest step before the pause takes 10 s. Of the next step, 29 s are after the pause.
    assert ranks(1).run(overdue_times) == [[0.0, 0.0, 0.0, 0.0, 0.0, 51.0, 0.0, 0.0, 146.0]]


def overdue_before_the_second_step():
    """Return overdue_s of a first step that waits for data, of one that does not end, and of an evaluation after it."""
    with simulated_clock() as (dog, overdue_after):
        with dog.loading(never):
            loading = overdue_after(31)
        first = overdue_after(3599), overdue_after(2)
        dog.timeout_s = 600.0
        longer = overdue_after(3599), overdue_after(1)
        dog.timeout_s = 30.0
        dog.after_step(1)
        with dog.loading(never):
            second = overdue_after(31)
        dog.after_step(2)
        with dog.evaluating() as after_batch:
            evaluation = [overdue_after(3599)]
            after_batch()
            evaluation += [overdue_after(3599), overdue_after(2)]
        return loading, first, longer, second, evaluation, overdue_after(155), overdue_after(1)


def test_the_first_step_and_evaluations_may_compile_but_not_while_they_wait_for_data(ranks):
    results = (31.0, (0.0, 3601.0), (0.0, 7201.0), 31.0, [0.0, 0.0, 3601.0], 0.0, 156.0)
    assert ranks(1).run(overdue_before_the_second_step) == [results]


def test_a_rank_that_waits_for_data_ends_after_a_stop_request(monkeypatch, capfd):
    ended = threading.Event()

    def end(code):
        ended.set()
        threading.Event().wait()  # the watchdog's thread does not continue

    monkeypatch.setattr(watchdog.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(watchdog.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(watchdog, "_STOP_S", 0.1)
    monkeypatch.setattr(watchdog.os, "_exit", end)
    dog = Watchdog(0.4)
    dog.start()
    dog.timeout_s = 60.0
    with dog.loading(lambda: True):
        assert ended.wait(60)
    advice = "the run ends without saving; rerun the same command to resume from the latest checkpoint, if any"
    assert capfd.readouterr().err == f"[rank 3] no training data for step 1 within 0 s of the stop request: {advice}\n"


def stalled_ranks():
    """Return what rank 0 reports while rank 1 waits for data."""
    dog, lines = Watchdog(0.4), []
    dog.start()
    dog.timeout_s = 60.0
    with dog.loading(never) if dist.get_rank() else nullcontext():
        while dist.get_rank() == 0 and not lines:  # until the next heartbeat of rank 1
            lines = dog._stalled_ranks()
        dist.barrier()
    return lines


def test_the_report_of_a_rank_names_the_ranks_that_wait_for_data(ranks):
    assert ranks(2).run(stalled_ranks) == [["rank 1 waits for training data"], []]


def test_a_rank_ends_although_the_store_does_not_answer(monkeypatch, capfd):
    exits = []
    monkeypatch.setattr(watchdog.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(watchdog.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(watchdog, "_STORE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(watchdog.os, "_exit", exits.append)
    dog = Watchdog(0.0)
    answer = threading.Event()
    monkeypatch.setattr(dog, "_stalled_ranks", answer.wait)
    dog._end(41.2)
    answer.set()
    lines = capfd.readouterr().err.splitlines()
    assert exits == [1] and lines[0] == "[rank 3] no step has completed for 41 s, since step 0"
    assert lines[-1] == "the node of rank 0 does not answer; the state of other ranks is unknown"


def test_a_rank_that_waits_for_another_stage_is_recognized():
    assert waits_for_stage(SimpleNamespace(f_code=_wait_batch_p2p.__code__))
    assert not waits_for_stage(sys._getframe()) and not waits_for_stage(None)

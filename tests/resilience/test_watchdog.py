"""Detection of hangs."""

import re
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import torch.distributed as dist
from torch.distributed.pipelining.schedules import _wait_batch_p2p

from trainer.base.system.signals import StopRequest
from trainer.resilience import watchdog
from trainer.resilience.watchdog import Watchdog, waits_for_stage


@contextmanager
def simulated_clock():
    """Context manager that replaces the watchdog's clock. It yields a watchdog that is not started, with a timeout of 30 s, and a
    function that advances the clock and returns overdue_s."""
    clock = [100.0]
    dog = Watchdog(30.0, StopRequest(print))
    dog.clock = SimpleNamespace(now=lambda: clock[0])

    def overdue_after(seconds):
        clock[0] += seconds
        return dog.overdue_s()

    yield dog, overdue_after


def test_time_in_which_the_process_was_suspended_is_no_time_of_a_step(monkeypatch):
    """Of the hour between two readings, twice the watchdog's interval counts, which is 10 s."""
    moments = iter([0.0, 5.0, 3605.0, 3610.0, 3615.0, 3620.0, 3630.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(moments))
    dog = Watchdog(30.0, StopRequest(print))
    dog.after_step(1)
    assert [dog.overdue_s() for _ in range(5)] == [0.0, 0.0, 0.0, 0.0, 35.0]


def wait_for_data(dog, wait):
    """Return the result of `wait`, which is called while the watchdog's process waits for a microbatch."""
    with dog.loading():
        return wait()


def overdue_times():
    """Return overdue_s at several moments of a run."""
    overdue = []
    with simulated_clock() as (dog, overdue_after):

        def advance(seconds):
            overdue.append(overdue_after(seconds))

        advance(10_000)  # training has not started
        wait_for_data(dog, lambda: advance(29))
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


def test_a_hang_exceeds_five_times_the_longest_step_that_did_not_compile(ranks):
    # The longest step before the pause takes 10 s. Of the next step, 29 s are after the pause.
    assert ranks(1).run(overdue_times) == [[0.0, 0.0, 0.0, 0.0, 0.0, 51.0, 0.0, 0.0, 146.0]]


def overdue_of_a_larger_batch():
    with simulated_clock() as (dog, overdue_after):
        wait_for_data(dog, lambda: overdue_after(1))
        dog.after_step(1)
        overdue_after(10)
        dog.after_step(2, growth=8.0)
        first = overdue_after(399), overdue_after(2)
        dog.after_step(3, growth=0.5)
        return first, overdue_after(2000)


def test_the_limit_grows_with_the_batch(ranks):
    """The longest steps take 10 s, then 401 s, whose batch is 8 times larger."""
    assert ranks(1).run(overdue_of_a_larger_batch) == [((0.0, 401.0), 0.0)]


def overdue_before_the_second_step():
    """Return overdue_s of a first step that waits for data, of one that does not end, and of an evaluation after it."""
    with simulated_clock() as (dog, overdue_after):
        loading = wait_for_data(dog, lambda: overdue_after(31))
        first = overdue_after(3599), overdue_after(2)
        dog.timeout_s = 600.0
        longer = overdue_after(3599), overdue_after(1)
        dog.timeout_s = 30.0
        dog.after_step(1)
        second = wait_for_data(dog, lambda: overdue_after(31))
        dog.after_step(2)
        with dog.evaluating():
            evaluation = [wait_for_data(dog, lambda: overdue_after(155)), overdue_after(3599)]
            evaluation += [wait_for_data(dog, lambda: overdue_after(156)), overdue_after(3599), overdue_after(2)]
        third = overdue_after(155), overdue_after(1)
        dog.timeout_s = 0.0
        return loading, first, longer, second, evaluation, third, overdue_after(10**9)


def test_the_first_step_and_evaluations_may_compile_but_not_while_they_wait_for_data(ranks):
    evaluation = [0.0, 0.0, 156.0, 0.0, 3601.0]
    results = (31.0, (0.0, 3601.0), (0.0, 7201.0), 31.0, evaluation, (0.0, 156.0), 0.0)
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
    monkeypatch.setattr(watchdog, "_BEAT_S", 0.1)
    stop = StopRequest(print)
    dog = Watchdog(0.0, stop)
    dog.start()
    stop.requested = True
    wait_for_data(dog, lambda: ended.wait(60))
    assert ended.is_set()
    advice = "the run ends without saving; rerun the same command to resume from the latest checkpoint, if any"
    assert re.fullmatch(
        rf"\[rank 3\] no data have arrived for \d s since the stop request, at step 0: {advice}\n",
        capfd.readouterr().err,
    )


def late_data():
    """Return the readings of late_data_s in several waits. The request arrives during the second one."""
    with simulated_clock() as (dog, overdue_after):

        def readings(*seconds):
            late = []
            for passed_s in seconds:
                overdue_after(passed_s)
                late.append(dog.late_data_s())
            return late

        def be_asked():
            late = readings(1)
            dog.stop.requested = True
            return late + readings(2, 1)

        waits = [wait_for_data(dog, lambda: readings(1, 2)), wait_for_data(dog, be_asked)]
        waits += [wait_for_data(dog, lambda: readings(0, 6)) for _ in range(5)]  # a long step
        waits += [readings(1000), wait_for_data(dog, lambda: readings(0, 30, 1))]
        return waits


def test_a_stop_request_limits_the_wait_for_a_microbatch_not_the_step(ranks):
    """The longest wait was 6 s, so the limit is 30 s."""
    waits = [[0.0, 0.0], [0.0, 0.0, 0.0], *5 * [[0.0, 0.0]], [0.0], [0.0, 0.0, 31.0]]
    assert ranks(1).run(late_data) == [waits]


def stalled_ranks():
    """Return what rank 0 reports while rank 1 waits for data."""
    dog, lines = Watchdog(60.0, StopRequest(print)), []
    dog.beat_s = 0.1
    dog.start()

    def ask():
        while dist.get_rank() == 0 and not lines:  # until the next heartbeat of rank 1
            lines.extend(dog._stalled_ranks())
        dist.barrier()

    wait_for_data(dog, ask) if dist.get_rank() else ask()
    return lines


def test_the_report_of_a_rank_names_the_ranks_that_wait_for_data(ranks):
    assert ranks(2).run(stalled_ranks) == [["rank 1 waits for training data"], []]


def test_a_rank_ends_although_the_store_does_not_answer(monkeypatch, capfd):
    exits = []
    monkeypatch.setattr(watchdog.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(watchdog.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(watchdog, "_STORE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(watchdog.os, "_exit", exits.append)
    dog = Watchdog(0.0, StopRequest(print))
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

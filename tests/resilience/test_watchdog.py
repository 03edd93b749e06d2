"""Detection of hangs."""

import json
import sys
import threading
import time
from types import SimpleNamespace

from torch.distributed.pipelining.schedules import _wait_batch_p2p

from trainer.resilience import watchdog
from trainer.resilience.watchdog import Watchdog, parse_collectives, waits_for_stage


def overdue_times():
    """Return overdue_s at several moments of a run, from a watchdog without its thread and with a simulated clock."""
    clock = [100.0]
    watchdog.time = SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)
    try:
        dog = Watchdog(0.0)
        dog.timeout_s = 30.0
        overdue = []

        def advance(seconds):
            clock[0] += seconds
            overdue.append(dog.overdue_s())

        advance(1000)  # the first step
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
    finally:
        watchdog.time = time


def test_only_steps_are_timed_and_a_hang_exceeds_five_times_the_longest_step(ranks):
    # The longest step before the pause takes 10 s. Of the next step, 29 s are after the pause.
    assert ranks(1).run(overdue_times) == [[0.0, 0.0, 0.0, 51.0, 0.0, 0.0, 146.0]]


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


def test_a_collective_that_has_not_completed_is_reported():
    trace = {
        "pg_status": {
            "0": {"last_enqueued_collective": "7", "last_completed_collective": "6"},
            "1": {"last_enqueued_collective": "3", "last_completed_collective": "3"},
        },
        "entries": [{"pg_id": 0, "collective_seq_id": 7, "profiling_name": "gloo:all_reduce"}],
    }
    assert parse_collectives(json.dumps(trace)) == ["waiting in gloo:all_reduce, collective 7 of process group 0"]
    assert parse_collectives("") == []

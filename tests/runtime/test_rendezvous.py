"""Waiting for the other nodes or ranks of a run, with a simulated clock and real sockets and stores."""

import re
import socket
import threading
import time

import pytest
import torch.distributed as dist

from trainer.runtime.rendezvous import LOOPBACK, connect, host_on_loopback, wait_for_all


@pytest.fixture
def time_passes(monkeypatch):
    """time_passes({n: function}): from now on sleeping only advances the clock, and the n-th sleep calls this function, which
    returns the seconds that it takes in addition. Other threads of this process keep the real clock."""
    seconds, events, count = 100.0, {}, 0
    test, real_sleep, real_monotonic = threading.get_ident(), time.sleep, time.monotonic

    def sleep(duration):
        nonlocal seconds, count
        if threading.get_ident() != test:
            return real_sleep(duration)
        count += 1
        seconds += duration + events.get(count, lambda: 0)()

    monkeypatch.setattr(time, "monotonic", lambda: seconds if threading.get_ident() == test else real_monotonic())
    monkeypatch.setattr(time, "sleep", sleep)
    return events.update


def suspend(then=lambda: None):
    """Return an event: an hour in which the process does not run, and what others do as soon as it runs again."""

    def event():
        then()
        return 3600

    return event


@pytest.fixture
def port():
    with socket.create_server((LOOPBACK, 0)) as listener:
        return listener.getsockname()[1]


def test_a_launcher_that_was_suspended_still_waits_for_the_first_node(time_passes, port):
    started = []
    time_passes({3: suspend(), 9: lambda: started.append(host_on_loopback(port)) or 0})
    connect(LOOPBACK, port, "the first node", 60)
    assert len(started) == 1


def test_a_first_node_that_never_answers_is_an_error_after_the_time_limit(time_passes, port):
    time_passes({3: suspend()})
    with pytest.raises(dist.DistNetworkError, match=f"the first node did not answer at {LOOPBACK}:{port} within 60 s"):
        connect(LOOPBACK, port, "the first node", 60)


@pytest.fixture
def store():
    return host_on_loopback(0)


def test_a_launcher_that_was_suspended_still_waits_for_the_other_nodes(time_passes, store):
    joined = []
    time_passes({3: suspend(), 9: lambda: joined.append(store.set("joined/1", "")) or 0})
    wait_for_all(store, "nodes", 0, 2, 60, "the address")
    assert len(joined) == 1


def test_nodes_that_never_join_are_named_after_the_time_limit(time_passes, store):
    time_passes({3: suspend()})
    with pytest.raises(dist.DistStoreError, match=re.escape("these of the 4 nodes did not join within 60 s: 1, 2, 3")):
        wait_for_all(store, "nodes", 0, 4, 60, "the address")

"""Timing of the phases of steps."""

import time

import pytest
import torch

from trainer.runtime import device as devices
from trainer.runtime.step_timer import _MAX_PENDING, StepTimer

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_phases_follow_each_other_and_the_current_phase_belongs_to_the_next_call(clock):
    timer = StepTimer(CPU)
    assert timer.take_seconds() == {}
    for name, seconds in (("data", 1.0), ("forward", 2.0), ("data", 4.0), ("backward", 8.0)):
        timer.start(name)
        clock[0] += seconds
    assert timer.take_seconds() == {"data": 5.0, "forward": 2.0}
    clock[0] += 16.0
    timer.start("data")
    assert timer.take_seconds() == {"backward": 24.0}


def test_any_number_of_phases_needs_bounded_memory(clock):
    timer = StepTimer(CPU)
    for _ in range(3 * _MAX_PENDING):
        timer.start("forward")
        clock[0] += 1.0
    assert len(timer._starts) <= _MAX_PENDING
    timer.start("other")
    assert timer.take_seconds() == {"forward": 3.0 * _MAX_PENDING}


def test_cleared_phases_are_forgotten(clock):
    timer = StepTimer(CPU)
    timer.start("data")
    clock[0] += 1.0
    timer.clear()
    timer.start("forward")
    clock[0] += 2.0
    timer.start("other")
    assert timer.take_seconds() == {"forward": 2.0}


def test_the_end_of_a_phase_on_a_gpu_is_awaited_before_it_is_read(monkeypatch):
    class Event:
        reached = False

        def synchronize(self):
            self.reached = True

        def elapsed_time(self, end):
            assert end.reached, "torch raises an error for an event that is not complete"
            return 500.0

    monkeypatch.setattr(devices, "timestamp", lambda device: Event())
    timer = StepTimer(CPU)
    timer.start("forward")
    timer.start("other")
    assert timer.take_seconds() == {"forward": 0.5}

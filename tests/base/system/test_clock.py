"""The clock of a process that may be suspended."""

from trainer.base.system import clock
from trainer.base.system.clock import RunningClock


def test_time_between_readings_that_are_far_apart_is_not_counted(monkeypatch):
    moments = iter([100.0, 105.0, 109.0, 4000.0, 4003.0])
    monkeypatch.setattr(clock.time, "monotonic", lambda: next(moments))
    running = RunningClock(5.0)
    # Late readings count, but of the hour without a reading, only 10 s.
    assert [running.now() for _ in range(4)] == [5.0, 9.0, 19.0, 22.0]

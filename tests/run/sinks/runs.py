"""Runs that are killed, rolled back and resumed, and the curves in their metrics.jsonl."""

import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from unittest import mock

from tests.training_runs import trainer_from
from trainer.base.config import MetricsConfig, TrainingConfig
from trainer.base.system.files import read_json_lines
from trainer.resilience.guard import StabilityGuard
from trainer.run.sinks import delivery
from trainer.run.sinks.delivery import Delivery
from trainer.run.sinks.local import JsonLines
from trainer.run.sinks.sink import LoggedRun, scalars
from trainer.trainer import Trainer

STEPS = 20
FLAGS = [
    *("--training.steps", str(STEPS), "--checkpoint.interval_steps", "5", "--evaluation.interval_steps", "3"),
    *("--resilience.max_consecutive_skips", "2", "--resilience.on_max_skips", "rollback"),
]


def wait_for(condition: Callable[[], bool], or_ended: Callable[[], bool] = lambda: False) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert not or_ended(), "ended"
        assert time.monotonic() < end, "not true within 300 s"
        time.sleep(0.1)


def patient(limit_s: float = 300.0) -> AbstractContextManager[object]:
    """The end of a run waits for services as long as a busy machine needs."""
    return mock.patch.object(delivery, "_CLOSE_S", limit_s)


def wait_for_delivery(sinks: Sequence[object]) -> None:
    """Wait until every service has all records."""
    backlogs = [sink.backlog for sink in sinks if isinstance(sink, Delivery)]
    wait_for(lambda: all(b.position == b.path.stat().st_size and not b.lines for b in backlogs))


def train(
    argv: Sequence[str],
    kill_before: int = 0,
    failed_steps: Sequence[int] = (),
    clock_offset_s: float = 0.0,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Train.

    Args:
        argv: command line of the run.
        kill_before: step before which the process is killed, after all records were delivered.
        failed_steps: those whose loss becomes NaN once, after all records were delivered.
        clock_offset_s: by which the clock is wrong.
        environment: variables to set.
    """
    os.environ.update(environment or {})
    trainer, failed = trainer_from(argv), set(failed_steps)
    train_step, decide, now = Trainer.train_step, StabilityGuard.decide, time.time

    def step(self: Trainer, *args: object) -> object:
        if self.state.step + 1 == kill_before:
            wait_for_delivery(self.metrics.sinks)
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(self, *args)

    def decide_or_fail(self: StabilityGuard, loss: object, *args: object) -> object:
        next_step = trainer.state.step + 1
        if next_step in failed:
            wait_for_delivery(trainer.metrics.sinks)
            failed.remove(next_step)
            loss = loss * math.nan
        return decide(self, loss, *args)

    with (
        mock.patch.object(Trainer, "train_step", step),
        mock.patch.object(StabilityGuard, "decide", decide_or_fail),
        mock.patch.object(time, "time", lambda: now() + clock_offset_s),
        patient(),
    ):
        trainer.train()


def recorded(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the (step, value) pairs of each curve in metrics.jsonl, in order."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in read_json_lines(folder / "metrics.jsonl"):
        for name, value in scalars(record).items():
            curves.setdefault(name, []).append((record["step"], value))
    return curves


def logged_run(folder: Path, **settings: object) -> LoggedRun:
    """A run whose folder has the files that services read."""
    (folder / "config.toml").write_text("[training]\nsteps = 20\n[model.overrides]\nn_layers = 2\n")
    (folder / "environment.json").write_text('{"git_commit": "0123", "packages": {"torch": "2.13.0"}}')
    return LoggedRun("run", folder, TrainingConfig(steps=STEPS), MetricsConfig(**settings))


def record(step: int, loss: float) -> dict[str, object]:
    return {"kind": "train", "step": step, "loss": loss, "timestamp_s": 1e9 + step}


class Process:
    """The sinks of a process that trains: metrics.jsonl and one service."""

    def __init__(self, run: LoggedRun, service: Callable[[LoggedRun], object], first_step: int = 0):
        self.jsonl, self.delivery = JsonLines(run), Delivery(service, run)
        self.rewind(first_step)

    def rewind(self, step: int) -> None:
        self.jsonl.rewind(step)
        self.delivery.rewind(step)

    def write(self, steps: Sequence[int], loss: float) -> None:
        for step in steps:
            self.jsonl.write(record(step, loss))
            self.delivery.write(record(step, loss))

    def delivered(self) -> "Process":
        wait_for_delivery([self.delivery])
        return self

    def close(self, limit_s: float = 300.0) -> None:
        with patient(limit_s):
            delivery.close_sinks([self.jsonl, self.delivery])


def opened(run: LoggedRun, service: Callable[[LoggedRun], object], first_step: int = 0) -> closing[Process]:
    return closing(Process(run, service, first_step))

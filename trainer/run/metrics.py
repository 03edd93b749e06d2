"""Records of a run's steps, evaluations and saves, which sinks write."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trainer.base.config import MetricsConfig, TrainingConfig
from trainer.base.system import console
from trainer.base.system.units import GIB
from trainer.checkpoint.async_save import SaveResult
from trainer.data.sampling.phases import MixturePhase
from trainer.resilience.guard import StepOutcome
from trainer.run.resolve import ResolvedRun
from trainer.run.sinks.delivery import close_sinks
from trainer.run.sinks.sink import Ending, Sink
from trainer.runtime import device as devices
from trainer.runtime.step_timer import StepTimer
from trainer.state import TrainState

_NOT_TRAINING = ("evaluation", "tasks", "samples", "checkpoint", "profiling")
"""Phases that are not part of a step's duration."""


@dataclass
class Metrics:
    """Computes the records of a run and passes them to its sinks. `rewind` is called before the first step."""

    config: MetricsConfig
    training: TrainingConfig
    resolved: ResolvedRun
    device: torch.device
    timer: StepTimer
    sinks: Sequence[Sink]
    samples_per_epoch: int

    def rewind(self, step: int) -> None:
        """Remove the records of all steps after `step`, because training continues from `step`."""
        self.timer.clear()
        self.first_step = self.recorded_step = step
        for sink in self.sinks:
            sink.rewind(step)
        self.start(time.perf_counter())

    def start(self, now: float) -> None:
        """Start the window of steps that the next record covers. now: result of time.perf_counter."""
        devices.reset_memory_peak(self.device)
        self.window_start = now
        self.spent: dict[str, float] = {}  # section -> seconds in this window

    @contextmanager
    def section(self, name: str) -> Iterator[Callable[[], float]]:
        """Context manager that times a section on the host. It yields a function that returns the seconds since the start. The
        section is also a phase."""
        start = time.perf_counter()
        self.timer.start(name)
        try:
            yield lambda: time.perf_counter() - start
        finally:
            self.timer.start("other")
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - start

    def due(self, step: int) -> bool:
        is_due = step % self.config.interval_steps == 0 or step in (self.first_step + 1, self.training.steps)
        return is_due or step in (last for last, _ in self.training.batch_sizes)

    def log_step(self, state: TrainState, outcome: StepOutcome, lr: float, objective: dict[str, Any]) -> None:
        """Record a step whose work on the device is complete. objective: number of target tokens or pairs over all ranks, and the
        objective's metrics."""
        now = time.perf_counter()
        self.timer.start("metrics")  # writing this record belongs to the next window
        step, spent, training = state.step, self.spent, self.training
        phases, not_training = self.timer.take_seconds(), sum(spent.get(name, 0.0) for name in _NOT_TRAINING)
        num_steps = step - self.recorded_step
        step_time = (now - self.window_start - not_training) / num_steps
        num_samples = training.batch_size(step)  # of each step: no record spans a change
        per_second = num_samples * training.seq_len / step_time
        per_second_per_rank = per_second / self.resolved.dims.world_size
        flops = per_second_per_rank * self.resolved.flops_per_token
        memory_end = devices.memory_now(self.device)
        record = {
            "kind": "train",
            "step": step,
            "loss": outcome.loss,
            "grad_norm": outcome.grad_norm,
            "learning_rate": lr,
            **objective,
            "tokens_seen": state.tokens_seen,
            "epochs_seen": state.cursor / self.samples_per_epoch,
            # The samples that the steps of this record consumed.
            "first_step": self.recorded_step + 1,
            "global_batch_size": num_samples,
            "cursor": state.cursor,
            "skipped_samples": state.skipped_samples,
            "skipped_steps": outcome.total_skips,
            "tokens_per_second": per_second,
            "tokens_per_second_per_rank": per_second_per_rank,
            "tflops_per_second_per_rank": flops / 1e12,
            "step_time_s": step_time,
            **{f"{name}_time_s": seconds / num_steps for name, seconds in phases.items() if name not in _NOT_TRAINING},
            "evaluation_time_s": spent.get("evaluation", 0.0),
            "tasks_time_s": spent.get("tasks", 0.0),
            "samples_time_s": spent.get("samples", 0.0),
            "checkpoint_time_s": spent.get("checkpoint", 0.0),
            "memory_peak_gib": max(devices.memory_peak(self.device), memory_end) / GIB,
            "memory_end_gib": memory_end / GIB,
        }
        if reserved := devices.memory_reserved(self.device):
            record["memory_reserved_gib"] = reserved / GIB
        if peak_flops := devices.peak_flops(self.device, training.compute_dtype):
            record["mfu_percent"] = 100 * flops / peak_flops
        self.log_event(record)
        self.recorded_step = step
        self.start(now)
        self.timer.start("other")

    def log_saves(self, saves: Iterable[SaveResult]) -> None:
        for save in saves:
            background = f" + {save.background_s:.1f} s in the background" if save.background_s >= 0.05 else ""
            console.info(f"saved {save.path} in {save.blocked_s:.1f} s{background}")
            seconds = {"blocked_s": save.blocked_s, "background_s": save.background_s}
            self.log_event({"kind": "checkpoint", "step": save.step} | seconds)

    def log_phase(self, step: int, phase: MixturePhase) -> None:
        """Record the weights of the datasets from a sample of this step on."""
        if phase.start:  # the notes on the start of the run have the first
            console.info(f"step {step} | mixture: {phase}")
        self.log_event({"kind": "mixture", "step": step, "sample": phase.start, "weights": phase.weights})

    def log_event(self, record: dict[str, Any]) -> None:
        """Write a record, which must have the keys "kind" and "step"."""
        for sink in self.sinks:
            sink.write(record | {"timestamp_s": time.time()})

    def end(self, step: int, ending: Ending, problem: str) -> None:
        """Record how the run ends, and close the sinks. problem: why its model has probably not learned, or ""."""
        self.log_event({"kind": "end", "step": step, "ending": ending} | ({"problem": problem} if problem else {}))
        self.close()

    def close(self) -> None:
        close_sinks(self.sinks)

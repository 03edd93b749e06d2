"""Metrics of a run: console lines, metrics.jsonl and TensorBoard."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.async_save import SaveResult
from trainer.config import MetricsConfig, TrainingConfig
from trainer.resilience.guard import StepOutcome
from trainer.run.resolve import ResolvedRun
from trainer.runtime import device as devices
from trainer.runtime.phases import PhaseTimer
from trainer.state import TrainState
from trainer.system import console
from trainer.system.files import atomic_write, is_moved, parse_json_object, require_regular
from trainer.system.units import GIB

_FILE, _TENSORBOARD = "metrics.jsonl", "TensorBoard's files"
_BUFFER_BYTES = 2**22
"""Size of a file's buffer. While a disk is full, the buffer keeps the records that cannot be written."""
_NOT_TRAINING = ("evaluation", "checkpoint", "profiling")
"""Phases that are not part of a step's duration."""
_NOT_PLOTTED = ("step", "first_step", "global_batch_size", "cursor", "tokens_seen")


@dataclass
class Metrics:
    """Writer of a run's records. A resumed run removes the records of the steps that it repeats and appends new records."""

    config: MetricsConfig
    training: TrainingConfig
    resolved: ResolvedRun
    device: torch.device
    phases: PhaseTimer
    folder: Path | None
    """Run folder, or None on ranks that write nothing."""
    first_step: int
    """Step that the run resumes from."""

    def __post_init__(self) -> None:
        self.failed_files: set[str] = set()
        self.records = self.events = None
        self.rewind(self.first_step)
        self.start(time.perf_counter())

    def rewind(self, step: int) -> None:
        """Remove the records of all steps after `step`, because training continues from `step`."""
        self.close()
        self.phases.clear()
        self.first_step = self.recorded_step = step
        self.last_steps: dict[str, float] = {}  # file -> step after which it must not have records when it is opened
        self._open()

    def _open(self) -> None:
        """Open the files that are not open. If this fails, the next record tries it again."""
        if self.folder and not self.records:
            with self._warn_on_write_error(_FILE):
                require_regular(self.folder / _FILE)
                _remove_records_after(self.last_steps.get(_FILE, self.first_step), self.folder / _FILE)
                self.records = (self.folder / _FILE).open("ab", _BUFFER_BYTES)
                self.last_steps[_FILE] = math.inf
        if self.folder and self.config.tensorboard and not self.events:
            # Imported here, because only one rank writes, and only if TensorBoard is enabled.
            from trainer.run.tensorboard import EventFile

            with self._warn_on_write_error(_TENSORBOARD):
                last_step = self.last_steps.get(_TENSORBOARD, self.first_step)
                self.events = EventFile(self.folder / "tb", last_step, _BUFFER_BYTES)
                self.last_steps[_TENSORBOARD] = math.inf

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
        self.phases.start(name)
        try:
            yield lambda: time.perf_counter() - start
        finally:
            self.phases.start("other")
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - start

    def due(self, step: int) -> bool:
        return step % self.config.interval_steps == 0 or step in (self.first_step + 1, self.training.steps)

    def log_step(self, state: TrainState, outcome: StepOutcome, lr: float, objective: dict[str, Any]) -> None:
        """Record a step whose work on the device is complete. objective: number of target tokens or pairs over all ranks, and the
        objective's metrics."""
        now = time.perf_counter()
        self.phases.start("metrics")  # writing this record belongs to the next window
        step, spent, training = state.step, self.spent, self.training
        phases, not_training = self.phases.take_seconds(), sum(spent.get(name, 0.0) for name in _NOT_TRAINING)
        num_steps = step - self.recorded_step
        step_time = (now - self.window_start - not_training) / num_steps
        per_second = training.global_batch_size * training.seq_len / step_time
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
            # The samples that the steps of this record consumed.
            "first_step": self.recorded_step + 1,
            "global_batch_size": training.global_batch_size,
            "cursor": state.cursor,
            "skipped_samples": state.skipped_samples,
            "skipped_steps": outcome.total_skips,
            "tokens_per_second": per_second,
            "tokens_per_second_per_rank": per_second_per_rank,
            "tflops_per_second_per_rank": flops / 1e12,
            "step_time_s": step_time,
            **{f"{name}_time_s": seconds / num_steps for name, seconds in phases.items() if name not in _NOT_TRAINING},
            "evaluation_time_s": spent.get("evaluation", 0.0),
            "checkpoint_time_s": spent.get("checkpoint", 0.0),
            "memory_peak_gib": max(devices.memory_peak(self.device), memory_end) / GIB,
            "memory_end_gib": memory_end / GIB,
        }
        if reserved := devices.memory_reserved(self.device):
            record["memory_reserved_gib"] = reserved / GIB
        if peak_flops := devices.peak_flops(self.device, training.compute_dtype):
            record["mfu_percent"] = 100 * flops / peak_flops
        self.log_event(record)
        console.info(self._line(record))
        self.recorded_step = step
        self.start(now)
        self.phases.start("other")

    def _line(self, record: dict[str, Any]) -> str:
        step, steps = record["step"], self.training.steps
        remaining_s = (steps - step) * record["step_time_s"]
        mfu = f" | MFU {record['mfu_percent']:.1f} %" if "mfu_percent" in record else ""
        loss = f"loss {record['loss']:.4f}"
        if console.on_terminal():
            loss = f"\x1b[1m{loss}\x1b[0m"
        return (
            f"step {step:>{len(str(steps))}}/{steps} | {loss} | grad norm {record['grad_norm']:.3f} "
            f"| lr {record['learning_rate']:.2e} | {record['tokens_per_second']:,.0f} tokens/s{mfu} "
            f"| {record['memory_peak_gib']:.2f} GiB | {100 * step // steps} % | {duration(remaining_s)} left"
        )

    def log_saves(self, saves: Iterable[SaveResult]) -> None:
        for save in saves:
            background = f" + {save.background_s:.1f} s in the background" if save.background_s >= 0.05 else ""
            console.info(f"saved {save.path} in {save.blocked_s:.1f} s{background}")
            seconds = {"blocked_s": save.blocked_s, "background_s": save.background_s}
            self.log_event({"kind": "checkpoint", "step": save.step} | seconds)

    def log_event(self, record: dict[str, Any]) -> None:
        """Write a record, which must have the keys "kind" and "step"."""
        if self.records and is_moved(self.records):
            self._close_records()
        if self.events and is_moved(self.events.file):
            self._close_events()
        self._open()
        if self.records:
            # JSON cannot represent NaN and infinity.
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
            with self._warn_on_write_error(_FILE):
                self.records.write(json.dumps(finite).encode() + b"\n")
                self.records.flush()
        if self.events:
            group = "/".join(filter(None, (record["kind"], record.get("dataset"))))
            plotted = {
                f"{group}/{k}": v for k, v in record.items() if k not in _NOT_PLOTTED and isinstance(v, int | float)
            }
            with self._warn_on_write_error(_TENSORBOARD):
                self.events.write(record["step"], plotted)

    @contextmanager
    def _warn_on_write_error(self, file: str) -> Iterator[None]:
        """Context manager that warns about a failed write, so that a full disk does not end the run. It warns once per file."""
        try:
            yield
        except OSError as error:
            if file not in self.failed_files:
                console.warning(f"{file} cannot be written ({error.strerror}); the run continues")
            self.failed_files.add(file)

    def _close_records(self) -> None:
        file, self.records = self.records, None
        with self._warn_on_write_error(_FILE):
            file.close()

    def _close_events(self) -> None:
        file, self.events = self.events, None
        with self._warn_on_write_error(_TENSORBOARD):
            file.close()

    def close(self) -> None:
        if self.records:
            self._close_records()
        if self.events:
            self._close_events()


def _remove_records_after(step: float, path: Path) -> None:
    """Remove the records after a step, and lines that are no records."""
    if not path.exists():
        return
    with path.open("rb") as file:
        lines = file.readlines()
    kept = [line for line in lines if _is_record_until(step, line)]
    if kept == lines[: len(kept)]:
        os.truncate(path, sum(map(len, kept)))  # needs no space, so it succeeds while the disk is full
    else:
        atomic_write(path, b"".join(kept).decode())


def _is_record_until(step: float, line: bytes) -> bool:
    try:
        last = parse_json_object(line).get("step")
    except ValueError:
        return False
    return isinstance(last, int) and last <= step and line.endswith(b"\n")


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"

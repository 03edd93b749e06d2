"""Metrics of a run: console lines, metrics.jsonl and TensorBoard."""

import json
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.async_save import SaveResult
from trainer.config import MetricsConfig
from trainer.resilience.guard import StepOutcome
from trainer.runtime import device as devices
from trainer.state import TrainState
from trainer.system import logging
from trainer.system.files import atomic_write
from trainer.system.units import GIB

_FILE, _TENSORBOARD = "metrics.jsonl", "TensorBoard's files"


class Timers:
    """Timers of the seconds since the last reset and of the seconds that each named section took."""

    def __init__(self, device: torch.device):
        self.device = device
        self.reset()

    def reset(self) -> None:
        self.start = time.perf_counter()
        self.spent: dict[str, float] = {}

    @contextmanager
    def section(self, name: str, synchronize: bool = True) -> Iterator["Section"]:
        """Time a section. synchronize: whether to wait for the device before and after the section, so as to time its work."""
        if synchronize:
            devices.synchronize(self.device)
        start = time.perf_counter()
        section = Section()
        try:
            yield section
        finally:
            if synchronize:
                devices.synchronize(self.device)
            section.seconds = time.perf_counter() - start
            self.spent[name] = self.spent.get(name, 0.0) + section.seconds

    def elapsed(self) -> float:
        return time.perf_counter() - self.start


@dataclass
class Section:
    seconds: float = 0.0
    """Duration of the section, set when the section ends."""


class Metrics:
    """Writer of a run's records. A resumed run continues the files, without the records after the step it resumes from."""

    def __init__(
        self,
        config: MetricsConfig,
        folder: Path | None,
        device: torch.device,
        *,
        first_step: int,
        steps: int,
        ranks: int,
        tokens_per_step: int,
        flops_per_token: int,
        peak_flops: float | None,
    ):
        """folder: run folder, or None on ranks that write nothing. first_step: step that the run resumes from. tokens_per_step:
        number over all ranks. flops_per_token: for the complete model. peak_flops: for one device, or None if unknown."""
        self.config = config
        self.folder = folder
        self.device = device
        self.steps = steps
        self.ranks = ranks
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.timers = Timers(device)
        self.run_timers = Timers(device)
        self.memory_min = 0
        self._open(first_step)

    def _open(self, first_step: int) -> None:
        self.first_step = self.recorded_step = first_step
        self.failed_sinks: set[str] = set()
        self.file = self.summary_writer = None
        if self.folder:
            with self._warn_on_write_error(_FILE):
                self.file = _continue_records(self.folder / _FILE, first_step)
        if self.folder and self.config.tensorboard:
            with self._warn_on_write_error(_TENSORBOARD):
                self.summary_writer = _open_tensorboard(self.folder / "tb", first_step)

    def rewind(self, step: int) -> None:
        """Remove the records of steps after `step`, from which training continues."""
        self.close()
        self._open(step)

    def start(self) -> None:
        """Start the clock, after all preparations."""
        self.run_timers.reset()
        self._start_window()

    def _start_window(self) -> None:
        self.memory_min = devices.memory_now(self.device)
        devices.reset_memory_peak(self.device)
        self.timers.reset()

    def after_step(self) -> None:
        self.memory_min = min(self.memory_min, devices.memory_now(self.device))

    def due(self, step: int) -> bool:
        return step % self.config.interval_steps == 0 or step in (self.first_step + 1, self.steps)

    def log_step(self, state: TrainState, outcome: StepOutcome, lr: float, num_targets: int) -> None:
        """Record a step whose device work is done: its outcome was read. num_targets: number of target tokens over all ranks."""
        step, spent = state.step, self.timers.spent
        not_training = sum(seconds for name, seconds in spent.items() if name != "data")
        num_steps = step - self.recorded_step
        step_time = (self.timers.elapsed() - not_training) / num_steps
        per_second = self.tokens_per_step / step_time
        flops = per_second / self.ranks * self.flops_per_token
        record = {
            "kind": "train",
            "step": step,
            "loss": outcome.loss,
            "grad_norm": outcome.grad_norm,
            "learning_rate": lr,
            "num_targets": num_targets,
            "tokens_seen": state.tokens_seen,
            "skipped_steps": outcome.total_skips,
            "tokens_per_second": per_second,
            "tokens_per_second_per_rank": per_second / self.ranks,
            "tflops_per_second_per_rank": flops / 1e12,
            "step_time_s": step_time,
            "data_time_s": spent.get("data", 0.0) / num_steps,
            "evaluation_time_s": spent.get("evaluation", 0.0),
            "checkpoint_time_s": spent.get("checkpoint", 0.0),
            "memory_peak_gib": devices.memory_peak(self.device) / GIB,
            "memory_min_gib": self.memory_min / GIB,
        }
        if self.peak_flops is not None:
            record["mfu_percent"] = 100 * flops / self.peak_flops
        self._write(record, ("step", "tokens_seen"))
        logging.info(self._line(record))
        self.recorded_step = step
        self._start_window()

    def _line(self, record: dict[str, Any]) -> str:
        step = record["step"]
        remaining_s = (self.steps - step) * record["step_time_s"]
        mfu = f" | MFU {record['mfu_percent']:.1f} %" if "mfu_percent" in record else ""
        loss = f"loss {record['loss']:.4f}"
        if logging.on_terminal():
            loss = f"\x1b[1m{loss}\x1b[0m"
        return (
            f"step {step:>{len(str(self.steps))}}/{self.steps} | {loss} | grad norm {record['grad_norm']:.3f} "
            f"| lr {record['learning_rate']:.2e} | {record['tokens_per_second']:,.0f} tokens/s{mfu} "
            f"| {record['memory_peak_gib']:.2f} GiB | {100 * step // self.steps} % | {duration(remaining_s)} left"
        )

    def log_saves(self, saves: Iterable[SaveResult]) -> None:
        for save in saves:
            background = f" + {save.background_s:.1f} s in the background" if save.background_s >= 0.05 else ""
            logging.info(f"saved {save.path} in {save.blocked_s:.1f} s{background}")
            seconds = {"blocked_s": save.blocked_s, "background_s": save.background_s}
            self.log_event({"kind": "checkpoint", "step": save.step} | seconds)

    def log_event(self, record: dict[str, Any]) -> None:
        """Write a record that is not about a step. record: has the keys "kind" and "step"."""
        self._write(record, ("step",))

    def _write(self, record: dict[str, Any], not_plotted: tuple[str, ...]) -> None:
        if self.file:
            # JSON cannot represent NaN and infinity.
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
            with self._warn_on_write_error(_FILE):
                self.file.write(json.dumps(finite) + "\n")
                self.file.flush()
        if self.summary_writer:
            group = "/".join(filter(None, (record["kind"], record.get("dataset"))))
            with self._warn_on_write_error(_TENSORBOARD):
                for name, value in record.items():
                    if name not in not_plotted and isinstance(value, int | float):
                        self.summary_writer.add_scalar(f"{group}/{name}", value, record["step"])

    @contextmanager
    def _warn_on_write_error(self, sink: str) -> Iterator[None]:
        """Context that warns, once per sink, about a failed write, so that a full disk does not end the run."""
        try:
            yield
        except OSError as error:
            if sink == _TENSORBOARD:
                self.summary_writer = None
            if sink not in self.failed_sinks:
                logging.warning(f"{sink} cannot be written ({error.strerror}); the run continues")
            self.failed_sinks.add(sink)

    def flush(self) -> None:
        """Write TensorBoard's buffered records to disk, which otherwise happens every few minutes."""
        if self.summary_writer:
            with self._warn_on_write_error(_TENSORBOARD):
                self.summary_writer.flush()

    def close(self) -> None:
        if self.file:
            with self._warn_on_write_error(_FILE):
                self.file.close()
        if self.summary_writer:
            with self._warn_on_write_error(_TENSORBOARD):
                self.summary_writer.close()


def _continue_records(path: Path, first_step: int):
    """Remove the records of steps after `first_step`, and open the file for appending."""
    if path.exists():
        with path.open(errors="replace") as file:
            lines = [line for line in file if _step_of(line) <= first_step]
        atomic_write(path, "".join(lines))
    return path.open("a")


def _step_of(line: str) -> float:
    """Return the step of a record, or infinity if the line is incomplete."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _open_tensorboard(folder: Path, first_step: int):
    # Imported here, because only one rank writes, and only if TensorBoard is enabled.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=first_step + 1)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"

"""One record per logged step: a line for people, metrics.jsonl, TensorBoard."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.config import MetricsConfig
from trainer.runtime import device as devices
from trainer.system import logging
from trainer.system.files import atomic_write
from trainer.system.units import GIB

_FILE, _BOARD = "metrics.jsonl", "TensorBoard's files"


class Stopwatch:
    """Seconds since the last reset, and how many of them went into named activities."""

    def __init__(self, device: torch.device):
        self.device = device
        self.reset()

    def reset(self) -> None:
        self.start = time.perf_counter()
        self.spent: dict[str, float] = {}

    @contextmanager
    def on(self, activity: str, synchronize: bool = True) -> Iterator["Lap"]:
        """synchronize: let the work that the device still has finish before and after, so that it counts where it
        belongs."""
        if synchronize:
            devices.synchronize(self.device)
        start = time.perf_counter()
        lap = Lap()
        try:
            yield lap
        finally:
            if synchronize:
                devices.synchronize(self.device)
            lap.seconds = time.perf_counter() - start
            self.spent[activity] = self.spent.get(activity, 0.0) + lap.seconds

    def elapsed(self) -> float:
        return time.perf_counter() - self.start


@dataclass
class Lap:
    seconds: float = 0.0
    """Known when the activity has ended."""


class Metrics:
    """Records of a run. A resumed run continues the same files; what a lost stretch of the run wrote is taken out."""

    def __init__(
        self,
        config: MetricsConfig,
        folder: Path | None,
        device: torch.device,
        *,
        first_step: int,
        steps: int,
        ranks: int,
        flops_per_token: int,
        peak_flops: float | None,
    ):
        """folder: of the run, None on ranks that write nothing. first_step: steps done before. flops_per_token: of the
        whole model; peak_flops: of one device, None where unknown."""
        self.config = config
        self.device = device
        self.first_step = first_step
        self.steps = steps
        self.ranks = ranks
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.watch = Stopwatch(device)
        self.run_watch = Stopwatch(device)
        self.valley = 0
        self.recorded_step = first_step
        self.refused: set[str] = set()
        self.file = self.board = None
        if folder:
            with self._told(_FILE):
                self.file = _continue_records(folder / _FILE, first_step)
        if folder and config.tensorboard:
            with self._told(_BOARD):
                self.board = _open_board(folder / "tb", first_step)

    def start(self) -> None:
        """Training begins now: what came before is start-up."""
        self.run_watch.reset()
        self._begin_window()

    def _begin_window(self) -> None:
        self.valley = devices.memory_now(self.device)
        devices.reset_memory_peak(self.device)
        self.watch.reset()

    def after_step(self) -> None:
        self.valley = min(self.valley, devices.memory_now(self.device))

    def due(self, step: int) -> bool:
        return step % self.config.interval_steps == 0 or step in (self.first_step + 1, self.steps)

    def record_training(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        num_targets: int,
        tokens_seen: int,
        tokens: int,
        skipped: int,
    ) -> None:
        """num_targets, tokens: of this step, over all ranks; tokens_seen, skipped: of the run. The caller has read the
        loss from the device, so its work is done."""
        spent = self.watch.spent
        aside = sum(seconds for activity, seconds in spent.items() if activity != "data")
        num_steps = step - self.recorded_step
        step_time = (self.watch.elapsed() - aside) / num_steps
        per_second = tokens / step_time
        flops = per_second / self.ranks * self.flops_per_token
        record = {
            "kind": "train",
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "num_targets": num_targets,
            "tokens_seen": tokens_seen,
            "updates_left_out": skipped,
            "tokens_per_second": per_second,
            "tokens_per_second_per_rank": per_second / self.ranks,
            "tflops_per_second_per_rank": flops / 1e12,
            "step_time_s": step_time,
            "data_time_s": spent.get("data", 0.0) / num_steps,
            "evaluation_time_s": spent.get("evaluation", 0.0),
            "checkpoint_time_s": spent.get("checkpoint", 0.0),
            "memory_peak_gib": devices.memory_peak(self.device) / GIB,
            "memory_valley_gib": self.valley / GIB,
        }
        if self.peak_flops is not None:
            record["mfu_percent"] = 100 * flops / self.peak_flops
        self._write(record, ("step", "tokens_seen"))
        logging.info(self._line(record))
        self.recorded_step = step
        self._begin_window()

    def _line(self, record: dict[str, Any]) -> str:
        step = record["step"]
        left = (self.steps - step) * record["step_time_s"]
        mfu = f" | MFU {record['mfu_percent']:.1f} %" if "mfu_percent" in record else ""
        loss = f"loss {record['loss']:.4f}"
        if logging.on_terminal():
            loss = f"\x1b[1m{loss}\x1b[0m"
        return (
            f"step {step:>{len(str(self.steps))}}/{self.steps} | {loss} | grad norm {record['grad_norm']:.3f} "
            f"| lr {record['learning_rate']:.2e} | {record['tokens_per_second']:,.0f} tokens/s{mfu} "
            f"| {record['memory_peak_gib']:.2f} GiB | {100 * step // self.steps} % | {duration(left)} left"
        )

    def record_event(self, record: dict[str, Any]) -> None:
        """A record of another kind, with "kind" and "step"."""
        self._write(record, ("step",))

    def _write(self, record: dict[str, Any], not_drawn: tuple[str, ...]) -> None:
        if self.file:
            # JSON has no NaN and no infinity.
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
            with self._told(_FILE):
                self.file.write(json.dumps(finite) + "\n")
                self.file.flush()
        if self.board:
            group = "/".join(filter(None, (record["kind"], record.get("set"))))
            with self._told(_BOARD):
                for name, value in record.items():
                    if name not in not_drawn and isinstance(value, int | float):
                        self.board.add_scalar(f"{group}/{name}", value, record["step"])

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """A full disk costs records, not the run; it is told once. TensorBoard's writer has ended then."""
        try:
            yield
        except OSError as error:
            if what == _BOARD:
                self.board = None
            if what not in self.refused:
                logging.warning(f"{what} cannot be written ({error.strerror}); the run goes on")
            self.refused.add(what)

    def flush(self) -> None:
        """Everything so far is in the files. TensorBoard's would wait for minutes, and a killed run lose that."""
        if self.board:
            with self._told(_BOARD):
                self.board.flush()

    def close(self) -> None:
        if self.file:
            with self._told(_FILE):
                self.file.close()
        if self.board:
            with self._told(_BOARD):
                self.board.close()


def _continue_records(path: Path, first_step: int):
    """The file opened for appending, without records of later steps: they were made by a run that lost these steps."""
    if path.exists():
        with path.open(errors="replace") as file:
            kept = [line for line in file if _step_of(line) <= first_step]
        atomic_write(path, "".join(kept))
    return path.open("a")


def _step_of(line: str) -> float:
    """A half-written last line belongs to the lost stretch."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _open_board(folder: Path, first_step: int):
    # Not at the top: only one rank writes, and not where it is switched off.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=first_step + 1)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"

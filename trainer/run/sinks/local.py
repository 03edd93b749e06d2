"""The console and metrics.jsonl."""

import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.base.config import TrainingConfig
from trainer.base.system import console
from trainer.base.system.files import atomic_write, is_moved, parse_json_object, require_regular
from trainer.base.system.run_files import METRICS_FILE
from trainer.base.system.units import duration
from trainer.run.sinks.sink import LoggedRun

_HALF_LIFE = 200
"""Number of steps after which a step counts half in the estimate of the remaining time."""
_BUFFER_BYTES = 2**22
"""Size of the file's buffer. While a disk is full, the buffer keeps the records that cannot be written."""


class RemainingTime:
    """Estimate of the time to the end of a run, from the mean time of a sample in the last steps, of which older ones count less.
    It includes evaluations, generated samples and saves."""

    def __init__(self, training: TrainingConfig):
        """training: Number of steps, and the samples of each step."""
        self.training = training
        self.forget()

    def forget(self) -> None:
        """Forget the past steps. The next ones begin another process or follow a rollback."""
        self.seconds = self.num_samples = 0.0  # weighted sums over the past steps
        self.is_first = True

    def after(self, record: dict[str, Any]) -> float:
        """Return the seconds that remain after a training record."""
        step, done = record["step"], record["first_step"] - 1
        num_steps, num_samples = step - done, self.training.samples_between(done, step)
        left = self.training.samples_between(step, self.training.steps)
        other = sum(record[f"{name}_time_s"] for name in ("evaluation", "tasks", "samples", "checkpoint"))
        seconds = num_steps * record["step_time_s"] + other
        if self.is_first:  # it contains the compilation, so it counts only until there is another one
            self.is_first = False
            return left * seconds / num_samples
        decay = 0.5 ** (num_steps / max(_HALF_LIFE, num_steps))
        self.seconds = decay * self.seconds + seconds
        self.num_samples = decay * self.num_samples + num_samples
        return left * self.seconds / self.num_samples


class Console:
    """A line for each training record, and the samples."""

    def __init__(self, run: LoggedRun):
        self.steps, self.epochs = run.training.steps, run.epochs
        self.remaining = RemainingTime(run.training)

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "train":
            console.info(self._line(record))
        elif record["kind"] == "samples":
            for sample in record["samples"]:
                text = sample["text"].replace("\t", "    ").replace("\n", "\n    ")
                console.info(f"step {record['step']} | sample after {sample['prompt']!r}:\n    {text}")

    def rewind(self, step: int) -> None:
        """Begin a new estimate of the remaining time. Lines cannot be removed."""
        self.remaining.forget()

    def close(self) -> None:
        """Do nothing: each line is flushed."""

    def _line(self, record: dict[str, Any]) -> str:
        step, steps = record["step"], self.steps
        remaining_s = self.remaining.after(record)
        mfu = f" | MFU {record['mfu_percent']:.1f} %" if "mfu_percent" in record else ""
        epochs = f" | epoch {record['epochs_seen']:.2f}/{self.epochs:g}" if self.epochs else ""
        return (
            f"step {step:>{len(str(steps))}}/{steps}{epochs} | loss {record['loss']:.4f} | grad norm {record['grad_norm']:.3f} "
            f"| lr {record['learning_rate']:.2e} | {record['tokens_per_second']:,.0f} tokens/s{mfu} "
            f"| {record['memory_peak_gib']:.2f} GiB | {100 * step // steps} % | {duration(remaining_s)} left"
        )


class JsonLines:
    """metrics.jsonl: one JSON object per line. It never contains a step that the run has not kept."""

    def __init__(self, run: LoggedRun):
        self.path = run.folder / METRICS_FILE
        self.file = None
        self.last_step = math.inf  # later steps are removed when the file is opened
        self.has_warned = False

    def write(self, record: dict[str, Any]) -> None:
        if self.file and is_moved(self.file):
            self.close()
        self._open()  # what could not be opened before is tried again
        if self.file:
            with self._warn_on_write_error():
                self.file.write(_line(record))
                self.file.flush()

    def rewind(self, step: int) -> None:
        self.close()
        self.last_step = step
        self._open()

    def close(self) -> None:
        file, self.file = self.file, None
        if file:
            with self._warn_on_write_error():
                file.close()

    def _open(self) -> None:
        if self.file is None:
            with self._warn_on_write_error():
                require_regular(self.path)
                _remove_records_after(self.last_step, self.path)
                self.file = self.path.open("ab", _BUFFER_BYTES)
                self.last_step = math.inf

    @contextmanager
    def _warn_on_write_error(self) -> Iterator[None]:
        """Context manager that warns once about a failed write, so that a full disk does not end the run."""
        try:
            yield
        except OSError as error:
            if not self.has_warned:
                console.warning(f"{METRICS_FILE} cannot be written ({error.strerror}); the run continues")
            self.has_warned = True


def append_records(folder: Path, records: Iterable[dict[str, Any]]) -> None:
    """Add records to metrics.jsonl of a run that has ended. Raises OSError."""
    path = folder / METRICS_FILE
    require_regular(path)
    _remove_records_after(math.inf, path)  # only a line that a killed process has not completed
    with path.open("ab") as file:
        file.write(b"".join(_line(record | {"timestamp_s": time.time()}) for record in records))


def _line(record: dict[str, Any]) -> bytes:
    # JSON cannot represent NaN and infinity.
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite).encode() + b"\n"


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

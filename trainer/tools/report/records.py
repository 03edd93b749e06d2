"""The records of a run's metrics.jsonl as curves and events. Damaged lines and replaced records are counted, not shown."""

import math
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.base.system.files import parse_json_object, require_regular
from trainer.run.sinks.sink import scalars

CURVE_KINDS = ("train", "eval", "task")
"""Kinds of records whose numbers are curves. Records of all kinds but "train" are events."""


@dataclass
class Curve:
    """The values of one metric, in the order of their steps, which grow."""

    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))
    """NaN where a record has no finite value."""

    def append(self, step: int, value: float) -> None:
        self.cut(step)
        self.steps.append(step)
        self.values.append(value if math.isfinite(value) else math.nan)

    def put(self, step: int, value: float) -> None:
        """Insert a value where its step belongs, in place of another one of this step."""
        i = bisect_left(self.steps, step)
        if self.steps[i : i + 1] == array("q", [step]):
            del self.steps[i], self.values[i]
        self.steps.insert(i, step)
        self.values.insert(i, value if math.isfinite(value) else math.nan)

    def cut(self, step: int) -> None:
        """Remove the values of this step and of later ones."""
        if self.steps and self.steps[-1] >= step:
            first = bisect_left(self.steps, step)
            del self.steps[first:], self.values[first:]


@dataclass
class Records:
    """What metrics.jsonl says of a run."""

    curves: dict[str, Curve] = field(default_factory=dict)
    """Name, such as train/loss, eval/held_out/loss or task/arc/acc -> values."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Records of evaluations, saves and so on, and what follows from training records: rollbacks, skipped steps, losses that
    are not finite."""
    damaged: list[int] = field(default_factory=list)
    """Numbers of the lines that are no records. The first line is 1."""
    incomplete: bool = False
    """Whether the last line has no end: it is being written, or its process was killed."""
    replaced: int = 0
    """Number of records of steps that were trained again."""
    train_steps: array = field(default_factory=lambda: array("q"))
    """Steps of the training records."""
    axes: dict[str, Curve] = field(default_factory=lambda: {"tokens": Curve(), "hours": Curve()})
    """What can replace steps: seen tokens, and hours of the steps, without evaluations, saves and interruptions."""
    first_time_s: float = math.nan
    last_time_s: float = math.nan
    last: dict[str, Any] = field(default_factory=dict)
    """Last training record."""

    def add(self, record: dict[str, Any]) -> None:
        """Add a record, which is valid."""
        step, kind = record["step"], record["kind"]
        time_s = record.get("timestamp_s")
        if isinstance(time_s, int | float):
            self.first_time_s = time_s if math.isnan(self.first_time_s) else self.first_time_s
            self.last_time_s = time_s
        if kind == "train":
            if self.last and step <= self.last["step"]:
                self._rewind(step)
            self._add_train_events(record)
            self._add_axes(record)
            self.last = record
            self.train_steps.append(step)
        else:
            self.events.append(record)
        if kind in CURVE_KINDS:
            # JSON cannot represent NaN and infinity: they are null.
            for name, value in scalars({k: math.nan if v is None else v for k, v in record.items()}).items():
                curve = self.curves.setdefault(name, Curve())
                # A checkpoint may be evaluated after later ones.
                (curve.put if kind == "task" else curve.append)(step, _as_float(value))

    def _add_axes(self, record: dict[str, Any]) -> None:
        step, first = record["step"], record.get("first_step")
        tokens, seconds = record.get("tokens_seen"), record.get("step_time_s")
        if _is_finite(tokens):
            self._tick("tokens", step, _as_float(tokens), first)
        if _is_finite(seconds) and type(first) is int:
            before = self.axes["hours"].values[-1:] or [0.0]
            self._tick("hours", step, before[0] + (step - first + 1) * _as_float(seconds) / 3600, first)

    def _tick(self, axis: str, step: int, value: float, first: Any) -> None:
        curve = self.axes[axis]
        if not curve.steps and first == 1:
            curve.append(0, 0.0)
        curve.append(step, value)

    def _rewind(self, step: int) -> None:
        """Remove what was recorded of this step and of later ones, because they were trained again."""
        before = len(self.events) + len(self.train_steps)
        del self.train_steps[bisect_left(self.train_steps, step) :]
        for curve in (*self.curves.values(), *self.axes.values()):
            curve.cut(step)
        self.events = [event for event in self.events if event["step"] < step]
        self.replaced += before - len(self.events) - len(self.train_steps)

    def _add_train_events(self, record: dict[str, Any]) -> None:
        step = record["step"]
        event = {"step": step, "timestamp_s": record.get("timestamp_s")}
        if (samples := _skipped_samples(record) - _skipped_samples(self.last)) > 0:
            self.events.append(event | {"kind": "rollback", "samples": samples})
        now, before = record.get("skipped_steps"), self.last.get("skipped_steps", 0)
        if isinstance(now, int) and isinstance(before, int) and now > before:
            self.events.append(event | {"kind": "skipped", "count": now - before})
        if "loss" in record and not _is_finite(record["loss"]):
            previous = self.events[-1] if self.events else {}
            if previous.get("kind") == "not finite" and not _is_finite(self.last.get("loss", 0.0)):
                previous["last_step"] = step
            else:
                self.events.append(event | {"kind": "not finite", "last_step": step})


def read_records(path: Path) -> Records:
    """Read metrics.jsonl. Raises OSError if it cannot be read as a file."""
    records = Records()
    require_regular(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            record = _parse(line)
            if record is not None:
                records.add(record)
            elif not line.endswith(b"\n"):
                records.incomplete = True
            elif line.strip():
                records.damaged.append(number)
    return records


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if the line is none: a record has a kind and a step."""
    try:
        record = parse_json_object(line)
    except ValueError:
        return None
    step, names = record.get("step"), (record.get("kind"), record.get("dataset", ""), record.get("task", ""))
    is_record = type(step) is int and 0 <= step < 2**53 and all(isinstance(name, str) for name in names)
    return record if is_record else None


def _skipped_samples(record: dict[str, Any]) -> int:
    """Return the number of samples that rollbacks have skipped. Adjacent ranges are merged, so their number may not grow."""
    try:
        return sum(int(stop) - int(start) for start, stop in record.get("skipped_samples", ()))
    except (TypeError, ValueError, OverflowError):
        return 0


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer without limit
        return math.nan


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(_as_float(value))

"""Events and samples of a run as rows of a table."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.base.config.schema.tasks import FALLING, METRICS
from trainer.base.system.spelling import counted
from trainer.base.system.units import duration
from trainer.tools.report.figures import in_words, main_scores, number
from trainer.tools.report.plan import Plan
from trainer.tools.report.records import Curve
from trainer.tools.report.run import Run

NAMES = {
    "checkpoint": "save",
    "eval": "evaluation",
    "task": "task",
    "rollback": "rollback",
    "skipped": "skipped steps",
    "not finite": "loss not finite",
    "straggler": "straggler",
    "mixture": "mixture",
    "end": "end",
}
"""Kind of an event -> its name on the page. Events of other kinds have the name of their kind."""
OTHER = "other"
METRICS_OF_TASKS = {metric for metrics in METRICS.values() for metric in metrics}
_PER_KIND = 100
"""Maximum number of events of a kind in a table."""
_SAMPLED_STEPS = 30
"""Maximum number of steps whose samples are shown."""
_LONGEST = 20_000
"""Maximum number of characters of a shown text."""


@dataclass(frozen=True)
class Event:
    step: int
    time: str
    name: str
    text: str


@dataclass(frozen=True)
class Samples:
    """Texts that the model generated at one step: (prompt, text)."""

    step: int
    texts: list[tuple[str, str]]


def clock(seconds: Any) -> str:
    """Return a time as text, in the time zone of this machine, or "" if it is none."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if math.isfinite(seconds) else ""
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def name_of(kind: str) -> str:
    return NAMES.get(kind, kind)


def text_of(event: dict[str, Any]) -> str:
    """Return what an event says, in words."""
    try:
        return _text_of(event)
    except (KeyError, TypeError, ValueError, AttributeError):
        return _other(event)


def _text_of(event: dict[str, Any]) -> str:
    kind = event["kind"]
    if kind == "checkpoint":
        background = event.get("background_s", 0.0)
        return f"blocked training for {event['blocked_s']:.3g} s, {background:.3g} s in the background"
    if kind == "eval":
        name = event.get("dataset", "")
        more = [f"{in_words(key)[0]} {event[key]:.6g}" for key in ("perplexity", "bits_per_byte") if key in event]
        return ", ".join([f"{name}: loss {event['loss']:.6g}", *more])
    if kind == "task":
        shown = [f"{key} {value:.6g}" for key, value in event.items() if key in METRICS_OF_TASKS]
        number = f", over {counted(n, 'question', ',')}" if (n := event.get("num_questions")) else ""
        return f"{event['task']}: {', '.join(shown)}{number}"
    if kind == "rollback":
        return f"training returned to the latest checkpoint; {counted(event['samples'], 'sample', ',')} skipped"
    if kind == "skipped":
        return f"{event['count']:,} updates skipped since the previous record"
    if kind == "not finite":
        last = event["last_step"]
        return "in one record" if last == event["step"] else f"in all records up to step {last:,}"
    if kind == "mixture":
        weights = " ".join(f"{name}={weight:g}" for name, weight in event["weights"].items())
        return f"{weights} from sample {event['sample']:,}"
    if kind == "end":
        return "; ".join(filter(None, (event["ending"], event.get("problem"))))
    if kind == "straggler":
        return f"rank {event['rank']}: {event['reason']}"
    return _other(event)


def _other(event: dict[str, Any]) -> str:
    shown = {k: v for k, v in event.items() if k not in ("kind", "step", "timestamp_s") and v is not None}
    values = ((*in_words(key), value) for key, value in shown.items())
    return _short(", ".join(f"{words} {value} {unit}".rstrip() for words, unit, value in values), 300)


def event_rows(events: Iterable[dict[str, Any]]) -> tuple[list[Event], int]:
    """Return the events of a run, latest first, and the number of those that are left out: of each kind only the latest are
    shown. Samples are no events."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event["kind"] != "samples":
            by_kind.setdefault(event["kind"], []).append(event)
    shown = [event for members in by_kind.values() for event in members[-_PER_KIND:]]
    shown.sort(key=lambda event: event["step"], reverse=True)
    rows = [Event(e["step"], clock(e.get("timestamp_s")), name_of(e["kind"]), text_of(e)) for e in shown]
    return rows, sum(map(len, by_kind.values())) - len(rows)


def samples_of(events: Iterable[dict[str, Any]]) -> tuple[list[Samples], int]:
    """Return the generated samples, latest first, and the number of steps that are left out."""
    found = []
    for event in events:
        if event["kind"] == "samples" and isinstance(event.get("samples"), list):
            pairs = [(s.get("prompt", ""), s.get("text", "")) for s in event["samples"] if isinstance(s, dict)]
            found.append(
                Samples(event["step"], [(_short(str(a), _LONGEST), _short(str(b), _LONGEST)) for a, b in pairs])
            )
    found.reverse()
    return found[:_SAMPLED_STEPS], max(0, len(found) - _SAMPLED_STEPS)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]} ... ({len(text) - length:,} more characters)"


@dataclass(frozen=True)
class Cell:
    """A cell of the table of runs."""

    column: str
    lines: Sequence[str]
    key: float | str | None = None
    """What the column is sorted by. None: the run has no value."""

    @property
    def sort_key(self) -> str:
        return "" if self.key is None or self.key != self.key else str(self.key)


def evaluated(runs: Sequence[Run]) -> list[str]:
    """Return the names of the curves with losses of evaluations, and of those that stand for tasks."""
    names = dict.fromkeys(name for run in runs for name in run.records.curves)
    scores = (name for name in main_scores(runs) if name.rpartition("/")[2] in METRICS_OF_TASKS)  # of known direction
    return [*(name for name in names if name.startswith("eval/") and name.endswith("/loss")), *scores]


def overview_of(run: Run, plan: Plan | str | None, losses: Sequence[str]) -> list[Cell]:
    """Return the row of a run in the table of runs, without its name.

    Args:
        run: The run.
        plan: See figures_of.
        losses: Result of `evaluated` for all runs of the page.
    """
    records, last, settings = run.records, run.records.last, run.settings
    steps, seen, tokens = run.num_steps, last.get("epochs_seen"), last.get("tokens_seen")
    step = last.get("step", 0)
    progress = f"{step:,} of {int(steps):,}" if steps.isdecimal() else f"{step:,}"
    if isinstance(seen, float):
        progress += f" ({seen:,.2f} epochs)"
    pretrained, folder, name, size = (
        settings.get(f"model.{key}", "").strip('"') for key in ("pretrained", "huggingface", "name", "size")
    )
    # Of a Hub model, `huggingface` is a folder of the cache, and `pretrained` the name that the user has given.
    model = (pretrained or folder) if folder else f"{name}/{size}".strip("/")
    loss, speed, memory = (
        records.curves.get(f"train/{key}", Curve()).values for key in ("loss", "tokens_per_second", "memory_peak_gib")
    )
    peak = max(filter(math.isfinite, memory), default=math.nan)
    memories = [f"{peak:.3g} GiB"] if math.isfinite(peak) else []
    memories += [f"{plan.peak_gib:.3g} GiB planned"] if isinstance(plan, Plan) else []
    seconds = records.last_time_s - records.first_time_s
    is_time = math.isfinite(seconds) and 0 <= seconds < 1e12
    return [
        Cell("Model", [model], model),
        Cell("Step", [progress], step),
        Cell("Training loss", [number(loss[-1])] if loss else [], loss[-1] if loss else None),
        *(_best(name, records.curves.get(name, Curve())) for name in losses),
        Cell("Tokens", [f"{tokens:,}"] if type(tokens) is int else [], tokens if type(tokens) is int else None),
        Cell(
            "Tokens/s",
            [f"{speed[-1]:,.0f}" if math.isfinite(speed[-1]) else number(speed[-1])] if speed else [],
            speed[-1] if speed else None,
        ),
        Cell("Peak memory", memories, peak),
        Cell(
            "First record, time to the last",
            [f"{clock(records.first_time_s)[:16]}, {duration(seconds)}"] if is_time else [],
            seconds if is_time else None,
        ),
    ]


def _best(name: str, curve: Curve) -> Cell:
    """Return the best loss of an evaluation, or the best score of a task, the first one of several. name: of its curve."""
    evaluated_on, _, metric = name.partition("/")[2].rpartition("/")
    sign = 1 if metric in ("loss", *FALLING) else -1
    pairs = zip(curve.values, curve.steps, strict=True)
    value, step = min(((sign * v, s) for v, s in pairs if math.isfinite(v)), default=(math.nan, 0))
    text = [f"{sign * value:.6g} at step {step:,}"] if step else []
    return Cell(f"Best {metric} on {evaluated_on}", text, sign * value)


def setting_cells(rows: Sequence[tuple[str, Sequence[str]]], index: int) -> list[Cell]:
    """Return the cells of a run for the settings in which the runs differ.

    Args:
        rows: Result of `differing`, or a part of it.
        index: Index of the run.
    """
    return [Cell(key, [values[index]], values[index].strip('"') or None) for key, values in rows]

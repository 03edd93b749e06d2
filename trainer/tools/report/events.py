"""Events and samples of a run as rows of a table."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainer.base.system.spelling import counted
from trainer.base.system.units import duration
from trainer.tools.report.figures import in_words, number

NAMES = {
    "checkpoint": "save",
    "eval": "evaluation",
    "rollback": "rollback",
    "skipped": "skipped steps",
    "not finite": "loss not finite",
    "straggler": "straggler",
}
"""Kind of an event -> its name on the page. Events of other kinds have the name of their kind."""
OTHER = "other"
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
    except (KeyError, TypeError, ValueError):
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
    if kind == "rollback":
        return f"training returned to the latest checkpoint; {counted(event['samples'], 'sample', ',')} skipped"
    if kind == "skipped":
        return f"{event['count']:,} updates skipped since the previous record"
    if kind == "not finite":
        last = event["last_step"]
        return "in one record" if last == event["step"] else f"in all records up to step {last:,}"
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
class Overview:
    """The row of a run in the first table."""

    model: str
    progress: str
    loss: str
    evaluations: list[str]
    tokens: str
    speed: str
    memory: str
    span: str


def overview_of(run: Any) -> Overview:
    records, last = run.records, run.records.last
    step = f"{last['step']:,}" if last else "0"
    steps = run.num_steps
    best: dict[str, tuple[float, int]] = {}
    for name, curve in records.curves.items():
        if name.startswith("eval/") and name.endswith("/loss"):
            values = [(v, s) for v, s in zip(curve.values, curve.steps, strict=True) if math.isfinite(v)]
            if values:
                best[name.removeprefix("eval/").removesuffix("/loss")] = min(values)
    speed = records.curves.get("train/tokens_per_second")
    memory = records.curves.get("train/memory_peak_gib")
    seconds = records.last_time_s - records.first_time_s
    pretrained, folder, name, size = (
        run.settings.get(f"model.{key}", "").strip('"') for key in ("pretrained", "huggingface", "name", "size")
    )
    # Of a Hub model, `huggingface` is a folder of the cache, and `pretrained` the name that the user has given.
    model = (pretrained or folder) if folder else f"{name}/{size}".strip("/")
    tokens, seen = last.get("tokens_seen"), last.get("epochs_seen")
    epochs = f" ({seen:,.2f} epochs)" if isinstance(seen, float) else ""
    return Overview(
        model=model,
        progress=(f"{step} of {int(steps):,}" if steps.isdecimal() else step) + epochs,
        loss=_last_of(records.curves.get("train/loss")),
        evaluations=[f"{name}: {value:.6g} at step {step:,}" for name, (value, step) in best.items()],
        tokens=f"{tokens:,}" if type(tokens) is int else "",
        speed=_last_of(speed, "{:,.0f}"),
        memory=f"{_largest(memory):.3g} GiB" if memory else "",
        span=f"{clock(records.first_time_s)[:16]}, {duration(seconds)}"
        if math.isfinite(seconds) and 0 <= seconds < 1e12
        else "",
    )


def _last_of(curve: Any, form: str = "") -> str:
    if not curve or not curve.values:
        return ""
    value = curve.values[-1]
    return form.format(value) if form and math.isfinite(value) else number(value)


def _largest(curve: Any) -> float:
    return max((value for value in curve.values if math.isfinite(value)), default=math.nan)

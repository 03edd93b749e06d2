"""The figures as models of Bokeh, which its script draws in the browser.

The models contain numbers and names that this project has chosen, never texts of a run. Colours are those of page.css: page.js
sets them, because they depend on the reader's colour scheme.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.base.config.packages import require_package
from trainer.tools.report.events import NAMES, OTHER
from trainer.tools.report.figures import Figure, Figures, Line
from trainer.tools.report.run import Run
from trainer.tools.report.thinning import thinned

TIMELINE = "figure-events"
_DASHES = ("solid", "dashed", "dotted", "dotdash")
_COLORS = 8
_MARKERS = 60
"""Maximum number of points of a line whose points have markers: without them, a single point would not be seen."""
_PALE = 0.3
"""Opacity of a line that has a line of means upon it."""
_EVENT_POINTS = 2000
"""Maximum number of events of a kind and a run in the timeline."""
_EDGE = 72
"""Width of the space to the left of every figure, in pixels, so that equal steps are below each other."""
_RIGHT_EDGE = 24
"""Width of the space to the right, in pixels, for half of the last step's label."""


@dataclass(frozen=True)
class Drawing:
    script: str
    """Bokeh's script, which works without a network."""
    document: str
    """The models as JSON."""
    roots: dict[str, str]
    """Name of a figure -> id of its model."""
    steps: tuple[int, int]
    """First and last step of all figures."""


def require_plotting() -> None:
    """Raise ConfigError if Bokeh is not installed."""
    require_package("bokeh", "")


def draw(figures: Figures, runs: Sequence[Run]) -> Drawing:
    """Build the models of all figures. The steps of all figures are those of the runs, so zooming one zooms all."""
    models = require_package("bokeh.models", "")
    document = require_package("bokeh.document", "").Document()
    steps = [step for figure in figures.all() for line in figure.lines for step in line.curve.steps[:1]]
    last = [step for figure in figures.all() for line in figure.lines for step in line.curve.steps[-1:]]
    start, end = min(steps, default=0), max(last, default=1)
    pad = max(0.01 * (end - start), 0.5)
    x_range = models.Range1d(start - pad, end + pad, name="steps", min_interval=1)
    roots = {}
    with document.models.freeze():  # otherwise each figure would visit the models of all others
        for figure in figures.all():
            plot = _plot(figure.name, x_range)
            (_stack if figure.is_stack else _lines)(plot, figure, (start, end))
            if not figure.is_stack:
                _mark(plot, runs)
            document.add_root(plot)
            roots[figure.name] = plot.id
        if plot := _timeline(runs, x_range):
            document.add_root(plot)
            roots[TIMELINE] = plot.id
    resources = require_package("bokeh.resources", "").Resources(mode="inline", components=["bokeh"])
    # "raw": without the tags around them. The other script would set the level of the log, with a line in the console.
    script = "\n".join(text for text in resources.js_raw if not text.startswith("Bokeh.set_log_level"))
    return Drawing(script, json.dumps(document.to_json(deferred=False)), roots, (start, end))


def _plot(name: str, x_range: Any, **options: Any) -> Any:
    models = require_package("bokeh.models", "")
    plot = require_package("bokeh.plotting", "").figure(
        name=name,
        x_range=x_range,
        height=options.pop("height", 230),
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        min_border_left=_EDGE,
        min_border_right=_RIGHT_EDGE,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        **options,
    )
    plot.window_axis = "x"  # after a zoom, the y axis fits the values that are seen
    zoom = models.BoxZoomTool(name=f"zoom-{name}")
    plot.add_tools(zoom, models.WheelZoomTool(modifiers="ctrl"))
    plot.toolbar.active_drag = zoom
    plot.xaxis.formatter = models.NumeralTickFormatter(format="0,0")
    plot.xaxis.ticker = models.BasicTicker(min_interval=1)  # there is no half step
    if "y_range" not in options:
        plot.yaxis.formatter = models.BasicTickFormatter(power_limit_low=-4)
    return plot


def _source(line: Line, name: str, **columns: Any) -> Any:
    data = {"x": line.steps.astype(np.float64), "y": line.values, **columns}
    return require_package("bokeh.models", "").ColumnDataSource(data, name=name)


def _lines(plot: Any, figure: Figure, steps: tuple[int, int]) -> None:
    """Draw a line for each run, and a horizontal one for its planned value."""
    plot.y_range.only_visible = True
    for i, line in enumerate(figure.lines):
        source, tags = _source(line, f"source-{figure.name}-{i}"), [f"run-{line.color % _COLORS}", f"of-{line.color}"]
        style = {"line_width": 1.5, "line_dash": _DASHES[line.color // _COLORS], "tags": tags}
        if line.means is None:
            plot.line("x", "y", source=source, **style)
        else:
            plot.line("x", "y", source=source, line_width=1, line_alpha=_PALE, tags=tags)
            plot.line(np.asarray(line.means.steps, np.float64), np.asarray(line.means.values), **style)
        if len(line.indices) <= _MARKERS:
            plot.scatter("x", "y", source=source, size=5, tags=tags)
        if line.planned is not None:
            plot.line(list(steps), [line.planned] * 2, line_dash=[2, 3], line_width=2, tags=tags)


def _stack(plot: Any, figure: Figure, steps: tuple[int, int]) -> None:
    """Draw the parts of a sum upon each other."""
    bottom = np.zeros(len(figure.lines[0].indices))
    for i, line in enumerate(figure.lines):
        top = bottom + np.nan_to_num(line.values)
        source = _source(line, f"source-{figure.name}-{i}", bottom=bottom, top=top)
        plot.varea("x", "bottom", "top", source=source, tags=[f"phase-{line.color}"])
        bottom = top
    plot.y_range.start = 0


def _timeline(runs: Sequence[Run], x_range: Any) -> Any:
    """Draw a row for each kind of event, with the events of each run above each other, or return None if there are none."""
    rows = {name: i for i, name in enumerate([*dict.fromkeys(NAMES.values()), OTHER])}
    found: dict[tuple[str, int], list[int]] = {}
    for i, run in enumerate(runs):
        for event in run.records.events:
            if event["kind"] != "samples":
                found.setdefault((NAMES.get(event["kind"], OTHER), i), []).append(event["step"])
    if not found:
        return None
    used = [name for name in reversed(rows) if any(name == kind for kind, _ in found)]
    plot = _plot(TIMELINE, x_range, y_range=used, height=60 + 26 * len(used))
    for (name, i), steps in found.items():
        offset = 0.0 if len(runs) == 1 else 0.6 * (0.5 - (i + 0.5) / len(runs))
        shown = np.asarray(steps, dtype=np.float64)[thinned(steps, _EVENT_POINTS)]
        y = [(name, offset)] * len(shown)
        plot.scatter(shown, y, size=7, tags=[f"run-{i % _COLORS}", f"of-{i}"])
    _mark(plot, runs)
    return plot


def _mark(plot: Any, runs: Sequence[Run]) -> None:
    """Draw a vertical line at the marked checkpoint of each run."""
    for i, run in enumerate(runs):
        if run.marked:
            tags = [f"run-{i % _COLORS}", f"of-{i}"]
            span = require_package("bokeh.models", "").Span(location=run.marked, dimension="height", tags=tags)
            plot.add_layout(span)

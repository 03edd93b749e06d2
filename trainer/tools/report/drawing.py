"""The figures as models of Bokeh, which its script draws in the browser, and the numbers of their lines.

The models contain names that this project has chosen, never texts of a run. page.js fills them with the numbers that are visible,
and sets their colours, which are those of page.css.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer.base.config.packages import require_package
from trainer.tools.report.events import NAMES, OTHER
from trainer.tools.report.figures import AXES, BANDS, MARKERS, MEANS, NOISY, Figure, Figures
from trainer.tools.report.records import Curve
from trainer.tools.report.run import Run
from trainer.tools.report.thinning import spread, thinned

TIMELINE = "figure-events"
_DASHES = ("solid", "dashed", "dotted", "dotdash")
_COLORS = 8
_PALE = 0.3
"""Opacity of what lies below a line of means."""
_EVENT_POINTS = 2000
"""Maximum number of events of a kind and a run in the timeline."""
_AXIS_POINTS = 1000
"""Maximum number of records of a run between which tokens and hours are interpolated."""
_EDGE = 72
"""Width of the space to the left of every figure, in pixels, so that equal steps are below each other."""
_RIGHT_EDGE = 24
"""Width of the space to the right, in pixels, for half of the last step's label."""


@dataclass
class Drawing:
    document: dict[str, Any] = field(default_factory=dict)
    """The models."""
    roots: dict[str, str] = field(default_factory=dict)
    """Name of a figure -> id of its model."""
    series: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Name of a figure -> its lines: the run, and indices of `arrays`."""
    axes: list[dict[str, dict[str, int]]] = field(default_factory=list)
    """Of each run: name of another axis than steps -> steps, and its values at them, as indices of `arrays`."""
    arrays: dict[str, int] = field(default_factory=dict)
    """64-bit floats in base64 -> index. Equal arrays are one: most metrics have values at the same steps."""

    def array(self, values: Any) -> int:
        """Return the index of an array."""
        text = base64.b64encode(np.asarray(values, dtype="<f8").tobytes()).decode()
        return self.arrays.setdefault(text, len(self.arrays))

    def facts(self) -> dict[str, Any]:
        """Return what page.js needs to know."""
        limits = {"noisy": NOISY, "means": MEANS, "bands": BANDS, "markers": MARKERS, "timeline": TIMELINE}
        numbers = {"series": self.series, "axes": self.axes, "arrays": list(self.arrays)}
        return limits | numbers | {"axis_labels": AXES, "roots": self.roots, "document": self.document}


def require_plotting() -> None:
    """Raise ConfigError if Bokeh is not installed."""
    require_package("bokeh", "")


def bokeh_script() -> str:
    """Return Bokeh's script, which works without a network."""
    resources = require_package("bokeh.resources", "").Resources(mode="inline", components=["bokeh"])
    # "raw": without the tags around them. The other script would set the level of the log, with a line in the console.
    return "\n".join(text for text in resources.js_raw if not text.startswith("Bokeh.set_log_level"))


def draw(figures: Figures, runs: Sequence[Run]) -> Drawing:
    """Build the models of all figures. They have one range of steps, so zooming one zooms all."""
    models = require_package("bokeh.models", "")
    document = require_package("bokeh.document", "").Document()
    drawing = Drawing()
    drawing.axes = [{name: _axis(drawing, curve) for name, curve in run.records.axes.items()} for run in runs]
    x_range = models.Range1d(0, 1, name="x")
    with document.models.freeze():  # otherwise each figure would visit the models of all others
        for figure in figures.all():
            plot = _plot(figure.name, x_range)
            drawing.series[figure.name] = (_stack if figure.is_stack else _lines)(plot, figure, drawing)
            if not figure.is_stack:
                _mark(plot, runs)
            document.add_root(plot)
            drawing.roots[figure.name] = plot.id
        if plot := _timeline(runs, x_range, drawing):
            document.add_root(plot)
            drawing.roots[TIMELINE] = plot.id
    drawing.document = document.to_json(deferred=False)
    return drawing


def _axis(drawing: Drawing, curve: Curve) -> dict[str, int]:
    """Return some of the steps of a run, and tokens or hours at them. Between them, the page interpolates."""
    chosen = spread(len(curve.steps), _AXIS_POINTS)
    return {
        name: drawing.array(np.asarray(values)[chosen])
        for name, values in (("steps", curve.steps), ("values", curve.values))
    }


def _plot(name: str, x_range: Any, **options: Any) -> Any:
    models = require_package("bokeh.models", "")
    plot = require_package("bokeh.plotting", "").figure(
        name=name,
        x_range=x_range,
        y_range=options.pop("y_range", None) or models.Range1d(0, 1),
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
    zoom = models.BoxZoomTool(name=f"zoom-{name}", dimensions="width")  # the y axis fits the values that are seen
    plot.add_tools(zoom, models.WheelZoomTool(dimensions="width", modifiers="ctrl"))
    plot.toolbar.active_drag = zoom
    plot.xaxis.formatter = models.NumeralTickFormatter()
    plot.xaxis.ticker = models.BasicTicker()
    if isinstance(plot.y_range, models.Range1d):
        plot.yaxis.formatter = models.BasicTickFormatter(power_limit_low=-4)
    return plot


def _lines(plot: Any, figure: Figure, drawing: Drawing) -> list[dict[str, Any]]:
    """Draw a line for each run, and a horizontal one for its level."""
    series = []
    for i, line in enumerate(figure.lines):
        tags, dash = [f"run-{line.color % _COLORS}", f"of-{i}"], _DASHES[line.color // _COLORS]
        plot.varea([], [], [], fill_alpha=_PALE, tags=[*tags, "band"])
        plot.line([], [], line_width=1, line_alpha=_PALE, tags=[*tags, "pale"])
        plot.line([], [], line_width=1.5, line_dash=dash, tags=[*tags, "line"])
        plot.scatter([], [], size=5, tags=[*tags, "points"])
        if line.level is not None:
            plot.line([0, 1], [line.level] * 2, line_dash=[2, 3], line_width=2, tags=[*tags, "level"])
        numbers = {"run": line.color, "steps": drawing.array(line.steps), "y": drawing.array(line.values)}
        if line.means is not None:
            means = line.means
            numbers |= {"mean_steps": drawing.array(means.steps), "means": drawing.array(means.values)}
        series.append(numbers)
    return series


def _stack(plot: Any, figure: Figure, drawing: Drawing) -> list[dict[str, Any]]:
    """Draw the parts of a sum upon each other."""
    series = []
    for i, line in enumerate(figure.lines):
        plot.varea([], [], [], tags=[f"phase-{line.color}", f"of-{i}", "part"])
        series.append({"run": figure.run, "steps": drawing.array(line.steps), "y": drawing.array(line.values)})
    return series


def _timeline(runs: Sequence[Run], x_range: Any, drawing: Drawing) -> Any:
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
    factors = require_package("bokeh.models", "").FactorRange(*used)
    plot = _plot(TIMELINE, x_range, y_range=factors, height=60 + 26 * len(used))
    series = drawing.series[TIMELINE] = []
    for k, ((name, i), steps) in enumerate(found.items()):
        offset = 0.0 if len(runs) == 1 else 0.6 * (0.5 - (i + 0.5) / len(runs))
        shown = np.asarray(steps)[thinned(steps, _EVENT_POINTS)]
        plot.scatter([], [], size=7, tags=[f"run-{i % _COLORS}", f"of-{k}", "points", name])
        series.append({"run": i, "steps": drawing.array(shown), "y": drawing.array(np.full(len(shown), offset))})
    _mark(plot, runs)
    return plot


def _mark(plot: Any, runs: Sequence[Run]) -> None:
    """Draw a vertical line at the marked checkpoint of each run."""
    for i, run in enumerate(runs):
        if run.marked:
            tags = [f"run-{i % _COLORS}", f"of-{i}", run.marked]
            span = require_package("bokeh.models", "").Span(location=run.marked, dimension="height", tags=tags)
            plot.add_layout(span)

"""Picture of the planned memory over a step."""

from typing import Any

from trainer.base.system.units import GIB
from trainer.tools.planner.peak import place
from trainer.tools.planner.recorded import MEMORY_CATEGORIES
from trainer.tools.planner.simulate import Simulation

COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb")
"""Colors of MEMORY_CATEGORIES, distinguishable by color-blind readers (Tol, "Colour schemes")."""
_BROKEN_AXIS = 3
"""Ratio of the device memory to the peak from which the vertical axis is broken."""


def draw_memory(figure: Any, simulation: Simulation, title: str, limit_gib: float) -> None:
    """Draw memory by category over the operators of the step, and a line at the device memory. If the peak is far below it, the
    vertical axis is broken between the two.

    Args:
        figure: Of a picture.
        simulation: Whose memory is drawn.
        title: Of the figure.
        limit_gib: Device memory.
    """
    peak = simulation.peak / GIB
    axes = limit_axes = None
    if limit_gib < _BROKEN_AXIS * peak:
        axes = limit_axes = figure.add_subplot()
        axes.set_ylim(0, 1.1 * max(peak, limit_gib))
    else:
        limit_axes, axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 8))
        axes.set_ylim(0, 1.1 * peak)
        limit_axes.set(ylim=(0.9 * limit_gib, 1.1 * limit_gib), yticks=[limit_gib], yticklabels=[f"{limit_gib:.4g}"])
        limit_axes.spines.bottom.set_visible(False)
        axes.spines.top.set_visible(False)
        marks = {"marker": [(-1, -0.5), (1, 0.5)], "markersize": 8, "color": "black", "clip_on": False, "linestyle": ""}
        limit_axes.plot([0, 1], [0, 0], transform=limit_axes.transAxes, **marks)
        axes.plot([0, 1], [1, 1], transform=axes.transAxes, **marks)
    points = range(len(simulation.timeline_in_backward))
    rows = [[num_bytes / GIB for num_bytes in simulation.timeline[category]] for category in MEMORY_CATEGORIES]
    axes.stackplot(points, *rows, labels=MEMORY_CATEGORIES, colors=COLORS, step="post", linewidth=0)
    full_height = {"transform": axes.get_xaxis_transform(), "color": "black", "alpha": 0.06, "linewidth": 0}
    axes.fill_between(points, 0, 1, where=simulation.timeline_in_backward, step="post", **full_height)
    limit_axes.axhline(limit_gib, color="black", linestyle="--", linewidth=1)
    text = f"device memory: {limit_gib:.1f} GiB"
    limit_axes.annotate(text, (0, limit_gib), xytext=(2, 2), textcoords="offset points", fontsize=8)
    axes.set(xlim=(0, len(points)), xticks=[], xlabel="operators of a step (grey: backward)", ylabel="GiB")
    limit_axes.set_title(f"{title}\nplanned peak: {peak:.2f} GiB in {place(simulation.peak_at)}")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)

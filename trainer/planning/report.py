"""A picture of a rank's memory over a step, as plan.py --picture draws it."""

from itertools import groupby
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.config.packages import require_package
from trainer.planning.recorder import KINDS
from trainer.planning.simulate import Simulation
from trainer.system.units import GIB

FORMATS = (".png", ".svg", ".pdf")
COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb")
"""Of KINDS; told apart by those who do not see all colors (Tol, "Colour schemes")."""


def canvas(path: Path) -> Any:
    """An empty figure. Raises ConfigError where none can be written there."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError("", f"--picture {path}: expected a name that ends in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ConfigError("", f"--picture {path}: there is no folder {path.parent}")
    try:
        path.touch()
    except OSError as error:
        raise ConfigError("", f"--picture {path}: cannot be written ({error.strerror})") from None
    try:
        return require_package("matplotlib.figure", "").Figure(figsize=(10, 5), layout="constrained")
    except ConfigError as error:
        raise ConfigError("", f"--picture {path}: {error.message}") from None


def draw(figure: Any, path: Path, simulation: Simulation, title: str, limit_gib: float) -> None:
    """Memory by kind over the operators of the step. limit_gib: of the device; shown where it is near."""
    axes = figure.add_subplot()
    steps = range(len(simulation.course_in_backward))
    sizes = [[size / GIB for size in simulation.course[kind]] for kind in KINDS]
    axes.stackplot(steps, *sizes, labels=KINDS, colors=COLORS, step="post", linewidth=0)
    start = 0
    for in_backward, run in groupby(simulation.course_in_backward):
        stop = start + len(list(run))
        if in_backward:
            axes.axvspan(start, stop, color="black", alpha=0.06, linewidth=0)
        start = stop
    peak = simulation.peak / GIB
    if limit_gib < 1.5 * peak:
        axes.axhline(limit_gib, color="black", linestyle="--", linewidth=1)
        axes.annotate("the device's memory", (0, limit_gib), xytext=(2, 2), textcoords="offset points", fontsize=8)
    axes.set(xlim=(0, len(steps)), ylim=(0, 1.1 * max(peak, limit_gib if limit_gib < 1.5 * peak else 0)), xticks=[])
    axes.set(
        xlabel="operators of a step; grey: backward",
        ylabel="GiB",
        title=f"{title}\npeak {peak:.2f} GiB, {simulation.at}",
    )
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=150)

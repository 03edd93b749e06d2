"""Pages of HTML, each of which is one file that needs no network and no server, and the page about runs."""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from trainer.base.system.streams import visible
from trainer.tools.report.drawing import TIMELINE, bokeh_script, draw
from trainer.tools.report.events import (
    Cell,
    Event,
    Samples,
    evaluated,
    event_rows,
    overview_of,
    samples_of,
    setting_cells,
)
from trainer.tools.report.figures import AXES, MEANS, NOISY, PHASE_POINTS, figures_of
from trainer.tools.report.plan import Plan
from trainer.tools.report.run import Run, differing

GENERATOR = '<meta name="generator" content="meshwright report">'
"""Tag by which a page of this script is recognized."""
_FOLDER = Path(__file__).parent
_SCRIPTS = ("stored", "curves", "pictures", "plots", "tables", "watch", "page")
"""Names of the page's scripts, in their order."""
_SETTING_COLUMNS = 8
"""Maximum number of settings in which runs differ that are columns of the table of runs. Others are a table of their own."""
_FACTS = {
    "git_clean": "clean git tree",
    "cpu": "CPU",
    "cpu_count": "CPU cores",
    "world_size": "ranks",
    "python": "Python",
}
"""Key of environment.json -> its name on the page, where it is not the words of the key."""


@dataclass(frozen=True)
class View:
    """What the page shows of one run, beside its curves."""

    run: Run
    plan: Plan | str | None
    overview: list[Cell]
    """Its row in the table of runs."""
    events: list[Event]
    events_left: int
    samples: list[Samples]
    samples_left: int
    changed: list[tuple[str, tuple[str, str]]]
    """Setting -> its value and its default, where they differ."""


@dataclass(frozen=True)
class Watch:
    """What a served page needs to notice changes."""

    version: str
    interval_s: float


def view_of(run: Run, plan: Plan | str | None, losses: Sequence[str], settings: Sequence[Cell]) -> View:
    """Return what the page shows of a run.

    Args:
        run: The run.
        plan: See figures_of.
        losses: See overview_of.
        settings: Cells of the settings in which the runs differ.
    """
    events = run.records.events
    changed = [(key, (value, default)) for key, default, value in run.changed_settings()]
    cells, place = overview_of(run, plan, losses), 3 + len(losses)
    cells[place:place] = settings
    return View(run, plan, cells, *event_rows(events), *samples_of(events), changed)


def build_page(template: str, title: str, scripts: Sequence[str] = (), **values: Any) -> str:
    """Return a page, on which every value that is not Markup is text only, whatever it contains.

    Args:
        template: Name of a file of this folder, which fills the blocks of page.html.jinja.
        title: Title of the page.
        scripts: All scripts that a browser may run.
        values: Variables of the template.
    """
    templates = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined, finalize=_visible
    )
    css = Markup((_FOLDER / "page.css").read_text())
    policy, marked = _policy(scripts), [Markup(script) for script in scripts]
    page = templates.get_template(template)
    return page.render(title=title, policy=policy, css=css, scripts=marked, **values)


def _visible(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def render(runs: Sequence[Run], plans: Sequence[Plan | str | None], watch: Watch | None = None) -> str:
    """Return the page about runs. Raises ConfigError if Bokeh is not installed.

    Args:
        runs: Runs, in the order in which the page shows them.
        plans: See figures_of.
        watch: For a page that is served. None: a file.
    """
    figures = figures_of(runs, plans)
    drawing = draw(figures, runs)
    differences, losses = differing(runs) if len(runs) > 1 else [], evaluated(runs)
    columns, rest = differences[:_SETTING_COLUMNS], differences[_SETTING_COLUMNS:]
    views = [view_of(run, plans[i], losses, setting_cells(columns, i)) for i, run in enumerate(runs)]
    watched = {"version": watch.version, "interval_s": watch.interval_s} if watch else None
    facts = drawing.facts() | {"watch": watched, "key": _digest(runs)}
    more = f" and {len(runs) - 3} more" if len(runs) > 3 else ""
    return build_page(
        "runs.html.jinja",
        f"Report of {', '.join(run.label for run in runs[:3])}{more}",
        [bokeh_script(), *((_FOLDER / f"{name}.js").read_text() for name in _SCRIPTS)],
        generator=Markup(GENERATOR),
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        watch=watch,
        views=views,
        figures=figures,
        phase_points=PHASE_POINTS,
        means=MEANS,
        noisy=NOISY,
        timeline=TIMELINE if TIMELINE in drawing.roots else "",
        has_samples=any(view.samples for view in views),
        differs=bool(differences),
        other_differences=rest,
        axes=[name for name in AXES if name == "steps" or any(run.records.axes[name].steps for run in runs)],
        environment=_environment(runs),
        packages=_packages(runs),
        data=Markup(json.dumps(facts).replace("<", "\\u003c")),  # nothing in the JSON can end the element
    )


def _digest(runs: Sequence[Run]) -> str:
    """Return a text that differs for other runs."""
    return hashlib.sha256("\0".join(str(run.folder.resolve()) for run in runs).encode()).hexdigest()[:16]


def _policy(scripts: Sequence[str]) -> str:
    """Return a policy with which a browser runs only these scripts, and connects only to the server of a watched page."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'"
    )


def _environment(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return (fact in words, its value in each run), without the packages and the command."""
    keys = dict.fromkeys(key for run in runs for key in run.environment if key not in ("packages", "command"))
    return [(_FACTS.get(key, key.replace("_", " ")), [_text(run.environment.get(key)) for run in runs]) for key in keys]


def _packages(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return (package, its version in each run)."""
    found = [run.environment.get("packages") for run in runs]
    versions = [packages if isinstance(packages, dict) else {} for packages in found]
    keys = sorted({key for packages in versions for key in packages}, key=str.lower)
    return [(key, [_text(packages.get(key)) for packages in versions]) for key in keys]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)

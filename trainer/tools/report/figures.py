"""What the page draws: one figure per metric, with a line for each run, and the phases of each run's step."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np

from trainer.tools.report.plan import Plan
from trainer.tools.report.records import Curve
from trainer.tools.report.run import Run
from trainer.tools.report.thinning import group_means, points_per_curve, spread, thinned

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Losses": {
        "train/loss": ("Training loss", "nats"),
        "eval/*/loss": ("Loss on {}", "nats"),
        "eval/*/perplexity": ("Perplexity on {}", ""),
        "eval/*/bits_per_byte": ("Bits per byte on {}", "bits"),
    },
    "Tasks": {
        "task/*/acc": ("Accuracy on {}", ""),
        "task/*/acc_norm": ("Accuracy on {}, by log-probability per character", ""),
        "task/*/acc_bytes": ("Accuracy on {}, by log-probability per byte", ""),
        "task/*/acc_mutual_info": ("Accuracy on {}, by mutual information", ""),
        "task/*/right_probability": ("Probability of the right choice on {}", ""),
        "task/*/exact_match": ("Exact matches on {}", ""),
        "task/*/bits_per_byte": ("Bits per byte of right answers on {}", "bits"),
    },
    "Optimization": {
        "train/prediction_loss": ("Loss of the layers for multi-token prediction", "nats"),
        "train/z_loss": ("Z-loss of the output's logits", ""),
        "train/grad_norm": ("Gradient norm before clipping", ""),
        "train/learning_rate": ("Learning rate", ""),
        "train/reward_chosen": ("Reward of chosen answers", ""),
        "train/reward_rejected": ("Reward of rejected answers", ""),
        "train/reward_margin": ("Difference of the rewards of a pair", ""),
        "train/reward_accuracy": ("Share of pairs with a positive difference", ""),
        "train/skipped_steps": ("Skipped steps since the start", "steps"),
    },
    "Experts": {
        "train/expert_load_violation": ("Load of the busiest expert above the mean, mean of the layers", ""),
        "train/expert_load_violation_max": ("Load of the busiest expert above the mean, worst layer", ""),
        "train/expert_load_entropy": ("Entropy of the load, 1 if even", ""),
        "train/idle_experts": ("Share of experts without a token", ""),
        "train/balance_loss": ("Balance loss, 1 if even", ""),
        "train/router_z_loss": ("Z-loss of the routers", ""),
    },
    "Speed": {
        "train/tokens_per_second": ("Tokens per second, all ranks", "tokens/s"),
        "train/mfu_percent": ("Model FLOPs utilization (MFU)", "%"),
        "train/step_time_s": ("Duration of a step", "s"),
    },
    "Memory": {
        "train/memory_peak_gib": ("Peak memory of a rank", "GiB"),
        "train/memory_end_gib": ("Memory at the end of a step", "GiB"),
        "train/memory_reserved_gib": ("Memory that the allocator holds", "GiB"),
    },
    "Other values": {
        "eval/*/reward_chosen": ("Reward of chosen answers, {}", ""),
        "eval/*/reward_rejected": ("Reward of rejected answers, {}", ""),
        "eval/*/reward_margin": ("Difference of the rewards of a pair, {}", ""),
        "eval/*/reward_accuracy": ("Share of pairs with a positive difference, {}", ""),
        "eval/*/unigram_entropy": ("Unigram entropy of {}", "nats"),
        "eval/*/num_targets": ("Targets in {}", "tokens"),
        "eval/*/num_pairs": ("Pairs in {}", "pairs"),
        "eval/*/evaluation_time_s": ("Time of an evaluation on {}", "s"),
        "task/*/num_questions": ("Questions of {}", "questions"),
        "task/*/num_tokens": ("Tokens of {}", "tokens"),
        "task/*/tasks_time_s": ("Time of the task {}", "s"),
        "train/num_targets": ("Targets of a step", "tokens"),
        "train/num_pairs": ("Pairs of a step", "pairs"),
        "train/evaluation_time_s": ("Time of evaluations since the last record", "s"),
        "train/tasks_time_s": ("Time of tasks since the last record", "s"),
        "train/samples_time_s": ("Time of samples since the last record", "s"),
        "train/checkpoint_time_s": ("Time of saves since the last record", "s"),
    },
}
"""Group -> pattern of a curve's name -> (title, unit). {} is the name of the dataset or of the task. The title of any other curve
is its key in words."""
UNITS = {"_s": "s", "_gib": "GiB", "_percent": "%"}
"""End of a key -> unit."""
PHASES = ("data", "forward", "backward", "pipeline", "reduction", "clip", "optimizer", "metrics", "other")
"""Phases of a step, from bottom to top. Their sum is step_time_s."""
_DERIVED = ("train/tokens_per_second_per_rank", "train/tflops_per_second_per_rank")
"""Values that differ from another curve only by a factor."""
PHASE_POINTS = 400
"""Maximum number of points of a figure of phases."""
MEANS = 150
"""Number of the groups whose means are drawn."""
NOISY = 3 * MEANS
"""Number of visible records above which means are drawn."""
BANDS = 400
"""Number of the groups whose smallest and largest values are drawn as a band."""
MARKERS = 60
"""Maximum number of visible records that have markers: without them, a single point would not be seen."""
AXES = {"steps": "steps", "tokens": "tokens", "hours": "hours of steps"}
"""What the horizontal axis can show -> its label."""
_TABLE_ROWS = 20


@dataclass
class Line:
    """The values of one run in a figure, or of one phase."""

    label: str
    color: int
    """Index of the run or of the phase, which determines colour and dashes."""
    curve: Curve
    indices: np.ndarray
    """Indices of the drawn points."""
    means: Curve | None = None
    """Means of groups of neighbouring records, if not all records are drawn."""
    level: float | None = None
    """Value that is drawn as a horizontal line."""
    level_name: str = "planned"

    @property
    def steps(self) -> np.ndarray:
        return np.asarray(self.curve.steps)[self.indices]

    @property
    def values(self) -> np.ndarray:
        return np.asarray(self.curve.values)[self.indices]

    def summary(self) -> list[str]:
        """Return the cells of the line's row in the figure's table: records, first, last, smallest, largest, not finite."""
        values, steps = np.asarray(self.curve.values), self.curve.steps
        finite = np.flatnonzero(np.isfinite(values))
        if not len(finite):
            return [str(len(values)), "", "", "", "", str(len(values))]
        least, most = finite[values[finite].argmin()], finite[values[finite].argmax()]
        extremes = [f"{number(values[i])} (step {steps[i]:,})" for i in (least, most)]
        ends = [number(values[i]) for i in (finite[0], finite[-1])]
        return [f"{len(values):,}", *ends, *extremes, f"{len(values) - len(finite):,}"]

    def last(self) -> str:
        """Return the last finite value."""
        return next((number(value) for value in reversed(self.curve.values) if math.isfinite(value)), "none")


@dataclass
class Figure:
    name: str
    """Identifier in the page."""
    title: str
    unit: str
    lines: list[Line]
    is_stack: bool = False
    """Whether the lines are the parts of a sum."""
    group: str = ""
    run: int = 0
    """Index of the run whose phases a stack has."""

    @property
    def is_thinned(self) -> bool:
        return any(len(line.indices) < len(line.curve.steps) for line in self.lines)

    def summaries(self) -> list[tuple[str, list[str]]]:
        return [(line.label, line.summary()) for line in self.lines]

    def rows(self) -> list[tuple[str, list[str]]]:
        """Return (step, value of each line) for steps that are spread evenly over the records."""
        steps = sorted({step for line in self.lines for step in line.curve.steps})
        chosen = [steps[i] for i in spread(len(steps), _TABLE_ROWS)]
        values = [dict(zip(line.curve.steps, line.curve.values, strict=True)) for line in self.lines]
        return [(f"{step:,}", [number(of[step]) if step in of else "" for of in values]) for step in chosen]


@dataclass
class Figures:
    by_group: dict[str, list[Figure]] = field(default_factory=dict)
    constants: list[tuple[str, str]] = field(default_factory=list)
    """Title, and value with its unit, of the metrics that have one value in all records of all runs. They are not drawn."""
    phases: list[Figure] = field(default_factory=list)
    phase_table: list[tuple[str, list[str]]] = field(default_factory=list)
    """(phase, mean seconds and share of each run)"""

    def all(self) -> Iterator[Figure]:
        for figures in self.by_group.values():
            yield from figures
        yield from self.phases


def number(value: float) -> str:
    """Return a value for a table. "not finite" stands for null, NaN and infinity."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:.6g}"


def figures_of(runs: Sequence[Run], plans: Sequence[Plan | str | None]) -> Figures:
    """Return the figures of a page.

    Args:
        runs: Runs, in the order of their colours.
        plans: Planned memory of each run, or the reason why there is none. None: not planned.
    """
    figures = Figures(by_group={group: [] for group in GROUPS})
    names = sorted({name for run in runs for name in run.records.curves})
    phases = {f"train/{phase}_time_s" for phase in PHASES}
    drawn = [name for name in names if name not in phases and name not in _DERIVED and not name.endswith("/chance")]
    main = main_scores(runs)
    limit = points_per_curve(len(drawn) * len(runs))
    for name in drawn:
        curves = [(i, run.records.curves[name]) for i, run in enumerate(runs) if name in run.records.curves]
        group, order, title, unit = _describe(name)
        if group == "Tasks" and name not in main:
            group = "Other values"
        if (value := _constant(curve for _, curve in curves)) is not None and group not in (
            "Losses",
            "Memory",
            "Tasks",
        ):
            figures.constants.append((title, f"{number(value)} {unit}".strip()))
            continue
        lines = [_line(runs[i].label, i, curve, limit) for i, curve in curves]
        if name == "train/memory_peak_gib":
            for line in lines:
                plan = plans[line.color]
                # A CPU's measured memory contains more than tensors, so it is not compared.
                line.level = plan.peak_gib if isinstance(plan, Plan) and plan.is_gpu else None
        for line in lines if name in main and not name.endswith("/bits_per_byte") else ():
            chance = runs[line.color].records.curves.get(f"{name.rpartition('/')[0]}/chance")
            line.level, line.level_name = chance.values[-1] if chance else None, "chance"
        figures.by_group[group].append(Figure(f"{order:03}", title, unit, lines, group=group))
    for members in figures.by_group.values():
        members.sort(key=lambda figure: (figure.name, figure.title))
    figures.phases = [figure for i, run in enumerate(runs) if (figure := _phase_figure(run, i, several=len(runs) > 1))]
    figures.phase_table = phase_table(runs)
    for index, figure in enumerate(figures.all()):
        figure.name = f"figure-{index}"
    return figures


def main_scores(runs: Sequence[Run]) -> list[str]:
    """Return the names of the curves that stand for tasks: of each task, the first one in the records."""
    first: dict[str, str] = {}
    for name in (name for run in runs for name in run.records.curves if name.startswith("task/")):
        first.setdefault(name.rpartition("/")[0], name)
    return list(first.values())


def _describe(name: str) -> tuple[str, int, str, str]:
    """Return group, position in it, title and unit of a curve."""
    for group, patterns in GROUPS.items():
        for position, (pattern, (title, unit)) in enumerate(patterns.items()):
            if fnmatchcase(name, pattern):
                prefix, _, suffix = pattern.partition("*")
                return group, position, title.format(name[len(prefix) :].removesuffix(suffix)), unit
    dataset, _, key = name.partition("/")[2].rpartition("/")
    words, unit = in_words(key)
    title = words[:1].upper() + words[1:] + (f" on {dataset}" if dataset else "")
    return "Other values", len(GROUPS["Other values"]), title, unit


def in_words(key: str) -> tuple[str, str]:
    """Return the key of a record in words, and its unit: "router_load_s" gives ("router load", "s")."""
    end, unit = next(((end, unit) for end, unit in UNITS.items() if key.endswith(end)), ("", ""))
    return key.removesuffix(end).replace("_", " "), unit


def _constant(curves: Iterable[Curve]) -> float | None:
    """Return the value of all records, or None if they differ."""
    values = {value for curve in curves for value in {*curve.values[:1], *curve.values}}
    return values.pop() if len(values) == 1 and all(map(math.isfinite, values)) else None


def _line(label: str, color: int, curve: Curve, limit: int) -> Line:
    """Return a line with at most `limit` points. The mean of a group of records cannot be computed from its extremes, so a
    line with fewer points than records has means too."""
    is_thinned = len(curve.values) > limit  # then the steps of its points are those of no other line
    line = Line(label, color, curve, thinned(curve.values, limit // 2 if is_thinned else limit))
    if is_thinned:
        last, means = group_means(np.asarray(curve.values)[:, None], limit // 4)
        line.means = Curve()
        for row, value in zip(last, means[:, 0], strict=True):
            line.means.append(curve.steps[row], value)
    return line


def _phase_seconds(run: Run) -> dict[str, np.ndarray]:
    """Return phase -> its seconds in each training record, which are 0 in a record that does not name the phase."""
    steps, seconds = np.asarray(run.records.train_steps), {}
    for phase in PHASES:
        if curve := run.records.curves.get(f"train/{phase}_time_s"):
            seconds[phase] = np.zeros(len(steps))
            seconds[phase][np.searchsorted(steps, curve.steps)] = curve.values
    return seconds


def _phase_figure(run: Run, index: int, several: bool) -> Figure | None:
    seconds = _phase_seconds(run)
    if not seconds:
        return None
    last, means = group_means(np.stack(list(seconds.values()), axis=1), PHASE_POINTS)
    lines = []
    for i, phase in enumerate(seconds):
        mean = Curve()
        for row, value in zip(last, means[:, i], strict=True):
            mean.append(run.records.train_steps[row], value)
        lines.append(Line(phase, PHASES.index(phase), mean, np.arange(len(last))))
    return Figure("", f"Phases of a step{f' of {run.label}' if several else ''}", "s", lines, is_stack=True, run=index)


def phase_table(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return (phase, cells), with the mean seconds per record and the share of the step in each run."""
    rows: dict[str, list[str]] = {}
    of_runs = []
    for run in runs:
        means = {phase: float(np.nan_to_num(seconds).mean()) for phase, seconds in _phase_seconds(run).items()}
        of_runs.append((means, sum(means.values())))
    for phase in PHASES:
        if any(phase in means for means, _ in of_runs):
            rows[phase] = [
                f"{means[phase]:.4g} s ({100 * means[phase] / total:.1f} %)" if phase in means and total else ""
                for means, total in of_runs
            ]
    return list(rows.items())

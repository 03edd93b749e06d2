"""Train a configuration with each combination of some values, and compare the losses.

    python scripts/dev/sweep.py --config train_configs/debug.toml --vary optimizer.name=adamw,muon --vary optimizer.lr=3e-3,6e-3
    python scripts/dev/sweep.py --config train_configs/debug.toml --vary optimizer.name=adamw,muon --plot losses.png

Runs follow one another, each in the run folder NAME-VALUE-VALUE. A run that is complete is not repeated; one that was
interrupted continues. The picture shows the best run of each value of the first --vary.
"""

import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.base.system.run_files import METRICS_FILE
from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config import ConfigError, compatibility
from trainer.base.config.argument_types import file_to_write
from trainer.base.config.arguments import Arguments
from trainer.base.config.command_line import config_from_command_line
from trainer.base.config.exits import run_to_end
from trainer.base.config.render import require_same_settings
from trainer.base.config.schema.condition import Known
from trainer.base.config.schema.facts import SWEPT
from trainer.base.system.process import die_with_parent
from trainer.tools.report.picture import Picture
from trainer.tools.report.records import Curve, read_records
from trainer.tools.testing.layouts import Table, flags, settings_of


@dataclass(frozen=True)
class Result:
    values: tuple[str, ...]
    loss: Curve
    """Training loss."""
    held_out: float
    """Loss of the last evaluation of the first dataset. NaN: none."""
    step_s: float
    """Duration of a step: median of the records."""
    update_s: float
    """Duration of the optimizer's part of a step, likewise."""
    diverged: bool = False
    """Whether the run has ended early, with losses that are not finite."""

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last tenth of the recorded steps; infinite if the run has diverged."""
        if self.diverged:
            return float("inf")
        return statistics.fmean(self.loss.values[-max(1, len(self.loss.values) // 10) :])


def read_result(folder: Path, values: tuple[str, ...]) -> Result:
    """Read the result of a run. values: those of the settings that vary. Raises ConfigError if it has recorded no step."""
    path = folder / METRICS_FILE
    curves = read_records(path).curves if path.exists() else {}
    if "train/loss" not in curves:
        raise ConfigError("", f"{folder} has no record of a step")
    held_out = next(
        (c.values[-1] for name, c in curves.items() if name.startswith("eval/") and name.endswith("/loss")),
        float("nan"),
    )
    step_s, update_s = (statistics.median(curves[f"train/{name}_time_s"].values) for name in ("step", "optimizer"))
    return Result(values, curves["train/loss"], held_out, step_s, update_s)


def parse_vary(text: str) -> tuple[str, list[str]]:
    """Return the setting and the values of an option such as optimizer.lr=1e-3,2e-3. Raises ConfigError."""
    name, equals, listed = text.partition("=")
    values = listed.split(",")
    if "." not in name or not equals or "" in values:
        raise ConfigError("", f"--vary {text}: expected section.key=VALUE,VALUE")
    if len({*values}) < len(values):
        raise ConfigError("", f"--vary {text}: names a value twice")
    return name, values


def train(argv: Sequence[str]) -> bool:
    """Train, or continue, until the last step. Return whether the run has ended well, not with losses that are not finite. If it
    fails otherwise, exit with its code."""
    command = [str(ROOT / "run_llama_train.sh"), *argv]
    code = subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, preexec_fn=die_with_parent).returncode
    if code not in (0, 1):
        sys.exit(code)  # the run has printed the reason
    return not code


def draw(picture: Picture, results: Sequence[Result]) -> None:
    """Draw the training losses of the best run of each first value."""
    axes = picture.figure.add_subplot()
    for _, group in itertools.groupby(results, lambda r: r.values[0]):
        best = min(group, key=lambda r: r.final_loss)
        axes.plot(best.loss.steps, best.loss.values, label=", ".join(best.values), linewidth=1)
    axes.set(xlabel="step", ylabel="training loss")
    axes.legend(frameon=False)
    picture.save(dpi=150)


def main() -> None:
    parser = Arguments(__doc__, settings=True)
    text = "a setting and its values; with several of these options, all combinations are trained"
    parser.add_argument("--vary", action="append", required=True, metavar="section.key=VALUE,VALUE", help=text)
    parser.add_argument("--plot", type=file_to_write, metavar="FILE", help="picture of the losses: .png, .svg or .pdf")
    args, argv = parser.parse_known_args()
    varied: dict[str, list[str]] = {}
    for name, values in map(parse_vary, args.vary):
        if name in varied:
            raise ConfigError("", f"--vary {name}: is given twice")
        varied[name] = values
    base = config_from_command_line(argv)
    with base.explained_errors():
        compatibility.check(base, {SWEPT: Known(True)})
    picture = None if args.plot is None else Picture.open(args.plot, "--plot")
    runs = []
    for values in itertools.product(*varied.values()):
        name = "-".join([base.run.name, *values])
        of_run = flags(settings_of(argv) | dict(zip(varied, values, strict=True)) | {"run.name": name})
        runs.append((values, config_from_command_line(of_run), of_run))
        require_same_settings(runs[-1][1], "a run")  # of all runs, before the first one starts
    results = []
    for values, config, of_run in runs:
        ended_well = train(of_run)
        result = read_result(config.run.folder, values)
        results.append(result if ended_well else replace(result, held_out=float("nan"), diverged=True))
    width = max(len(name) for name in varied) + 2
    table = Table(
        **{name.replace(".", "_"): f"<{width}" for name in varied}, loss=">8", held_out=">9", step=">9", update=">9"
    )
    for result in results:
        losses = f"{result.final_loss:.4f}", f"{result.held_out:.4f}"
        table.row(*result.values, *losses, *(f"{1000 * s:,.0f} ms" for s in (result.step_s, result.update_s)))
    if picture is not None:
        draw(picture, results)
        print(f"wrote {args.plot}")


if __name__ == "__main__":
    run_to_end(main, "interrupted; rerun the same command to continue")

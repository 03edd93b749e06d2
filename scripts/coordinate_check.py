"""Check that activations do not grow with the width of the model, with the rates and initial values of [optimizer] base_width.

The script trains models of several widths for a few steps of one microbatch each, on this machine's CPU and in fp32: two blocks,
unless --model.overrides.n_layers says otherwise, and a constant rate. It prints the root mean square of activations in the first
batch, before and after these steps, and of their change, with the power of the width with which they grow. Without [optimizer]
base_width, the smallest width is the base. The second table is a negative control: the same runs without base_width, in which
some activation must grow. docs/optimizers.md describes width transfer.

exit codes: 0: no activation grows, except in the control; 1: one grows, or none grows in the control; 2: an argument or a setting
is wrong

    python scripts/coordinate_check.py --config train_configs/debug.toml --output coordinates.png
    python scripts/coordinate_check.py --config my.toml --widths 128 256 512 1024 --optimizer.base_width 256
"""

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config.argument_types import number, positive_float
from trainer.base.config.arguments import Arguments
from trainer.base.config.command_line import config_from_command_line
from trainer.base.config.exits import answer_early, run_to_end

WIDTHS = [64, 128, 256, 512]


def arguments() -> Arguments:
    parser = Arguments(__doc__, settings=True)
    width = number(int, 1, 2**24)
    widths_help = (
        "widths (dim) of the models; other sizes are in proportion, but heads keep their width (default: %(default)s)"
    )
    parser.add_argument("--widths", type=width, nargs="+", default=WIDTHS, metavar="N", help=widths_help)
    parser.add_argument(
        "--steps", type=number(int, 1, 10**6), default=5, metavar="N", help="number of steps (default: 5)"
    )
    limit_help = "largest power of the width with which an activation may grow (default: %(default)s)"
    parser.add_argument("--limit", type=positive_float, default=0.25, metavar="X", help=limit_help)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="picture to write: .png, .svg or .pdf (default: none)"
    )
    return parser


if __name__ == "__main__":
    answer_early(arguments())  # before torch is imported

from trainer.base.config import Config, ConfigError, compatibility
from trainer.base.config.load import load_config
from trainer.base.config.schema.condition import Known
from trainer.base.config.schema.facts import WIDTHS_COMPARED
from trainer.base.system.spelling import counted
from trainer.base.system.streams import print_error
from trainer.tools.report.picture import Picture
from trainer.tools.testing.coordinates import ACTIVATIONS, AFTER, BEFORE, CHANGE, Curves, settings_of_runs
from trainer.tools.testing.layouts import Table, flags, settings_of
from trainer.tools.testing.ranks import RankError


def with_base_width(argv: list[str], smallest: int) -> Config:
    """Return the configuration of a command line, in which base_width is the smallest width unless the user sets another."""
    config = config_from_command_line(argv)
    with config.explained_errors():
        compatibility.check(config, {WIDTHS_COMPARED: Known(True)})
    if config.optimizer.base_width is None:
        config = load_config(flags(settings_of(argv) | {"optimizer.base_width": str(smallest)}))
    return config


def print_table(curves: Curves, title: str) -> None:
    print(title, flush=True)
    table = Table(activation="<14", size="<8", **{str(width): ">9" for width in curves.widths}, power=">7")
    for name in ACTIVATIONS:
        for when in (BEFORE, AFTER, CHANGE):
            sizes = (f"{size:.4f}" for size in curves.sizes[name, when])
            table.row(name, when, *sizes, f"{curves.slope((name, when)):.2f}")


def draw(figure: Any, curves: Mapping[str, Curves], steps: int) -> None:
    """Draw the change of each activation over the width. curves: title -> what is drawn below it."""
    for axes, (title, shown) in zip(figure.subplots(1, len(curves), sharey=True), curves.items(), strict=True):
        for name in ACTIVATIONS:
            axes.plot(shown.widths, shown.sizes[name, CHANGE], "o-", markersize=4, label=name)
        axes.set(xscale="log", yscale="log", xlabel="width (dim)", title=title)
        axes.set_xticks(shown.widths, map(str, shown.widths))
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel(f"change of activations\nin {counted(steps, 'step')} (root mean square)")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def verdict(transferred: Curves, control: Curves, limit: float) -> str:
    """Return what is wrong, or ""."""
    name, power = transferred.steepest()
    if not power <= limit:  # also if it is not a number
        return f"{name}: grows with the width to the power of {power:.2f}, above --limit {limit:g}"
    _, power = control.steepest()
    if power <= limit:
        return (
            f"the check shows nothing: without base_width, no activation grows beyond --limit {limit:g} either (largest power "
            f"{power:.2f}); set a higher --optimizer.lr, more --steps or larger --widths"
        )
    return ""


def main() -> None:
    args, argv = arguments().parse_known_args()
    widths = sorted(set(args.widths))
    if len(widths) < 2:
        raise ConfigError("", f"--widths {' '.join(map(str, args.widths))}: needs two different widths")
    config = with_base_width(argv, widths[0])
    base = config.optimizer.base_width
    without = replace(config, optimizer=replace(config.optimizer, base_width=None))
    picture = args.output and Picture.open(args.output, "--output")
    curves = {}
    with tempfile.TemporaryDirectory(prefix="coordinates-", ignore_cleanup_errors=True) as folder:
        for title, settings in {f"base_width {base}": config, "without base_width": without}.items():
            runs = settings_of_runs(settings, widths, args.steps, Path(folder))
            try:
                curves[title] = Curves.measure(runs)
            except RankError as error:
                raise ConfigError("", f"{title}: {str(error).strip().splitlines()[-1]}") from None
            print_table(curves[title], title)
    if picture:
        draw(picture.figure, curves, args.steps)
        picture.save(dpi=100)
        print(f"wrote {args.output}")
    if problem := verdict(*curves.values(), args.limit):
        print_error(problem)
        sys.exit(1)
    (name, power), (other, growth) = (shown.steepest() for shown in curves.values())
    print(f"no activation grows: largest power {power:.2f} ({name}); without base_width {growth:.2f} ({other})")


if __name__ == "__main__":
    run_to_end(main)

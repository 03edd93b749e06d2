"""Train on one rank, in several layouts and with an injected bug; plot the losses and their deviations, for the README.

The runs are those of scripts/parity.py: gloo ranks on this machine's CPU. The upper plot shows the loss of one rank. The lower
one shows how far the gradient norm of every other run deviates from it, with the limit of scripts/parity.py as a dashed line.
The norm shows the injected bug from the first step on. The loss shows it some steps later, because AdamW's update hardly depends
on the scale of the gradients.

    python scripts/dev/plot_losses.py --config train_configs/debug.toml --output docs/images/losses.png
"""

import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config import Config, ConfigError
from trainer.base.config.argument_types import positive_int
from trainer.base.config.arguments import Arguments, add_layout_option
from trainer.base.config.exits import run_to_end
from trainer.tools.report.picture import Picture
from trainer.tools.testing.bugs import BUGS
from trainer.tools.testing.layouts import Layout, num_ranks
from trainer.tools.testing.parity import LIMITS, Row, Runs, control_row

LAYOUTS = ["dp_shard=2", "dp_shard=2 tp=2", "cp=2 tp=2", "dp_shard=2 tp=2 pp=2"]
BUG = "gradients averaged instead of summed"
EQUAL = 1e-8
"""Where equal norms are drawn on the logarithmic axis. Different norms in fp32 deviate by at least 6e-8."""


def label(config: Config) -> str:
    """Return a description of the layout, such as "8 ranks: tp 2, pp 2, dp 2"."""
    parallel = config.parallel
    degrees = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "dp": parallel.dp_replicate * parallel.dp_shard}
    return f"{num_ranks(parallel)} ranks: " + ", ".join(f"{name} {n}" for name, n in degrees.items() if n > 1)


def relative_deviations(reference: Sequence[dict], records: Sequence[dict], name: str) -> list[float]:
    """Return |value - reference| / |reference| of a metric for every step.

    Args:
        reference: Records of metrics.jsonl of the run on one rank.
        records: Records of another run, of the same steps.
        name: Of the metric, such as "loss".
    """
    return [abs(b[name] - a[name]) / abs(a[name]) for a, b in zip(reference, records, strict=True)]


def draw(figure: Any, losses: Sequence[float], deviations: dict[str, Sequence[float]], bug: Sequence[float]) -> None:
    """Draw both plots. Every sequence has one number for each step.

    Args:
        losses: Of one rank.
        deviations: Label of a layout -> relative deviations of its gradient norm from one rank.
        bug: The same of the run with the injected bug.
    """
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 3])
    steps = range(1, len(losses) + 1)
    upper.plot(steps, losses, color="black", label="1 rank")
    upper.set(ylabel="loss (nats per token)")
    lower.plot(
        steps, [max(value, EQUAL) for value in bug], color="tab:red", label=f"2 ranks with an injected bug:\n{BUG}"
    )
    limit = LIMITS["fp32"]["grad_norm"]
    lower.axhline(limit, color="black", linestyle="--", linewidth=1, label=f"limit of scripts/parity.py: {limit:.0e}")
    styles = itertools.cycle(zip("osDv", ("tab:blue", "tab:orange", "tab:green", "tab:purple"), strict=True))
    for (name, values), (marker, color) in zip(deviations.items(), styles, strict=False):
        lower.plot(steps, [max(value, EQUAL) for value in values], marker, color=color, markersize=4, label=name)
    lower.set(yscale="log", ylim=(EQUAL / 2, 2), xlabel="step", ylabel="gradient norm: relative\ndeviation from 1 rank")
    powers = range(-7, 1)
    lower.set_yticks([EQUAL, *(10.0**p for p in powers)], ["equal", *(f"$10^{{{p}}}$" for p in powers)])
    for axes in (upper, lower):
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = Arguments(__doc__, settings=True)
    add_layout_option(parser, ", ".join(LAYOUTS))
    parser.add_argument("--steps", type=positive_int, default=40, metavar="N", help="number of steps of each run")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=".png, .svg or .pdf")
    args, argv = parser.parse_known_args()
    picture = Picture.open(args.output, "--output")
    with tempfile.TemporaryDirectory(prefix="losses-", ignore_cleanup_errors=True) as folder:
        runs = Runs(argv, args.steps, Path(folder))
        rows = [Row.build(runs, Layout.parse(text), 1) for text in args.layout or LAYOUTS]
        control = control_row(runs, BUGS[BUG])
        if control is None:
            raise ConfigError(
                "", f"the bug {BUG!r} does not fit the configuration: it needs two ranks, with dp_shard or cp"
            )
        reference = runs.reference(rows[0].layout).records
        results = {}
        for row, bug in [(control, BUG), *((row, "") for row in rows)]:
            records, name = (
                runs.run(row.settings, num_ranks(row.config.parallel), bug=bug).records,
                bug or label(row.config),
            )
            results[name] = relative_deviations(reference, records, "grad_norm")
            loss = max(relative_deviations(reference, records, "loss"))
            print(f"{name}: loss {loss:.1e}, gradient norm {max(results[name]):.1e}", flush=True)
    injected = results.pop(BUG)
    draw(picture.figure, [record["loss"] for record in reference], results, injected)
    picture.save(dpi=100)


if __name__ == "__main__":
    run_to_end(main)

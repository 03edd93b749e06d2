"""Plot the training losses of several runs in one diagram, for the README.

python scripts/dev/plot_losses.py outputs/ranks1 outputs/ranks2 --output docs/images/losses.svg
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from trainer.system.process import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from scripts.compare_runs import losses
from trainer.config.command_line import Arguments, run_to_end
from trainer.planning.report import canvas


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder; its name labels the curve")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=".png, .svg or .pdf")
    args = parser.parse_args()
    curves = {run.name: losses(run) for run in args.runs}
    figure = canvas(args.output, "--output")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    for i, (name, curve) in enumerate(curves.items()):
        width = 2 + 2.5 * (len(curves) - 1 - i)  # the first curve is the widest, so that each later one shows its edges
        axes.plot(curve.keys(), curve.values(), label=name, linewidth=width)
    axes.legend(frameon=False)
    figure.savefig(args.output)


if __name__ == "__main__":
    run_to_end(main)

"""Compare training under each parallel layout with training on one rank.

The script runs the configuration on one rank and then under each layout, with gloo on this machine's CPU. It prints the largest
relative deviations of loss and gradient norm over all steps, and the largest of a parameter's gradient in the first and the last
step. The last rows are negative controls: each injects a bug, so its deviations must exceed the limits. The layouts replace the
sections [parallel], [activation_checkpoint] and [compile] of the configuration file. With --reference transformers, the first
step is compared with the implementation of the model in the package transformers.

exit codes: 0: all layouts pass; 1: a layout fails; 2: an argument or a setting is wrong

    python scripts/parity.py --config train_configs/debug.toml --steps 20
    python scripts/parity.py --model.huggingface weights/Qwen3-0.6B --reference transformers --layout tp=2
    python scripts/parity.py --config my.toml --layout "tp=2 pp=2 activation_checkpoint.mode=full" --layout "cp=4"
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config.argument_types import non_negative_int, positive_int
from trainer.base.config.arguments import Arguments, add_layout_option
from trainer.base.config.exits import answer_early, run_to_end


def arguments() -> Arguments:
    parser = Arguments(__doc__, settings=True)
    add_layout_option(parser, "a matrix of all features; layouts that do not fit the configuration are listed")
    parser.add_argument("--steps", type=positive_int, metavar="N", help="number of steps of each run (default: 20)")
    micro_help = (
        "numbers of microbatches on each rank, as multiples of the smallest number that the pipeline schedule accepts"
    )
    parser.add_argument("--microbatches", type=positive_int, nargs="+", default=[1, 2], metavar="N", help=micro_help)
    gradients_help = "number of parameters to list below each row: those whose gradients deviate most"
    parser.add_argument("--gradients", type=non_negative_int, default=0, metavar="N", help=gradients_help)
    reference_help = "reference of the layouts: a run on one rank (default), or the first step in transformers"
    parser.add_argument("--reference", choices=["one-rank", "transformers"], default="one-rank", help=reference_help)
    return parser


if __name__ == "__main__":
    answer_early(arguments())  # before torch is imported

from trainer.base.config import ConfigError
from trainer.tools.testing.bugs import BUGS
from trainer.tools.testing.layouts import EXPERT_MATRIX, PARITY_MATRIX, Table
from trainer.tools.testing.parity import LIMITS, Row, Runs, build_rows, control_row


def compare(runs: Runs, rows: Sequence[Row], misfits: Sequence[tuple[str, ConfigError]], num_gradients: int) -> bool:
    """Print the table. Return whether all layouts pass and every negative control exceeds a limit.

    Args:
        rows: From build_rows.
        misfits: From build_rows.
        num_gradients: Number of gradients to print for each row.

    Raises:
        ConfigError: No negative control fits the configuration. No run has started then.
    """
    controls = {name: row for name, bug in BUGS.items() if (row := control_row(runs, bug)) is not None}
    if not controls:
        message = "no negative control fits the configuration: they need two ranks, with dp_shard, cp or tp"
        raise ConfigError("", message)
    table = Table(layout="<84", ranks=">5", micro=">5", loss=">8", grad_norm=">9", gradient=">8", time=">7")
    for text, error in misfits:
        table.row(text, f"does not fit: {error}")
    passed = [row.run(runs, table, num_gradients) for row in rows]
    caught = not any([control.run(runs, table, num_gradients, bug) for bug, control in controls.items()])
    limits = "; ".join(f"{dtype} {', '.join(f'{v:.0e}' for v in limit.values())}" for dtype, limit in LIMITS.items())
    print(f"{sum(passed)} of {len(passed)} pass (limits of loss, gradient norm and gradients: {limits})")
    return all(passed) and caught


def main() -> None:
    parser = arguments()
    args, argv = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="parity-", ignore_cleanup_errors=True) as folder:
        with_transformers = args.reference == "transformers"
        if with_transformers and args.steps:
            parser.error(f"--steps {args.steps} has no effect: --reference transformers compares the first step")
        runs = Runs(argv, args.steps or 20, Path(folder), with_transformers)
        matrix = PARITY_MATRIX + EXPERT_MATRIX * runs.has_experts
        default = ["dp_shard=1"] if with_transformers else matrix
        passed = compare(runs, *build_rows(runs, args.layout, default, args.microbatches), args.gradients)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    run_to_end(main)

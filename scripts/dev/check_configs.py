"""Compare random configurations of the families with experts, and of those of 2026, with the package transformers.

Each config.json gives the logits and the gradients of transformers, also after it is read and written, or is refused with the
name of a field. Configurations that transformers cannot compute, and those with a tie of a router's scores, are left out. The
script prints the counts and the reasons.

exit codes: 0: each configuration is equal or refused; 1: one is not; 2: an argument is wrong

    python scripts/dev/check_configs.py --number 60
"""

import json
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

import transformers

from tests.models.random_configs import FAMILIES, configurations, outcome
from trainer.base.config.argument_types import positive_int
from trainer.base.config.arguments import Arguments
from trainer.base.config.exits import run_to_end


def count(family: str, number: int) -> bool:
    """Print the outcomes of a family, and return whether no configuration is silently different."""
    outcomes: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    different = 0
    for config, reference in islice(configurations(family, left_out), number):
        try:
            outcomes[outcome(family, config, reference)] += 1
        except AssertionError as error:
            print(f"DIFFERENT: {error}: {json.dumps(config)}")
            different += 1
    equal = outcomes.pop("", 0)
    print(f"{family}: {equal} equal, {outcomes.total()} refused, {different} different")
    for reason, times in outcomes.most_common():
        print(f"    {times:3} {reason}")
    for reason, times in left_out.most_common():
        print(f"    {times:3} left out: {reason}")
    return not different


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, metavar="NAME", help="names")
    number_help = "number of configurations of each family"
    parser.add_argument("--number", type=positive_int, default=60, metavar="N", help=number_help)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    sys.exit(0 if all([count(family, args.number) for family in args.families]) else 1)


if __name__ == "__main__":
    run_to_end(main)

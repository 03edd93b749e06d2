"""Add memory techniques one after another, and measure or estimate memory and speed after each.

The script measures peak memory, and the speed of the fastest of a few steps, on one rank on this machine's CPU. With --device,
it estimates both for that device instead. A CPU has no separate host memory, so only estimates show the effect of offloading.

    python scripts/dev/memory_ablation.py --device a100 --config train_configs/llama3_2_3b.toml
"""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config import Config, ConfigError
from trainer.base.config.argument_types import number
from trainer.base.config.arguments import Arguments
from trainer.base.config.exits import run_to_end
from trainer.base.config.load import load_config
from trainer.base.system.units import GIB
from trainer.runtime import device as devices
from trainer.runtime.accelerators import ACCELERATORS, SHORT_NAMES, short_name
from trainer.tools.planner.estimate import Hardware, estimate
from trainer.tools.planner.limits import MAX_RANKS
from trainer.tools.testing.allocations import build_step, measure, silence_profiler
from trainer.tools.testing.layouts import Table, flags, settings_of, with_default_model
from trainer.tools.testing.ranks import LocalRanks
from trainer.tools.testing.techniques import BASELINE, TECHNIQUES

STEPS = 3


def fastest_step_s(argv: Sequence[str]) -> float:
    """Run a few steps on this rank. Return the duration of the fastest one in seconds."""
    config = load_config(argv)
    devices.set_cpu_threads(config.training.cpu_threads)
    _, step = build_step(config)
    times = []
    for _ in range(STEPS + 1):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def cumulative(techniques: Sequence[str], argv: Sequence[str]) -> Iterator[tuple[str, list[str], Config]]:
    """Yield (name, flags, configuration) of the baseline, and then of each run that adds one more technique. Raises a ConfigError
    that names the technique that caused it."""
    settings = with_default_model(BASELINE | settings_of(argv))
    yield "baseline", flags(settings), load_config(flags(settings), check_files=())
    for technique in techniques:
        settings |= TECHNIQUES[technique]
        try:
            yield f"+ {technique}", flags(settings), load_config(flags(settings), check_files=())
        except ConfigError as error:
            raise ConfigError("", f"technique '{technique}': {error}") from None


def main() -> None:
    silence_profiler()
    parser = Arguments(__doc__, settings=True)
    parser.add_argument("--device", metavar="NAME", help="plan for this device, such as h100, instead of measuring")
    parser.add_argument(
        "--world-size", type=number(int, 1, MAX_RANKS), default=1, metavar="N", help="number of ranks of a plan"
    )
    names_help = f"techniques to add, in this order; available: {', '.join(TECHNIQUES)} (default: all)"
    parser.add_argument(
        "--techniques", nargs="+", choices=TECHNIQUES, default=list(TECHNIQUES), metavar="NAME", help=names_help
    )
    args, argv = parser.parse_known_args()
    if args.device:
        args.device = short_name("--device", args.device)
    if args.world_size > 1 and not args.device:
        parser.error(f"--world-size {args.world_size}: has no effect without --device")
    runs = list(cumulative(args.techniques, argv))
    table = Table(technique="<40", memory=">12", change=">7", host_memory=">12", tokens_per_second=">18")
    previous = None
    for name, flags_of_run, config in runs:
        if args.device:
            plan = estimate(config, Hardware(args.world_size, ACCELERATORS[SHORT_NAMES[args.device]]))
            peak, host, speed = plan.largest.peak, plan.largest.host, plan.tokens_per_second
        else:
            peak, host = LocalRanks(1).run(measure, flags_of_run, 1)[0].total(), 0
            tokens = config.training.global_batch_size * config.training.seq_len
            speed = tokens / LocalRanks(1).run(fastest_step_s, flags_of_run)[0]
        change = f"{peak / previous - 1:+.1%}" if previous else ""
        in_host = f"{host / GIB:.2f} GiB" if host else ""
        table.row(name, f"{peak / GIB:.2f} GiB", change, in_host, f"{speed:,.0f}")
        previous = peak


if __name__ == "__main__":
    run_to_end(main)

"""What each lever for memory gives back, and costs, on top of the ones before: python scripts/dev/memory_ablation.py [...]

Runs each rung for some steps on one rank of this machine's CPU, and prints the largest memory (by the allocator's events, as in
check_plan.py) and the fastest step. On a CPU host memory is the same memory: what goes there is only seen in a plan.

--device NAME           plan each rung for one such device instead (a100, h100, ...; as in plan.py), and run nothing
--world N               ranks of the plan (default: 1)
--rungs NAME ...        the rungs to take, in this order (default: all)
--section.key VALUE     any setting of all rungs (default: a Llama of 100M parameters, 4 samples of 512 tokens)
"""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from scripts.dev.check_plan import said, with_defaults
from scripts.parity import flags
from trainer.config import Config, ConfigError
from trainer.config.command_line import Arguments, die, positive_int, run_to_end
from trainer.config.load import load_config
from trainer.planning.estimate import plan
from trainer.runtime import device as devices
from trainer.runtime.accelerators import ACCELERATORS, SHORT_NAMES
from trainer.system.units import GIB
from trainer.testing.allocations import a_step, measure, quiet
from trainer.testing.ranks import LocalRanks

START = {
    "training.local_batch_size": "4",
    "training.global_batch_size": "4",
    "training.loss_chunk_tokens": "100000000",
    "training.max_norm": "none",
}
RUNGS = {
    "loss in chunks": {"training.loss_chunk_tokens": "1024"},
    "blocks computed again": {"activation_checkpoint.mode": "full"},
    "inputs of blocks on the host": {"activation_checkpoint.offload_inputs": "true"},
    "update in backward": {"optimizer.in_backward": "true", "resilience.max_consecutive_skips": "1"},
    "averages in 8 bits": {"optimizer.state_dtype": "8bit"},
    "parameters in bf16": {"training.parameter_dtype": "bf16"},
    "optimizer on the host instead": {
        "optimizer.in_backward": "false",
        "optimizer.state_dtype": "fp32",
        "optimizer.offload": "state_and_gradients",
    },
}
STEPS = 3


def seconds(argv: Sequence[str]) -> float:
    """On a rank: of the fastest step of some."""
    config = load_config(argv)
    devices.set_cpu_threads(config.training.cpu_threads)
    _, step = a_step(config)
    took = []
    for _ in range(STEPS + 1):
        start = time.perf_counter()
        step()
        took.append(time.perf_counter() - start)
    return min(took[1:])


def rungs(names: Sequence[str], given: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Name of each, and the run's command line; what was given goes before the start, and a rung before both."""
    settings = with_defaults(START | said(given))
    yield "nothing", flags(settings)
    for name in names:
        settings |= RUNGS[name]
        yield f"+ {name}", flags(settings)


def config_of(name: str, argv: Sequence[str]) -> Config:
    """Raises ConfigError, with the rung that is at fault."""
    try:
        return load_config(argv, check_files=False)
    except ConfigError as error:
        raise error if name == "nothing" else ConfigError("", f"rung '{name[2:]}': {error}") from None


def row(name: str, peak: int, before: int | None, host: int, tokens_per_second: float) -> str:
    change = f"{peak / before - 1:+.1%}" if before else ""
    beside = f"{host / GIB:>8.2f} GiB" if host else f"{'':>12}"
    return f"{name:<40}{peak / GIB:>8.2f} GiB {change:>7} {beside}{tokens_per_second:>14,.0f}"


def main() -> None:
    quiet()
    parser = Arguments(__doc__, settings=True)
    parser.add_argument("--device", choices=SHORT_NAMES)
    parser.add_argument("--world", type=positive_int, default=1)
    parser.add_argument("--rungs", nargs="+", choices=RUNGS, default=list(RUNGS))
    arguments, settings = parser.parse_known_args()
    if arguments.world > 1 and not arguments.device:
        parser.error(f"--world {arguments.world}: of a plan; needs --device")
    before = None
    try:
        steps = [(name, argv, config_of(name, argv)) for name, argv in rungs(arguments.rungs, settings)]
        print(f"{'':<40}{'memory':>12} {'':>7} {'on the host':>12}{'tokens/s':>14}")
        for name, argv, config in steps:
            if arguments.device:
                made = plan(config, arguments.world, ACCELERATORS[SHORT_NAMES[arguments.device]], 0.0, on_gpu=True)
                peak, host, speed = made.largest.peak, made.largest.host, made.tokens_per_second
            else:
                peak, host = LocalRanks(1).run(measure, argv, 1)[0].peak, 0
                tokens = config.training.global_batch_size * config.training.seq_len
                speed = tokens / LocalRanks(1).run(seconds, argv)[0]
            print(row(name, peak, before, host, speed), flush=True)
            before = peak
    except ConfigError as error:
        die(str(error))


if __name__ == "__main__":
    run_to_end(main)

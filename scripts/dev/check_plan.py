"""Show that a plan tells the truth: python scripts/dev/check_plan.py [--config FILE.toml] [--layout "..."] [...]

Runs a step under each layout, as gloo ranks on this machine's CPU, looks at what its allocator does, by torch's profiler, and
prints the largest memory of the first and the last rank beside the plan's. Exit code 1 where they differ by more than 3 %, or
a kind of memory by more than 5 % of it and 1 % of the peak.

--layout "tp=2 pp=2"    settings of a layout, as in scripts/parity.py, with as many ranks as its degrees make; may be given
                        several times (default: a matrix of layouts, what is computed again, and accumulation)
--section.key VALUE     any other setting, for all layouts (default: a Llama of 100M parameters)
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from scripts.parity import Layout, flags
from trainer.config import ConfigError
from trainer.config.command_line import Arguments, die, one_line_errors, run_to_end
from trainer.config.load import load_config, parse_argv
from trainer.planning.simulate import Simulation, simulate
from trainer.run.resolve import resolve
from trainer.testing.allocations import Measured, measure, quiet
from trainer.testing.ranks import LocalRanks

MODEL = {
    "dim": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 4, "hidden_dim": 2048, "vocab_size": 16384,
}  # fmt: skip
DEFAULTS = {f"model.overrides.{name}": str(value) for name, value in MODEL.items()} | {
    "training.seq_len": "512",
    "training.local_batch_size": "1",
    "training.global_batch_size": "4",
}
MATRIX = [
    "dp_shard=1",
    "dp_shard=1 activation_checkpoint.mode=full training.compute_dtype=bf16",
    "dp_shard=2",
    "dp_shard=2 training.compute_dtype=bf16",
    "dp_shard=2 activation_checkpoint.mode=full",
    "dp_shard=2 activation_checkpoint.mode=selective training.compute_dtype=bf16",
    "dp_shard=2 reshard_after_forward=never",
    "dp_shard=2 fsdp_units=root training.global_batch_size=2",
    "dp_shard=2 training.reduce_every_microbatch=true",
    "dp_shard=2 training.global_batch_size=16",
    "dp_shard=4 training.compute_dtype=bf16",
    "dp_replicate=2 dp_shard=2",
    "tp=2",
    "tp=2 sequence_parallel=false activation_checkpoint.mode=selective",
    "dp_shard=2 tp=2 activation_checkpoint.mode=full training.compute_dtype=bf16",
    "cp=2",
    "cp=2 dp_shard=2 training.compute_dtype=bf16 activation_checkpoint.recompute_all_gather=false",
    "pp=2",
    "pp=2 pipeline_schedule=Interleaved1F1B dp_shard=2 activation_checkpoint.mode=full",
    "pp=2 tp=2 training.compute_dtype=bf16",
    "dp_shard=2 data.document_mask=true model.overrides.tied_embeddings=true",
    "dp_shard=2 optimizer.in_backward=true training.max_norm=none resilience.max_consecutive_skips=1",
    "dp_replicate=2 dp_shard=2 optimizer.in_backward=true training.max_norm=none resilience.max_consecutive_skips=1",
    "dp_shard=2 optimizer.offload=state_and_gradients training.parameter_dtype=bf16",
    "dp_shard=2 optimizer.state_dtype=8bit activation_checkpoint.mode=full activation_checkpoint.offload_inputs=true",
]

REPEATS = 3
MOST_RANKS = 16
TOTAL, KIND, OF_PEAK = 0.03, 0.05, 0.01
"""Largest deviations."""
WIDTH = 92


def ranks_of(layout: Layout) -> int:
    degrees = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    return math.prod(int(layout.settings.get(f"parallel.{name}", "1")) for name in degrees)


def said(words: Sequence[str]) -> dict[str, str]:
    """ "section.name" -> value, of a command line."""
    return {flag.removeprefix("--"): value for flag, value in parse_argv(words)}


def with_defaults(given: dict[str, str]) -> dict[str, str]:
    """Of the network and its batches, unless a file or a size is named."""
    return given if {"config", "model.size"} & set(given) else DEFAULTS | given


def wrong_kind(plan: Simulation, real: Measured) -> str:
    """The kind of memory that deviates most, if one does too much."""
    for kind, planned in plan.by_kind.items():
        measured = real.by_kind.get(kind, 0)
        if abs(planned - measured) > max(KIND * measured, OF_PEAK * real.peak):
            return f"{kind}: {planned:,} planned, {measured:,} measured"
    return ""


def check(layout: Layout, given: dict[str, str]) -> bool:
    """Whether the plan is right for the first and the last rank. What a layout says goes before what was given."""
    argv, size = flags(given | layout.settings), ranks_of(layout)
    measured = LocalRanks(size).run(measure, argv, REPEATS)
    config, ranks = load_config(argv), sorted({0, size - 1})
    good = True
    for rank, plan in zip(ranks, simulate([(config, rank) for rank in ranks], size, on_gpu=False), strict=True):
        real = measured[rank]
        deviation = plan.peak / real.peak - 1
        problem = wrong_kind(plan, real)
        good = good and abs(deviation) <= TOTAL and not problem
        print(
            f"{layout.text:<{WIDTH}} {rank:>4} {plan.peak:>15,} {real.peak:>15,} {deviation:>+8.2%}  {problem or plan.at}",
            flush=True,
        )
    return good


def main() -> None:
    quiet()
    parser = Arguments(__doc__, settings=True)
    parser.add_argument("--layout", action="append", default=[])
    arguments, settings = parser.parse_known_args()
    try:
        layouts = [Layout.parse(text) for text in arguments.layout or MATRIX]
        given = with_defaults(said(settings))
        for layout in layouts:
            if (ranks := ranks_of(layout)) > MOST_RANKS:
                raise ConfigError(
                    "", f"--layout '{layout.text}': {ranks:,} ranks, and {MOST_RANKS} may be tried on one machine"
                )
            argv = flags(given | layout.settings)
            config = load_config(argv)
            with one_line_errors(config):
                resolve(config, ranks)
    except ConfigError as error:
        die(str(error))
    print(f"{'layout':<{WIDTH}} rank {'planned bytes':>15} {'measured bytes':>15} {'':>8}  at the peak")
    good = [check(layout, given) for layout in layouts]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    run_to_end(main)

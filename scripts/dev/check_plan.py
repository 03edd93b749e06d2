"""Compare simulated memory with measured memory.

The script runs a step under each layout with gloo on this machine's CPU, reads the allocator's events from torch's profiler,
and prints the measured and the simulated peak of the first and the last rank. Routers send tokens to all experts in turn, because
the planner assumes that experts get equally many rows.

exit codes: 0: all layouts agree; 1: a peak deviates by more than 3 %, or a category of memory deviates by more than 5 % of its
size and by more than 1 % of the peak; 2: an argument or a setting is wrong

    python scripts/dev/check_plan.py --experts
    python scripts/dev/check_plan.py --layout "tp=2 training.compute_dtype=bf16" --layout "pp=2"
"""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config import Config, ConfigError
from trainer.base.config.arguments import Arguments, add_layout_option
from trainer.base.config.exits import run_to_end
from trainer.tools.planner.simulate import Simulation, simulate
from trainer.tools.testing.allocations import measure, silence_profiler
from trainer.tools.testing.layouts import (
    LLAMA_100M,
    MIXTRAL_50M,
    Layout,
    Table,
    flags,
    load_layout,
    num_ranks,
    settings_of,
    with_default_model,
)
from trainer.tools.testing.ranks import LocalRanks

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
    "dp_shard=1 lora.rank=8 checkpoint.init_from=. training.compute_dtype=bf16",
    "dp_shard=2 lora.rank=8 checkpoint.init_from=. training.parameter_dtype=bf16 training.compute_dtype=bf16 "
    "activation_checkpoint.mode=full",
    "tp=2 lora.rank=8 checkpoint.init_from=. training.compute_dtype=bf16",
    "dp_shard=2 lora.rank=8 lora.base_dtype=nf4 checkpoint.init_from=. training.parameter_dtype=bf16 "
    "training.compute_dtype=bf16 activation_checkpoint.mode=full",
    "tp=2 lora.rank=8 lora.base_dtype=nf4_double checkpoint.init_from=. training.compute_dtype=bf16",
    "dp_shard=2 preference.loss=simpo data.dataset=preference data.packing=none data.long_documents=drop "
    "data.document_mask=true",
    "dp_shard=1 training.compute_dtype=bf16 training.float8=tensorwise",
    "dp_shard=2 training.compute_dtype=bf16 training.float8=tensorwise activation_checkpoint.mode=selective",
    "tp=2 training.compute_dtype=bf16 training.float8=rowwise",
    "dp_shard=2 optimizer.name=muon",
    "dp_shard=2 optimizer.name=muon training.compute_dtype=bf16 activation_checkpoint.mode=full",
    "tp=2 optimizer.name=muon",
    "dp_replicate=2 dp_shard=2 optimizer.name=muon optimizer.ema_decay=0.99",
    "dp_shard=2 optimizer.state_dtype=8bit activation_checkpoint.mode=full activation_checkpoint.offload_inputs=true",
]

EXPERT_MATRIX = [
    "tp=2",
    "pp=2",
    "dp_shard=2 ep=2",
    "dp_shard=4 ep=2",
    "tp=2 ep=2",
    "cp=2 ep=2",
    "dp_shard=2 tp=2 ep=4",
    "dp_shard=2 ep=2 activation_checkpoint.mode=full",
    "dp_shard=2 ep=2 activation_checkpoint.mode=selective",
    "dp_shard=2 ep=2 training.compute_dtype=bf16",
    "dp_shard=4 ep=2 optimizer.state_dtype=8bit",
    "dp_shard=2 ep=2 optimizer.name=muon",
    "tp=2 ep=2 activation_checkpoint.mode=full training.compute_dtype=bf16",
]

REPEATS = 3
MAX_RANKS = 16
MAX_PEAK_DEVIATION = 0.03
MAX_CATEGORY_DEVIATION, IGNORED_FRACTION = 0.05, 0.01
"""Maximum deviation of a category, as a fraction of its size. Deviations below IGNORED_FRACTION of the peak are ignored."""


def wrong_category(simulation: Simulation, measured: Counter[str]) -> str:
    """Return a description of the first memory category that deviates too much, or "" if there is none."""
    for category, planned in simulation.by_category.items():
        actual = measured[category]
        if abs(planned - actual) > max(MAX_CATEGORY_DEVIATION * actual, IGNORED_FRACTION * measured.total()):
            return f"{category}: {planned:,} simulated, {actual:,} measured"
    return ""


def check(layout: Layout, argv: list[str], config: Config, table: Table) -> bool:
    """Print a layout's table rows. Return whether the simulation agrees with the measurement on the first and the last rank."""
    size = num_ranks(config.parallel)
    measured = LocalRanks(size).run(measure, argv, REPEATS)
    agree = True
    for simulation in simulate([(config, rank) for rank in sorted({0, size - 1})], size, on_gpu=False):
        peak = measured[simulation.rank].total()
        deviation, wrong = simulation.peak / peak - 1, wrong_category(simulation, measured[simulation.rank])
        agree = agree and abs(deviation) <= MAX_PEAK_DEVIATION and not wrong
        cells = layout.text, simulation.rank, f"{simulation.peak:,}", f"{peak:,}", f"{deviation:+.2%}"
        table.row(*cells, wrong or simulation.peak_at)
    return agree


def main() -> None:
    silence_profiler()
    parser = Arguments(__doc__, settings=True)
    layouts = "a matrix of layouts, checkpointing and gradient accumulation, for a Llama of 100M parameters"
    add_layout_option(parser, default=layouts)
    parser.add_argument("--experts", action="store_true", help="layouts of experts, for a Mixtral of 50M parameters")
    args, argv = parser.parse_known_args()
    matrix, default_model = (EXPERT_MATRIX, MIXTRAL_50M) if args.experts else (MATRIX, LLAMA_100M)
    given = with_default_model(settings_of(argv), default_model)
    runs = []
    for layout in [Layout.parse(text) for text in args.layout or matrix]:
        argv = flags(given | layout.settings)
        config = load_layout(argv)
        if (ranks := num_ranks(config.parallel)) > MAX_RANKS:
            raise ConfigError("", f"--layout {layout.text!r}: has {ranks:,} ranks, but the limit is {MAX_RANKS}")
        runs.append((layout, argv, config))
    table = Table(layout="<92", rank=">4", simulated_bytes=">15", measured_bytes=">15", deviation=">9", peak_in="")
    agree = [check(*run, table) for run in runs]
    sys.exit(0 if all(agree) else 1)


if __name__ == "__main__":
    run_to_end(main)

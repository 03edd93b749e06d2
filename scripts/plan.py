"""Estimate memory, communication and speed of a run before starting it.

The script simulates the trainer's own step with fake tensors on one CPU, for the first rank of the first, a middle and the last
pipeline stage. Datasets, tokenizer and checkpoints need not exist.

exit codes: 0: the run fits; 1: it does not fit; 2: it cannot run

    python scripts/plan.py --config train_configs/llama3_70b.toml --world-size 64 --device h100 --tokens 15e12
    python scripts/plan.py --from weights/Qwen3-8B --training.seq_len 4096 --training.compute_dtype bf16
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config.argument_types import non_negative_float, number, positive_float, positive_int
from trainer.base.config.arguments import Arguments
from trainer.base.config.command_line import config_from_command_line
from trainer.base.config.errors import ConfigError
from trainer.base.config.exits import answer_early, run_to_end
from trainer.base.system.units import GIB
from trainer.runtime.accelerators import ACCELERATORS, SHORT_NAMES, AcceleratorSpec, short_name
from trainer.tools.planner.limits import GPU_RESERVE_BYTES, MAX_RANKS

RATES = {
    "memory-bandwidth": ("memory_bandwidth", "bandwidth of device memory"),
    "intra-node": ("intra_node_bandwidth", "bandwidth to other devices of the node, in each direction"),
    "inter-node": ("inter_node_bandwidth", "bandwidth to other nodes per device, in each direction"),
    "pcie": ("pcie_bandwidth", "bandwidth between host and device memory, in each direction"),
    "host-memory-bandwidth": ("host_memory_bandwidth", "bandwidth of host memory per device"),
}
"""Name of a flag (without "--" and "-gbs") -> (field of AcceleratorSpec, help text of the flag)."""


def arguments() -> Arguments:
    parser = Arguments(__doc__, settings=True)
    add = parser.add_argument
    add("--world-size", type=number(int, 1, MAX_RANKS), default=8, metavar="N", help="number of ranks")
    devices_help = f"{', '.join(SHORT_NAMES)}, a name as torch reports it, or cpu: this machine"
    add("--device", default="h100", metavar="NAME", help=devices_help)
    add("--tokens", type=positive_float, metavar="N", help="report the time to train on N tokens")
    add("--price-per-gpu-hour", type=positive_float, metavar="X", help="report the price of the run, in the unit of X")
    reserve_help = "device memory that the allocator cannot use: driver context, NCCL buffers"
    add("--reserve-gib", type=non_negative_float, default=GPU_RESERVE_BYTES / GIB, metavar="X", help=reserve_help)
    imbalance_help = (
        "assume that the busiest rank of an ep group gets 1 + X times the mean rows of experts (default: 0)"
    )
    add("--expert-imbalance", type=non_negative_float, default=0.0, metavar="X", help=imbalance_help)
    add("--search", action="store_true", help="compare parallel layouts, and print the settings of the fastest")
    add("--max-candidates", type=positive_int, metavar="N", help="maximum number of layouts to simulate (default: 24)")
    add("--json", action="store_true", help="print JSON")
    plot_help = "plot memory over a step of the rank with the largest peak, as .png, .svg or .pdf (requires matplotlib)"
    add("--plot", type=Path, metavar="FILE", help=plot_help)
    group = parser.add_argument_group("figures that replace those of the device (1 GB/s = 10^9 bytes per second)")
    group.add_argument("--memory-gib", type=positive_float, metavar="X", help="device memory")
    group.add_argument("--host-memory-gib", type=positive_float, metavar="X", help="host memory per device")
    group.add_argument(
        "--peak-tflops", type=positive_float, metavar="X", help="peak rate of dense matmuls; float8 in proportion"
    )
    group.add_argument("--gpus-per-node", type=positive_int, metavar="N", help="devices in a node")
    for flag, (field, text) in RATES.items():
        group.add_argument(f"--{flag}-gbs", dest=field, type=positive_float, metavar="X", help=text)
    return parser


if __name__ == "__main__":
    answer_early(arguments())  # before torch is imported

from trainer.base.config import Config
from trainer.base.config.flags import parse_argv
from trainer.tools.planner.estimate import Hardware, RunEstimate, estimate, this_machine
from trainer.tools.planner.report import as_json, as_text, headline, ranking
from trainer.tools.planner.search import search
from trainer.tools.report.memory_picture import draw_memory
from trainer.tools.report.picture import Picture


def accelerator_of(args: argparse.Namespace) -> AcceleratorSpec:
    spec = this_machine() if args.device == "cpu" else ACCELERATORS[SHORT_NAMES[args.device]]
    changes = {name: getattr(args, name) for name in ("memory_gib", "host_memory_gib", "gpus_per_node")}
    changes |= {field: (getattr(args, field) or 0) * 1e9 for field, _ in RATES.values()}
    if args.peak_tflops:
        rate = 1e12 * args.peak_tflops
        fp8 = {"fp8": rate * spec.flops["fp8"] / spec.flops["bf16"]} if "fp8" in spec.flops else {}
        changes["flops"] = dict.fromkeys(spec.flops, rate) | fp8
    return replace(spec, **{name: value for name, value in changes.items() if value})


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = arguments()
    args, settings = parser.parse_known_args(argv)
    args.device = short_name("--device", args.device, others=("cpu",))
    if args.search and (args.json or args.tokens or args.plot):
        parser.error("--search prints a table: it cannot be combined with --json, --tokens or --plot")
    if args.json and args.price_per_gpu_hour:
        parser.error("--price-per-gpu-hour: cannot be combined with --json")
    if args.max_candidates and not args.search:
        parser.error(f"--max-candidates {args.max_candidates}: requires --search")
    if args.device == "cpu" and (args.host_memory_gib or args.pcie_bandwidth or args.host_memory_bandwidth):
        parser.error("--device cpu: a CPU has no separate host memory; remove the flags for host memory and PCIe")
    return args, settings


def print_search(config: Config, hardware: Hardware, args: argparse.Namespace, settings: Sequence[str]) -> RunEstimate:
    """Search, and print the table of the layouts, also if the search is interrupted. Return the estimate of the best one.
    settings: the words of the command line that are settings."""
    latest: tuple = ()
    is_complete = False
    try:
        for result in search(config, hardware, args.max_candidates or 24, args.expert_imbalance):
            latest = result
        is_complete = True
    finally:
        if latest:
            print(ranking(*latest, parse_argv(settings), args.price_per_gpu_hour, is_complete))
    return latest[1][0][1]


def main() -> None:
    args, settings = parse(sys.argv[1:])
    config = config_from_command_line(settings, check_files=())
    accelerator, is_gpu = accelerator_of(args), args.device != "cpu"
    hardware = Hardware(args.world_size, accelerator, is_gpu, args.reserve_gib * GIB * is_gpu)
    if hardware.usable_bytes <= 0:
        memory = f"{accelerator.memory_gib:g} GiB"
        raise ConfigError("", f"--reserve-gib {args.reserve_gib:g}: must be less than the device's memory of {memory}")
    with config.explained_errors():
        picture = Picture.open(args.plot, "--plot") if args.plot else None
        if args.search:
            sys.exit(0 if print_search(config, hardware, args, settings).fits else 1)
        result = estimate(config, hardware, args.expert_imbalance)
    print(as_json(result) if args.json else as_text(result, args.device, args.tokens, args.price_per_gpu_hour))
    if picture is not None:  # after the plan, which a full disk must not hide
        draw_memory(picture.figure, result.largest, headline(result, args.device), accelerator.memory_gib)
        picture.save(dpi=150)
    sys.exit(0 if result.fits else 1)


if __name__ == "__main__":
    run_to_end(main)

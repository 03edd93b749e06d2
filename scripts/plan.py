"""Plan a run before it is paid for: python scripts/plan.py --config FILE.toml --world 64 --device h100 [...]

Runs the trainer's own step for a first, a middle and a last rank of an imaginary world, without values and on one CPU, and
prints what it needs: memory, where it goes and when most is needed; what crosses the network; how long a step should take.

--world N               ranks of the run (default: 8)
--device NAME           a100, a100-40gb, h100, h200, b200, or cpu: this machine (default: h100)
--tokens N              tokens to train on, as 15e12: how long that takes
--reserve-gib X         memory of the device that the allocator does not get: context, collectives' buffers (default: 2)
--memory-gib X, --peak-tflops X, --bandwidth-gbs X, --link-gbs X, --network-gbs X, --host-memory-gib X, --host-link-gbs X,
--host-bandwidth-gbs X, --per-machine N
                        in the place of the device's own figures (GB/s: 10^9 bytes per second, in each direction; of its
                        machine's memory, a device's share)
--search                layouts of this many ranks instead, ranked, with the settings of the best that fits
--rows N                layouts that are simulated (24)
--json                  the plan as JSON
--picture FILE          memory over the step of the rank that needs most, as .png, .svg or .pdf (needs matplotlib)
--section.key VALUE     any setting

Exit code 0 if the run fits, 1 if it does not, 2 if it cannot run. Datasets, tokenizer and checkpoints need not be there.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from trainer.config.command_line import (
    Arguments,
    config_from_command_line,
    die,
    non_negative_float,
    one_line_errors,
    positive_float,
    positive_int,
    run_to_end,
)
from trainer.planning.estimate import RunEstimate, plan
from trainer.planning.recorder import KINDS
from trainer.planning.report import canvas, draw
from trainer.planning.roofline import BANDWIDTH_EFFICIENCY, FLOPS_EFFICIENCY, NETWORK_EFFICIENCY, wire_bytes
from trainer.planning.search import Layout, search
from trainer.planning.simulate import Simulation
from trainer.runtime.accelerators import ACCELERATORS, SHORT_NAMES, AcceleratorSpec
from trainer.system.process import cores, meminfo
from trainer.system.units import GIB

DAY_S = 86400
ROWS = 24
RATES = {
    "bandwidth": "memory_bandwidth",
    "link": "intra_node_bandwidth",
    "network": "inter_node_bandwidth",
    "host_link": "pcie_bandwidth",
    "host_bandwidth": "host_memory_bandwidth",
}
"""Flag -> field of AcceleratorSpec."""
TIGHT = 0.1
"""Share of the memory below which what is left may be lost to fragments."""


# ---------------------------------------------------------------- what is printed


def gib(size: float) -> str:
    return f"{size / 2**20:,.2f} MiB" if 0 < size < GIB / 10 else f"{size / GIB:,.2f} GiB"


def by_group(simulation: Simulation) -> dict[str, Counter[str]]:
    """Bytes at the peak of the embedding, all blocks, the output; by kind."""
    groups: dict[str, Counter[str]] = {}
    for module, kinds in simulation.by_module.items():
        groups.setdefault(module.partition(".")[0] or "(the rest)", Counter()).update(kinds)
    return groups


def headline(plan: RunEstimate, device: str) -> str:
    model, resolved = plan.config.model, plan.resolved
    parameters = f"{model.name}/{model.size}, {resolved.num_parameters:,} parameters"
    return f"{plan.config.run.name}: {parameters}, {resolved.dims.world_size} x {device} ({resolved.dims})"


def told(plan: RunEstimate, device: str, tokens: float) -> str:
    config, resolved, largest, slowest = plan.config, plan.resolved, plan.largest, plan.slowest
    lines = [
        headline(plan, device),
        f"{config.training.global_batch_size} samples of {config.training.seq_len} tokens a step, in {resolved.grad_accum} "
        f"microbatches on each rank",
        "",
        "memory of a rank at its peak",
        f"  {'':<24}" + "".join(f"{f'rank {s.rank}':>14}" for s in plan.simulations),
    ]
    for kind in KINDS:
        lines.append(f"  {kind:<24}" + "".join(f"{gib(s.by_kind[kind]):>14}" for s in plan.simulations))
    lines.append(f"  {'together':<24}" + "".join(f"{gib(s.peak):>14}" for s in plan.simulations))
    if largest.host:
        lines.append(f"  {'host memory':<24}" + "".join(f"{gib(s.host):>14}" for s in plan.simulations))
    lines += [f"  rank {largest.rank}: in {largest.at}"]
    lines += ["", f"where rank {largest.rank} has it"]
    for group, kinds in by_group(largest).items():
        parts = ", ".join(f"{kind} {gib(size)}" for kind, size in kinds.most_common() if size > 0.005 * largest.peak)
        lines.append(f"  {group:<16}{gib(kinds.total()):>12}" + f"  ({parts})" * bool(parts))
    lines += ["", f"what rank {largest.rank} sends in a step"]
    for (axis, collective), seen in sorted(largest.traffic.items()):
        ranks = len(largest.group_ranks[axis])
        sent = gib(wire_bytes(collective, seen.size, ranks))
        lines.append(f"  {axis:<14}{ranks:>6} ranks {collective:<16}{seen.count:>9,.0f} times {sent:>14}")
    together = min(plan.board.gpus_per_node, resolved.dims.world_size)
    flops = sum(flops * times for (_, flops, _), times in plan.simulations[plan.times.index(slowest)].work.items())
    lines += [
        "",
        f"time of a step: {slowest.total_s:.3g} s, {100 * plan.mfu:.1f} % MFU, {plan.tokens_per_second:,.0f} tokens per second, "
        f"{plan.tokens_per_second * DAY_S:,.3g} a day; bound by {slowest.bound}",
        f"  matrix products {slowest.matmuls_s:.3g} s ({flops / 1e12:,.4g} TFLOP), other operators {slowest.memory_s:.3g} s, "
        f"waiting for collectives {slowest.exposed_comm_s:.3g} s, collectives beside them {slowest.overlapped_comm_s:.3g} s"
        + f", bubble {100 * slowest.bubble:.1f} %"
        * (slowest.bubble > 0),
        f"  assumed: {100 * FLOPS_EFFICIENCY:.0f} % of {plan.board.flops[config.training.compute_dtype] / 1e12:,g} TFLOP/s, "
        f"{100 * BANDWIDTH_EFFICIENCY:.0f} % of {plan.board.memory_bandwidth / 1e9:,.0f} GB/s of memory, {100 * NETWORK_EFFICIENCY:.0f} % of "
        f"{plan.board.intra_node_bandwidth / 1e9:,.0f} GB/s in a machine of {together} and of {plan.board.inter_node_bandwidth / 1e9:,.0f} "
        "GB/s to others",
    ]
    if largest.host:
        lines.append(
            f"  copies to and from host memory beside it {slowest.host_copies_s:.3g} s, the update there "
            f"{slowest.host_update_s:.3g} s; {100 * NETWORK_EFFICIENCY:.0f} % of {plan.board.pcie_bandwidth / 1e9:,.0f} GB/s, "
            f"{100 * BANDWIDTH_EFFICIENCY:.0f} % of {plan.board.host_memory_bandwidth / 1e9:,.0f} GB/s of memory"
        )
    if tokens:
        days = tokens / plan.tokens_per_second / DAY_S
        lines.append(
            f"  {tokens:,.3g} tokens: {days:,.1f} days, {days * resolved.dims.world_size * 24:,.0f} device hours"
        )
    lines += [f"checkpoint: {gib(plan.checkpoint)}", *verdicts(plan)]
    return "\n".join(lines)


def verdicts(plan: RunEstimate) -> list[str]:
    if not plan.largest.host:
        return [verdict(plan)]
    share = f"{plan.board.host_memory_gib:g} GiB, a device's share"
    if plan.host_left < 0:
        return [verdict(plan), f"host memory: does not fit: {gib(-plan.host_left)} more than {share}"]
    return [verdict(plan), f"host memory: fits: {gib(plan.host_left)} left of {share}"]


def verdict(plan: RunEstimate) -> str:
    """On the device."""
    have = f"{plan.board.memory_gib:.4g} GiB less {gib(plan.reserve)} that the allocator does not get"
    if plan.left < 0:
        return f"does not fit: {gib(-plan.left)} more than {have}"
    share = plan.left / (plan.board.memory_gib * GIB)
    tight = "; tight, for fragments may take a tenth" if share < TIGHT else ""
    return f"fits: {gib(plan.left)} left of {have}{tight}"


def ranking(there: int, found: Sequence[tuple[Layout, RunEstimate]]) -> str:
    """there: legal layouts; found: those that were simulated."""
    lines = [f"{len(found)} of {there} layouts simulated", ""]
    lines.append(f"{'tokens/s':>12} {'MFU':>6} {'memory':>11}        bound by")
    for layout, made in found:
        fits = "" if made.fits else "no fit"
        lines.append(
            f"{made.tokens_per_second:>12,.0f} {100 * made.mfu:>5.1f}% {gib(made.largest.peak):>11} {fits:<6} "
            f"{made.slowest.bound:<28} {layout}"
        )
    best = found[0][0] if found else None
    if best is None or not found[0][1].fits:
        lines += ["", "none of them fits"]
    elif best.settings:
        lines += ["", best.toml(), "", "or: " + " ".join(best.flags())]
    return "\n".join(lines)


def as_json(plan: RunEstimate) -> str:
    time = plan.slowest
    return json.dumps(
        {
            "world_size": plan.resolved.dims.world_size,
            "parameters": plan.resolved.num_parameters,
            "fits": plan.fits,
            "left_bytes": int(plan.left),
            "host_left_bytes": int(plan.host_left),
            "ranks": [_rank_as_json(simulation) for simulation in plan.simulations],
            "step_time_s": time.total_s,
            "mfu_percent": 100 * plan.mfu,
            "tokens_per_second": plan.tokens_per_second,
            "bound": time.bound,
            "matmuls_s": time.matmuls_s,
            "memory_s": time.memory_s,
            "collectives_s": dict(time.collectives_s),
            "host_copies_s": time.host_copies_s,
            "host_update_s": time.host_update_s,
            "bubble": time.bubble,
            "checkpoint_bytes": plan.checkpoint,
        },
        indent=1,
    )


def _rank_as_json(simulation: Simulation) -> dict[str, Any]:
    return {
        "rank": simulation.rank,
        "peak_bytes": simulation.peak,
        "at": str(simulation.at),
        "by_kind": simulation.by_kind,
        "by_module": simulation.by_module,
        "host_bytes": simulation.host,
        "traffic": [
            {"axis": axis, "collective": collective, "count": seen.count, "bytes": seen.size}
            for (axis, collective), seen in simulation.traffic.items()
        ],
        "flops": sum(flops * times for (_, flops, _), times in simulation.work.items()),
    }


# ---------------------------------------------------------------- the command


def this_machine() -> AcceleratorSpec:
    """A rank on this machine's CPU. Its rates are those of a common core, to be replaced by measured ones."""
    memory_gib = meminfo("MemTotal") / GIB
    return AcceleratorSpec(
        flops={"bf16": 1e11 * cores(), "fp32": 5e10 * cores()},
        memory_gib=memory_gib,
        host_memory_gib=memory_gib,
        host_memory_bandwidth=1e10 * cores(),
        pcie_bandwidth=1e10 * cores(),
        memory_bandwidth=1e10 * cores(),
        intra_node_bandwidth=2e9,
        inter_node_bandwidth=1e9,
        gpus_per_node=10**6,
    )


def board_of(arguments: argparse.Namespace) -> AcceleratorSpec:
    board = this_machine() if arguments.device == "cpu" else ACCELERATORS[SHORT_NAMES[arguments.device]]
    words = vars(arguments)
    given = {field: 1e9 * words[f"{flag}_gbs"] for flag, field in RATES.items() if words[f"{flag}_gbs"]}
    given |= {name: words[name] for name in ("memory_gib", "host_memory_gib") if words[name]}
    if arguments.gpus_per_node:
        given["gpus_per_node"] = arguments.gpus_per_node
    if arguments.peak_tflops:
        given["flops"] = dict.fromkeys(board.flops, 1e12 * arguments.peak_tflops)
    return replace(board, **given)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Arguments(__doc__, settings=True)
    parser.add_argument("--world", type=positive_int, default=8)
    parser.add_argument("--device", choices=[*SHORT_NAMES, "cpu"], default="h100")
    parser.add_argument("--tokens", type=positive_float, default=0.0)
    parser.add_argument("--reserve-gib", type=non_negative_float, default=2.0)
    for name in ("memory_gib", "host_memory_gib", "peak_tflops", *(f"{rate}_gbs" for rate in RATES)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive_float)
    parser.add_argument("--per-machine", type=positive_int)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--rows", type=positive_int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", type=Path)
    arguments, settings = parser.parse_known_args(argv)
    if arguments.search and (arguments.json or arguments.tokens or arguments.picture):
        parser.error("--search prints a table: not with --json, --tokens or --picture")
    if arguments.rows and not arguments.search:
        parser.error(f"--rows {arguments.rows}: of a table; needs --search")
    of_host = [name for name in ("host_memory_gib", "host_link_gbs", "host_bandwidth_gbs") if vars(arguments)[name]]
    if of_host and arguments.device == "cpu":
        parser.error(f"--{of_host[0].replace('_', '-')}: not with --device cpu, which has no other memory")
    return arguments, settings


def main() -> None:
    arguments, settings = parse(sys.argv[1:])
    config = config_from_command_line(settings, check_files=False)
    on_gpu = arguments.device != "cpu"
    board, reserve = board_of(arguments), arguments.reserve_gib * GIB * on_gpu
    if reserve >= board.memory_gib * GIB:
        die(f"--reserve-gib {arguments.reserve_gib:g}: more than the {board.memory_gib:g} GiB that there are")
    with one_line_errors(config):
        figure = canvas(arguments.picture) if arguments.picture else None
        if arguments.search:
            there, found = search(config, arguments.world, board, reserve, on_gpu, arguments.rows or ROWS)
            print(ranking(there, found))
            sys.exit(0 if found and found[0][1].fits else 1)
        made = plan(config, arguments.world, board, reserve, on_gpu)
    if figure is not None:
        draw(figure, arguments.picture, made.largest, headline(made, arguments.device), board.memory_gib)
    print(as_json(made) if arguments.json else told(made, arguments.device, arguments.tokens))
    sys.exit(0 if made.fits else 1)


if __name__ == "__main__":
    run_to_end(main)

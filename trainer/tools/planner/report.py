"""Reports of an estimate: text, JSON, and a table of candidates."""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.base.system.spelling import counted
from trainer.base.system.units import GIB, format_bytes
from trainer.tools.planner.estimate import FRAGMENTATION, Hardware, RunEstimate
from trainer.tools.planner.peak import explain, remedies
from trainer.tools.planner.recorded import MEMORY_CATEGORIES
from trainer.tools.planner.roofline import BANDWIDTH_EFFICIENCY, FLOPS_EFFICIENCY, NETWORK_EFFICIENCY, wire_bytes
from trainer.tools.planner.search import Candidate
from trainer.tools.planner.simulate import Simulation

_DAY_S = 86400
_TIME_UNITS = (("days", _DAY_S), ("hours", 3600), ("minutes", 60), ("seconds", 1))


def headline(estimate: RunEstimate, device: str) -> str:
    resolved = estimate.resolved
    parameters = f"{resolved.model_name}, {resolved.num_parameters:,} parameters"
    return f"{estimate.config.run.name}: {parameters}, {resolved.dims.world_size} x {device} ({resolved.dims})"


def as_text(estimate: RunEstimate, device: str, tokens: float | None, price: float | None) -> str:
    """Return the report for a terminal.

    Args:
        device: Value of --device.
        tokens: Number of tokens whose duration is reported, beside the duration of the run's steps. None: only the latter.
        price: Price of a device for an hour. None: no price.
    """
    training = estimate.config.training
    step = f"{counted(training.largest_batch_size, 'sample')} of {training.seq_len} tokens per step"
    if training.batch_schedule:
        step += " (the largest batch, of which memory, traffic and step time are)"
    lines = [
        headline(estimate, device),
        f"{step}, {counted(estimate.resolved.grad_accum, 'microbatch', plural='microbatches')} on each rank",
        "",
        *_memory_lines(estimate),
        "",
        *_traffic_lines(estimate.largest),
        "",
        *_time_lines(estimate, tokens, price),
        f"checkpoint: {format_bytes(estimate.checkpoint_bytes)}",
        *_verdict_lines(estimate),
    ]
    return "\n".join(lines)


def _memory_lines(estimate: RunEstimate) -> list[str]:
    def row(name: str, cells: Iterable[str]) -> str:
        return f"  {name:<24}" + "".join(f"{cell:>14}" for cell in cells)

    simulations, largest = estimate.simulations, estimate.largest
    lines = ["peak memory of a rank", row("", (f"rank {s.rank}" for s in simulations))]
    lines += [row(c, (format_bytes(s.by_category[c]) for s in simulations)) for c in MEMORY_CATEGORIES]
    lines.append(row("total", (format_bytes(s.peak) for s in simulations)))
    if largest.host:
        lines.append(row("host memory", (format_bytes(s.host) for s in simulations)))
    lines += [f"  {explain(estimate)}", "", f"memory of rank {largest.rank} by module"]
    groups: dict[str, Counter[str]] = {}
    for module, categories in largest.by_module.items():  # one group for all blocks
        groups.setdefault(module.partition(".")[0] or "(other)", Counter()).update(categories)
    for group, categories in groups.items():
        large = [f"{name} {format_bytes(n)}" for name, n in categories.most_common() if n > 0.005 * largest.peak]
        detail = f"  ({', '.join(large)})" if large else ""
        lines.append(f"  {group:<16}{format_bytes(categories.total()):>12}{detail}")
    return lines


def _traffic_lines(simulation: Simulation) -> list[str]:
    lines = [f"communication of rank {simulation.rank} per step"]
    for (axis, collective), calls in sorted(simulation.traffic.items()):
        ranks = len(simulation.group_ranks[axis])
        sent = format_bytes(wire_bytes(collective, calls.num_bytes, ranks))
        lines.append(f"  {axis:<14}{ranks:>6} ranks {collective:<16}{calls.count:>9,.0f} calls {sent:>14}")
    return lines


def _time_lines(estimate: RunEstimate, tokens: float | None, price: float | None) -> list[str]:
    time, accelerator, rate = estimate.slowest, estimate.hardware.accelerator, estimate.tokens_per_second
    world_size = estimate.hardware.world_size
    flops = estimate.simulations[estimate.times.index(time)].flops
    peak_flops = accelerator.flops[estimate.config.training.compute_dtype]
    compute, memory, network = (
        f"{100 * e:.0f} %" for e in (FLOPS_EFFICIENCY, BANDWIDTH_EFFICIENCY, NETWORK_EFFICIENCY)
    )
    bubble = f", bubble {100 * time.bubble:.1f} %" if time.bubble > 0 else ""
    lines = [
        f"step time: {time.total_s:.3g} s, {100 * estimate.mfu:.1f} % MFU, {rate:,.0f} tokens per second "
        f"({rate / world_size:,.0f} per device), {rate * _DAY_S:,.3g} per day; bound by {time.bound}",
        f"  matmuls {time.matmuls_s:.3g} s ({flops / 1e12:,.4g} TFLOP), other operators {time.memory_s:.3g} s, exposed "
        f"collectives {time.exposed_comm_s:.3g} s, overlapped collectives {time.overlapped_comm_s:.3g} s{bubble}",
        f"  assumed: {compute} of {peak_flops / 1e12:,g} TFLOP/s, {memory} of {accelerator.memory_bandwidth / 1e9:,.0f} GB/s "
        f"memory bandwidth, {network} of {accelerator.intra_node_bandwidth / 1e9:,.0f} GB/s in a node of "
        f"{min(accelerator.gpus_per_node, world_size)} and of {accelerator.inter_node_bandwidth / 1e9:,.3g} GB/s between nodes",
        f"  figures of the device: {accelerator.source}",
    ]
    if estimate.resolved.dims.ep > 1:
        lines.append(f"  {imbalance_text(estimate.expert_imbalance)}")
    if estimate.largest.host:
        lines.append(
            f"  overlapped copies to and from host memory {time.host_copies_s:.3g} s, update in host memory "
            f"{time.host_update_s:.3g} s; assumed: {network} of {accelerator.pcie_bandwidth / 1e9:,.0f} GB/s, "
            f"{memory} of {accelerator.host_memory_bandwidth / 1e9:,.0f} GB/s memory bandwidth"
        )
    lines.append(f"  {run_duration(estimate, price)}")
    if tokens:
        lines.append(f"  {tokens:,.3g} tokens: {_duration(tokens / rate, world_size, price)}")
    return lines


def imbalance_text(imbalance: float) -> str:
    """Return what is assumed about the load of experts as text. imbalance: see RunEstimate."""
    rows = (
        f"the busiest rank gets {1 + imbalance:g} times the mean rows"
        if imbalance
        else "every rank gets equally many rows"
    )
    return f"assumed of the experts of an ep group: {rows} (--expert-imbalance {imbalance:g})"


def run_duration(estimate: RunEstimate, price: float | None) -> str:
    """Return the text about the duration of the run's steps. price: price of a device for an hour."""
    if estimate.run_s is None:
        return unknown_length(estimate)
    steps, tokens = estimate.config.training.steps, estimate.tokens_per_second * estimate.run_s
    duration = _duration(estimate.run_s, estimate.hardware.world_size, price)
    return f"{counted(steps, 'step', ',')} ({tokens:,.3g} tokens): {duration}"


def unknown_length(estimate: RunEstimate) -> str:
    """Return the text about the length of a run with training.epochs."""
    epochs = counted(estimate.config.training.epochs, "epoch", "g")
    return f"{epochs}: the length in steps is known only when the data are prepared"


def time_text(seconds: float) -> str:
    """Return a duration as text, in the largest unit of which it has at least two."""
    unit, unit_s = next((u for u in _TIME_UNITS if seconds >= 2 * u[1]), _TIME_UNITS[-1])
    return f"{seconds / unit_s:,.1f} {unit}"


def _duration(seconds: float, world_size: int, price: float | None) -> str:
    device_hours = seconds / 3600 * world_size
    devices = counted(world_size, "device", ",")
    text = f"at least {time_text(seconds)} on {devices}, {device_hours:,.4g} device hours"
    return f"{text}, price {device_hours * price:,.2f}" if price else text


def _verdict_lines(estimate: RunEstimate) -> list[str]:
    accelerator, free = estimate.hardware.accelerator, estimate.free_bytes
    usable = f"{accelerator.memory_gib:.4g} GiB minus {format_bytes(estimate.hardware.reserved_bytes)} reserved"
    is_tight = 0 <= free < estimate.margin_bytes
    tight = f"; tight: {margin_text(estimate)} should stay free" if is_tight else ""
    lines = [_verdict(free, usable) + tight]
    if (is_tight or free < 0) and (flags := remedies(estimate)):
        lines.append(f"to need less memory: {' or '.join(flags)} (docs/memory.md)")
    if estimate.largest.host:
        share = f"{accelerator.host_memory_gib:g} GiB, the share of one device"
        lines.append(f"host memory: {_verdict(estimate.host_free_bytes, share)}")
    return lines


def _verdict(free_bytes: float, memory: str) -> str:
    if free_bytes < 0:
        return f"does not fit: needs {format_bytes(-free_bytes)} more than {memory}"
    return f"fits: {format_bytes(free_bytes)} free of {memory}"


def margin_text(estimate: RunEstimate) -> str:
    """Return the size of the margin and its parts as text."""
    fragmentation = FRAGMENTATION * estimate.hardware.accelerator.memory_gib * GIB
    parts = "a tenth of the memory for fragmentation"
    if estimate.margin_bytes > fragmentation:
        parts += ", and a sixth of the peak because compiled blocks without recomputation may need it"
    return f"{format_bytes(estimate.margin_bytes)} ({parts})"


def ranking(
    num_layouts: int,
    found: Sequence[tuple[Candidate, RunEstimate]],
    given: Mapping[str, str],
    price: float | None,
    is_complete: bool = True,
) -> str:
    """Return the table of candidates as text.

    Args:
        num_layouts: Number of legal layouts.
        found: Simulated candidates, best first.
        given: Flag of the command line -> value, for the settings with which the search was started.
        price: Price of a device for an hour. None: no price.
        is_complete: Whether the search has ended by itself.
    """
    simulated = f"{len(found)} of {counted(num_layouts, 'layout')} simulated"
    lines = [simulated if is_complete else f"the search was interrupted: {simulated}", ""]
    lines.append(f"{'tokens/s':>12} {'per device':>10} {'MFU':>6} {'memory':>11}        bound by")
    for candidate, estimate in found:
        fits = ("tight" if estimate.is_tight else "") if estimate.fits else "no fit"
        rate = estimate.tokens_per_second
        lines.append(
            f"{rate:>12,.0f} {rate / estimate.hardware.world_size:>10,.0f} {100 * estimate.mfu:>5.1f}% "
            f"{format_bytes(estimate.largest.peak):>11} {fits:<6} {estimate.slowest.bound:<28} {candidate}"
        )
    if any(estimate.resolved.dims.ep > 1 for _, estimate in found):
        lines += ["", imbalance_text(found[0][1].expert_imbalance)]
    best, estimate = found[0]
    so_far = "" if is_complete else f" of the {len(found)} simulated before the interrupt"
    if not estimate.fits:
        return "\n".join([*lines, "", "none of the simulated layouts fits"])
    if any(other.is_tight for _, other in found):
        lines += ["", "tight: fits, but leaves less memory free than fragmentation and the compiler may need"]
        if estimate.is_tight:
            lines.append(
                f"every simulated layout that fits is tight; of the best one, {margin_text(estimate)} should stay free"
            )
    chosen = [f"the configured layout is the best{so_far}"]
    if best.settings:
        command = _file_command(best, given, estimate.hardware)
        title = [f"the best layout{so_far}:", ""] if so_far else []
        chosen = [*title, best.toml(), "", f"or, to write a complete file: {command}"]
    return "\n".join([*lines, "", *chosen, "", run_duration(estimate, price)])


def _file_command(best: Candidate, given: Mapping[str, str], hardware: Hardware) -> str:
    """Return the command that writes a configuration file with the settings of a candidate. given: as in `ranking`."""
    flags = {**given, **best.flags()}  # a flag must not be given twice
    words = ["python", "scripts/plan.py", *(word for flag in flags.items() for word in flag), "--print-config"]
    name = f"{best.config.run.name}_{hardware.world_size}{'gpus' if hardware.is_gpu else 'ranks'}.toml"
    return f"{shlex.join(words)} > {shlex.quote(name)}"


def as_json(estimate: RunEstimate) -> str:
    time = estimate.slowest
    return json.dumps(
        {
            "world_size": estimate.resolved.dims.world_size,
            "parameters": estimate.resolved.num_parameters,
            "fits": estimate.fits,
            "is_tight": estimate.is_tight,
            "free_bytes": int(estimate.free_bytes),
            "margin_bytes": int(estimate.margin_bytes),
            "host_free_bytes": int(estimate.host_free_bytes),
            "peak": explain(estimate),
            "ranks": [_rank_as_json(simulation) for simulation in estimate.simulations],
            "step_time_s": time.total_s,
            "mfu_percent": 100 * estimate.mfu,
            "tokens_per_second": estimate.tokens_per_second,
            "tokens_per_second_per_device": estimate.tokens_per_second / estimate.hardware.world_size,
            "run_s": estimate.run_s,
            "bound": time.bound,
            "matmuls_s": time.matmuls_s,
            "memory_s": time.memory_s,
            "collectives_s": dict(time.collectives_s),
            "expert_imbalance": estimate.expert_imbalance,
            "host_copies_s": time.host_copies_s,
            "host_update_s": time.host_update_s,
            "bubble": time.bubble,
            "checkpoint_bytes": estimate.checkpoint_bytes,
        },
        indent=1,
    )


def _rank_as_json(simulation: Simulation) -> dict[str, Any]:
    return {
        "rank": simulation.rank,
        "peak_bytes": simulation.peak,
        "peak_at": str(simulation.peak_at),
        "by_category": simulation.by_category,
        "by_module": simulation.by_module,
        "host_bytes": simulation.host,
        "traffic": [
            {"axis": axis, "collective": collective, "count": calls.count, "bytes": calls.num_bytes}
            for (axis, collective), calls in simulation.traffic.items()
        ],
        "flops": simulation.flops,
    }

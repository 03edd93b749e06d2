"""Search for the fastest parallel layouts that fit and leave a margin of memory."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from models.mixture_sizes import MixtureSizes, PartlySparseSizes
from trainer.base.config import Config, ConfigError, compatibility
from trainer.base.config.toml_text import toml_value
from trainer.base.system.console import Progress, progress
from trainer.base.system.process import cores
from trainer.base.system.spelling import counted
from trainer.parallel.mesh import ParallelDims
from trainer.parallel.stages import stages_per_rank
from trainer.run.resolve import ResolvedRun, resolve, resolve_model
from trainer.run.resources import OwnParameters, minimum_memory
from trainer.runtime.device import DTYPES
from trainer.tools.planner.estimate import Hardware, RunEstimate, check_imbalance, margin_bytes, representative_ranks
from trainer.tools.planner.roofline import OVERLAPPED_AXES, collective_s, pipeline_bubble, step_time
from trainer.tools.planner.simulate import Simulation, blocks_per_rank, num_blocks, simulate_each, without_compiler

_MAX_PP = 16
_MODES = ("none", "selective", "full")
_RESET = {"pipeline_stages_per_rank": 0, "pipeline_split_points": (), "reshard_after_forward": "default"}
"""Settings of [parallel] that suit only the configured layout, with their defaults. All other candidates use the defaults."""
_HOPELESS = 0.95
"""Fraction of the best simulated speed. Candidates whose likely speed is not above this fraction are not simulated."""

_IMPORT_BLOCKS = 50
"""Number of simulated blocks that take as long as the import of torch before the first simulation. Without them, the remaining
time would be too long at first."""


@dataclass(frozen=True)
class Candidate:
    settings: dict[str, dict[str, Any]]
    """The settings that the candidate changes: section -> name -> value. The dict is empty for the configured layout."""
    config: Config
    resolved: ResolvedRun

    def toml(self) -> str:
        lines = []
        for section, values in self.settings.items():
            if values:
                lines += [f"[{section}]", *(f"{name} = {toml_value(value)}" for name, value in values.items())]
        return "\n".join(lines)

    def flags(self) -> dict[str, str]:
        """Return flag of the command line -> value as text."""
        values = {f"--{s}.{name}": value for s, values in self.settings.items() for name, value in values.items()}
        return {flag: toml_value(value).strip('"') for flag, value in values.items()}

    def __str__(self) -> str:
        config = self.config
        words = [str(self.resolved.dims), f"checkpointing {config.activation_checkpoint.mode}"]
        if config.training.reduce_every_microbatch:
            words.append("reduce every microbatch")
        if self.resolved.dims.pp > 1:
            words.append(config.parallel.pipeline_schedule)
        return ", ".join(words) + ("" if self.settings else " (as configured)")


def _powers_of_two(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length())]


def candidates(config: Config, hardware: Hardware) -> list[Candidate]:
    """Return every legal layout with every mode of activation checkpointing. tp is at most a node's size; cp is as configured; ep
    is 1 for a model without experts."""
    compatibility.check(config, hardware.facts())
    limit_tp = min(hardware.accelerator.gpus_per_node, hardware.world_size)
    _, sizes = resolve_model(config.model)
    n_experts = sizes.n_experts if isinstance(sizes, MixtureSizes) else 1
    found = []
    for tp, pp in product(_powers_of_two(limit_tp), _powers_of_two(_MAX_PP)):
        schedules = ("1F1B", "Interleaved1F1B") if pp > 1 else ("",)
        degrees = _common_divisors(n_experts, hardware.world_size // pp)
        modes = product(schedules, _MODES, (False,) if pp > 1 else (False, True), degrees)
        for schedule, mode, reduce_every, ep in modes:
            settings = _settings(config, tp, pp, ep, schedule, mode, reduce_every)
            sections = {section: replace(getattr(config, section), **values) for section, values in settings.items()}
            changed = replace(config, **sections)
            with suppress(ConfigError):
                resolved = resolve(without_compiler(changed), hardware.world_size)
                if not (reduce_every and resolved.grad_accum == 1):  # equal to the layout without reduce_every
                    found.append(Candidate(settings, changed, resolved))
    return found


def _common_divisors(a: int, b: int) -> list[int]:
    common = math.gcd(a, b)
    return [n for n in range(1, common + 1) if common % n == 0]


def _settings(
    config: Config, tp: int, pp: int, ep: int, schedule: str, mode: str, reduce_every: bool
) -> dict[str, dict[str, Any]]:
    """Return the settings of a layout. Settings that suit only the configured layout are reset to their defaults."""
    parallel = {"dp_replicate": 1, "dp_shard": -1, "cp": config.parallel.cp, "tp": tp, "pp": pp}
    if ep > 1 or config.parallel.ep > 1:
        parallel["ep"] = ep
    if schedule:
        parallel["pipeline_schedule"] = schedule
    parallel |= {name: value for name, value in _RESET.items() if getattr(config.parallel, name) != value}
    settings = {"parallel": parallel, "activation_checkpoint": {"mode": mode}, "training": {}}
    if pp == 1 or config.training.reduce_every_microbatch:
        settings["training"]["reduce_every_microbatch"] = reduce_every
    return settings


# ---------------------------------------------------------------- ranking


_Family = tuple[int, str, bool]
"""(tp, mode of activation checkpointing, whether ep > 1). Candidates of the same family have equal block costs: ep changes only
the traffic, which is computed from its size."""


@dataclass(frozen=True)
class _BlockCost:
    """Cost of one transformer block and one microbatch on a rank."""

    activation_bytes: float
    computing_s: float
    """Time of the operators."""
    traffic: Mapping[tuple[str, str], float]
    """(axis, collective) -> size of the full tensors, in bytes."""
    ep: int
    """Degree with which the cost was measured. The parameters that efsdp gathers are proportional to 1 / ep."""


def _family(candidate: Candidate) -> _Family:
    dims = candidate.resolved.dims
    return dims.tp, candidate.config.activation_checkpoint.mode, dims.ep > 1


def _block_costs(found: Sequence[Candidate], simulator: "_Simulator", most: int) -> dict[_Family, _BlockCost]:
    """Return the cost of each family: the difference between the costs of two small models, divided by the difference in their
    numbers of blocks. most: maximum number of candidates that are simulated later."""
    # The first candidate of a family has the smallest ep, with which efsdp has the most ranks.
    families = {_family(candidate): candidate for candidate in reversed(found)}
    depth = found[0].config.activation_checkpoint.every_n_blocks
    world_size = simulator.hardware.world_size
    shallow = [_shallow(c, n, world_size) for c in families.values() for n in (depth, 2 * depth)]
    blocks = [num_blocks(config, resolve(without_compiler(config), world_size)) for config in shallow]
    blocks[0] += _IMPORT_BLOCKS
    later = most * _total_blocks(found) / len(found)  # it is not known yet which
    simulator.announce(f"measuring blocks for at most {most} of {counted(len(found), 'layout')}", sum(blocks) + later)
    simulations = simulator.run([(config, 0) for config in shallow], blocks)
    return {
        family: _block_cost(once, twice, depth, candidate.resolved.dims.ep, simulator.hardware)
        for (family, candidate), once, twice in zip(families.items(), simulations[::2], simulations[1::2], strict=True)
    }


def _shallow(candidate: Candidate, n_layers: int, world_size: int) -> Config:
    """Return a copy of the configuration with n_layers blocks, one microbatch and no pipeline. All blocks have experts if any
    block of the model has: an upper bound."""
    config, sizes = candidate.config, candidate.resolved.sizes
    overrides = config.model.overrides | {"n_layers": n_layers}
    if isinstance(sizes, PartlySparseSizes):
        overrides["sparse_layers"] = (True,)
    ranks = world_size // (config.parallel.cp * config.parallel.tp)
    batch = ranks * config.training.local_batch_size
    return replace(
        config,
        model=replace(config.model, overrides=overrides),
        parallel=replace(config.parallel, pp=1),
        training=replace(config.training, global_batch_size=batch, batch_schedule={}, reduce_every_microbatch=False),
    )


def _block_cost(once: Simulation, twice: Simulation, depth: int, ep: int, hardware: Hardware) -> _BlockCost:
    """Return the cost of a block, from models with `depth` and with 2 * depth blocks."""

    def of(simulation: Simulation) -> tuple[int, float]:
        time = step_time(simulation, hardware.accelerator, bubble=0.0)
        return max(simulation.timeline["activations"]), time.matmuls_s + time.memory_s

    (bytes_once, s_once), (bytes_twice, s_twice) = of(once), of(twice)
    traffic = {
        key: (calls.num_bytes - (once.traffic[key].num_bytes if key in once.traffic else 0)) / depth
        for key, calls in twice.traffic.items()
    }
    return _BlockCost((bytes_twice - bytes_once) / depth, (s_twice - s_once) / depth, traffic, ep)


def _likely_memory(candidate: Candidate, block_bytes: float) -> float:
    """Return the bytes that parameters, gradients, optimizer state, activations and receive buffers take on the first rank."""
    resolved, config = candidate.resolved, candidate.config
    dims, stages = resolved.dims, stages_per_rank(config.parallel)
    state, _ = minimum_memory(config, resolved, OwnParameters.mean(config, resolved))
    # Warm-up microbatches of 1F1B and of interleaved 1F1B (Narayanan et al. 2021).
    in_flight = dims.pp if stages == 1 else ((stages + 1) * dims.pp - 1) / stages
    activations = block_bytes * blocks_per_rank(resolved) * min(in_flight, resolved.grad_accum)
    hidden = math.prod(resolved.hidden_shape) * DTYPES[config.training.compute_dtype].itemsize
    received = hidden * resolved.grad_accum * (2 * stages - 1) if dims.pp > 1 else 0
    return state + activations + received


def _likely_speed(candidate: Candidate, cost: _BlockCost, hardware: Hardware) -> float:
    """Return the likely number of tokens per second."""
    resolved, training = candidate.resolved, candidate.config.training
    dims, exposed_s, overlapped_s = resolved.dims, cost.computing_s * resolved.grad_accum, 0.0
    for (axis, collective), num_bytes in cost.traffic.items():
        size = num_bytes * cost.ep / dims.ep if axis == "efsdp" else num_bytes
        seconds = collective_s(collective, size, _first_group(axis, dims), hardware.accelerator)
        if axis not in OVERLAPPED_AXES:
            exposed_s += seconds * resolved.grad_accum
            continue
        # A pipeline gathers parameters once for all microbatches.
        once = dims.pp > 1 or (collective != "all-gather" and not training.reduce_every_microbatch)
        overlapped_s += seconds if once else seconds * resolved.grad_accum
    step_s = blocks_per_rank(resolved) * max(exposed_s, overlapped_s)
    idle = pipeline_bubble(candidate.config.parallel, resolved.grad_accum)
    return training.largest_batch_size * training.seq_len / step_s * (1 - idle)


def _first_group(axis: str, dims: ParallelDims) -> range:
    """Return the ranks of rank 0's process group along a mesh axis (trainer/parallel/mesh.py)."""
    sizes = {
        "pp": (dims.pp, dims.ranks_per_stage),
        "dp_replicate": (dims.dp_replicate, dims.fsdp * dims.tp),
        "fsdp": (dims.fsdp, dims.tp),
        "tp": (dims.tp, 1),
        "batch": (dims.batch, dims.cp * dims.tp),
        "cp": (dims.cp, dims.tp),
        "loss": (dims.batch * dims.cp, dims.tp),
        "efsdp": (dims.efsdp, dims.ep),
        "ep": (dims.ep, 1),
        "world": (dims.world_size, 1),
    }
    size, stride = sizes[axis]
    return range(0, size * stride, stride)


def ranked(found: Sequence[Candidate], simulator: "_Simulator", most: int) -> list[tuple[float, bool, Candidate]]:
    """Return (likely tokens per second, whether it is likely tight, candidate) for each candidate that probably fits. Those that
    are likely tight come last, and faster ones come before slower ones. most: as in `_block_costs`."""
    costs, hardware = _block_costs(found, simulator, most), simulator.hardware
    likely = []
    for candidate in found:
        cost = costs[_family(candidate)]
        memory = _likely_memory(candidate, cost.activation_bytes)
        if memory < hardware.usable_bytes:
            is_tight = memory + margin_bytes(candidate.config, hardware, memory) > hardware.usable_bytes
            likely.append((_likely_speed(candidate, cost, hardware), is_tight, candidate))
    return sorted(likely, key=lambda entry: (entry[1], -entry[0]))


# ---------------------------------------------------------------- search


class _Simulator:
    """Runs the simulations of a search and shows their progress, in blocks that are simulated (`num_blocks`)."""

    def __init__(self, hardware: Hardware, imbalance: float, bar: Progress):
        """imbalance: as in `simulate_each`."""
        self.hardware, self.imbalance, self.bar = hardware, imbalance, bar

    def announce(self, what: str, remaining: float) -> None:
        """Show what the next simulations are for. remaining: number of blocks that the search has yet to simulate."""
        self.bar.total = self.bar.n + round(remaining)
        self.bar.set_description(what)

    def run(self, jobs: Sequence[tuple[Config, int]], blocks: Sequence[int]) -> list[Simulation]:
        """Simulate pairs (configuration, rank). blocks: number of blocks of each simulation."""
        hardware, simulations = self.hardware, []
        found = simulate_each(jobs, hardware.world_size, hardware.is_gpu, lambda: self.bar.update(0), self.imbalance)
        for count, simulation in zip(blocks, found, strict=True):
            simulations.append(simulation)
            self.bar.update(count)
        return simulations

    def estimates(self, batch: Sequence[Candidate]) -> list[RunEstimate]:
        jobs = [(candidate, rank) for candidate in batch for rank in representative_ranks(candidate.resolved)]
        blocks = [num_blocks(candidate.config, candidate.resolved) for candidate, _ in jobs]
        simulations = iter(self.run([(candidate.config, rank) for candidate, rank in jobs], blocks))
        of_ranks = [[next(simulations) for _ in representative_ranks(c.resolved)] for c in batch]
        return [
            RunEstimate(c.config, c.resolved, s, self.hardware, self.imbalance)
            for c, s in zip(batch, of_ranks, strict=True)
        ]


def _total_blocks(found: Sequence[Candidate]) -> int:
    return sum(num_blocks(c.config, c.resolved) * len(representative_ranks(c.resolved)) for c in found)


def search(
    config: Config, hardware: Hardware, max_candidates: int, expert_imbalance: float = 0.0
) -> Iterator[tuple[int, list[tuple[Candidate, RunEstimate]]]]:
    """Yield the number of legal layouts and the candidates that are simulated so far, with their estimates. The configured layout
    and the layouts that are probably the best are simulated. Layouts that leave the margin come first, then those that only fit.
    Faster layouts come before slower ones.

    Args:
        config: The configured run.
        hardware: On which it runs.
        max_candidates: Maximum number of layouts to simulate.
        expert_imbalance: As in `estimate`, but a rank of ep gets at most ep times the mean rows.

    Raises:
        ConfigError: No layout can run, none is likely to fit, or none can have this imbalance.
    """
    found = candidates(config, hardware)
    if not found:
        resolve(without_compiler(config), hardware.world_size)  # raises the reason
        raise ConfigError("", f"no parallel layout can run on {counted(hardware.world_size, 'rank')}")
    check_imbalance(expert_imbalance, max(found, key=lambda candidate: candidate.resolved.dims.ep).resolved)
    with progress(None, " blocks", "", is_bound=True) as bar:
        yield from _search(config, found, max_candidates, _Simulator(hardware, expert_imbalance, bar))


def _search(
    config: Config, found: Sequence[Candidate], max_candidates: int, simulator: _Simulator
) -> Iterator[tuple[int, list[tuple[Candidate, RunEstimate]]]]:
    likely = ranked(found, simulator, min(max_candidates, len(found)))
    with suppress(ConfigError):
        resolved = resolve(without_compiler(config), simulator.hardware.world_size)
        likely = [entry for entry in likely if entry[-1].config != config]
        likely.insert(0, (math.inf, False, Candidate({}, config, resolved)))
    if not likely:
        raise ConfigError("", f"none of the {len(found)} legal layouts is likely to fit")
    results: list[tuple[Candidate, RunEstimate]] = []
    while ahead := [candidate for *_, candidate in likely[: max_candidates - len(results)]]:
        batch = ahead[: cores()]
        last = len(results) + len(batch)
        simulator.announce(
            f"layouts {len(results) + 1} to {last} of at most {len(results) + len(ahead)}", _total_blocks(ahead)
        )
        results += zip(batch, simulator.estimates(batch), strict=True)
        best = max((e.tokens_per_second for _, e in results if e.fits and not e.is_tight), default=0.0)
        # A tight layout is simulated only if it is clearly faster than the best one with a margin.
        likely = [
            entry for entry in likely[len(batch) :] if entry[0] > (best / _HOPELESS if entry[1] else _HOPELESS * best)
        ]
        yield len(found), sorted(results, key=lambda pair: pair[1].sort_key)

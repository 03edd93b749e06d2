"""Which layouts a run could have, the likely good ones first."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from trainer.config import Config, ConfigError
from trainer.config.load import check_combinations
from trainer.config.schema import toml_value
from trainer.planning.estimate import RunEstimate, combine, pipeline_bubble, representative_ranks, strip_file_settings
from trainer.planning.roofline import BANDWIDTH_EFFICIENCY, FLOPS_EFFICIENCY, NETWORK_EFFICIENCY
from trainer.planning.simulate import simulate
from trainer.run.preflight import minimum_memory
from trainer.run.resolve import ResolvedRun, resolve
from trainer.runtime.accelerators import AcceleratorSpec
from trainer.system.process import cores
from trainer.system.units import GIB

_MOST_PP = 16
_DERIVED = {"pipeline_stages_per_rank": 0, "pipeline_split_points": (), "reshard_after_forward": "default"}
"""What fits one layout alone, and is left to the trainer."""
_SURE = 0.9
"""What even this share of its estimate says does not fit is not simulated."""

_KEPT = {"none": 31.0, "selective": 26.0, "full": 2.0}
"""Bytes that a block keeps for each token and each of its dim, by mode. For the sieve alone."""
_AGAIN = {"none": 0.0, "selective": 0.05, "full": 1 / 3}
"""Share of the computation that is done again. For the sieve alone."""


@dataclass(frozen=True)
class Layout:
    settings: dict[str, dict[str, Any]]
    """Section -> name -> value: what it changes in the configuration; none for what is configured."""
    config: Config
    resolved: ResolvedRun

    def toml(self) -> str:
        lines = []
        for section, values in self.settings.items():
            if not values:
                continue
            lines.append(f"[{section}]")
            lines += [f"{name} = {toml_value(value)}" for name, value in values.items()]
        return "\n".join(lines)

    def flags(self) -> list[str]:
        """The same, as on a command line."""
        named = {f"--{s}.{name}": value for s, values in self.settings.items() for name, value in values.items()}
        return [word for flag, value in named.items() for word in (flag, toml_value(value).strip('"'))]

    def __str__(self) -> str:
        config = self.config
        words = [str(self.resolved.dims), f"checkpointing {config.activation_checkpoint.mode}"]
        if config.training.reduce_every_microbatch:
            words.append("reduce every microbatch")
        if self.resolved.dims.pp > 1:
            words.append(config.parallel.pipeline_schedule)
        return ", ".join(words) + " (as configured)" * (not self.settings)


def _powers(most: int) -> Iterator[int]:
    n = 1
    while n <= most:
        yield n
        n *= 2


def layouts(config: Config, world_size: int, board: AcceleratorSpec) -> Iterator[Layout]:
    """All that are legal: tensor parallelism within a machine, cp as it is configured, every mode of checkpointing."""
    config = strip_file_settings(config)
    for tp in _powers(min(board.gpus_per_node, world_size)):
        for pp in _powers(min(_MOST_PP, world_size // tp)):
            schedules = ["1F1B", "Interleaved1F1B"] if pp > 1 else [""]
            for schedule in schedules:
                for mode in _KEPT:
                    for reduce_every in (False, True):
                        yield from _legal(config, world_size, tp, pp, schedule, mode, reduce_every)


def _legal(
    config: Config, world_size: int, tp: int, pp: int, schedule: str, mode: str, reduce_every: bool
) -> Iterator[Layout]:
    """The layout, if it can run and is not the same as another."""
    parallel = {"dp_replicate": 1, "dp_shard": -1, "cp": config.parallel.cp, "tp": tp, "pp": pp}
    if schedule:
        parallel["pipeline_schedule"] = schedule
    if reduce_every and pp > 1:
        return
    for name, value in _DERIVED.items():
        if getattr(config.parallel, name) != value:
            parallel[name] = value
    settings = {
        "parallel": parallel,
        "activation_checkpoint": {"mode": mode},
        "training": {"reduce_every_microbatch": reduce_every} if pp == 1 else {},
    }
    changed = replace(
        config,
        parallel=replace(config.parallel, **parallel),
        activation_checkpoint=replace(config.activation_checkpoint, mode=mode),
        training=replace(config.training, reduce_every_microbatch=reduce_every),
    )  # fmt: skip
    try:
        check_combinations(changed)
        resolved = resolve(changed, world_size)
    except ConfigError:
        return
    if not (reduce_every and resolved.grad_accum == 1):
        yield Layout(settings, changed, resolved)


# ---------------------------------------------------------------- the sieve


def estimate_memory(layout: Layout) -> float:
    """Bytes of a rank, roughly."""
    resolved, config = layout.resolved, layout.config
    dims = resolved.dims
    held = resolved.num_parameters / (dims.tp * dims.pp)
    gathered_gradients = resolved.grad_accum > 1 and not config.training.reduce_every_microbatch
    of_shards = minimum_memory(int(held / dims.fsdp), config.training, config.optimizer, config.parallel).device
    state = of_shards + held * 4 * gathered_gradients
    batch, seq, dim = resolved.hidden_shape
    tokens = batch * seq * (dims.tp if config.parallel.sequence_parallel else 1)
    blocks = sum(len(stage.blocks) for stage in resolved.stages) / dims.pp
    in_flight = min(dims.pp, resolved.grad_accum)
    kept = _KEPT[config.activation_checkpoint.mode] / (dims.tp if config.activation_checkpoint.mode != "full" else 1)
    return state + tokens * dim * kept * blocks * in_flight


def estimate_time(layout: Layout, board: AcceleratorSpec) -> float:
    """Seconds of a step, roughly."""
    resolved, config = layout.resolved, layout.config
    dims = resolved.dims
    tokens = config.training.global_batch_size * config.training.seq_len
    flops = resolved.flops_per_token * tokens / dims.world_size * (1 + _AGAIN[config.activation_checkpoint.mode])
    computing_s = flops / (board.flops[config.training.compute_dtype] * FLOPS_EFFICIENCY)
    mine = tokens / dims.batch / dims.cp
    blocks = sum(len(stage.blocks) for stage in resolved.stages) / dims.pp
    dim = resolved.hidden_shape[2]
    moving_s = mine / dims.tp * blocks * dim * 2 * 100 / (board.memory_bandwidth * BANDWIDTH_EFFICIENCY)
    exposed_comm_s = (
        (dims.tp > 1)
        * mine
        * blocks
        * dim
        * 2
        * 10
        * (1 - 1 / dims.tp)
        / (board.intra_node_bandwidth * NETWORK_EFFICIENCY)
    )
    gathers = resolved.grad_accum if dims.pp == 1 else 1
    reductions = gathers if config.training.reduce_every_microbatch else 1
    sent = resolved.num_parameters / (dims.tp * dims.pp) * (4 * gathers + 4 * reductions)
    spread = dims.fsdp * dims.tp > board.gpus_per_node
    rate = board.inter_node_bandwidth * max(1, board.gpus_per_node // dims.tp) if spread else board.intra_node_bandwidth
    overlapped_comm_s = (dims.fsdp > 1) * sent / (min(rate, board.intra_node_bandwidth) * NETWORK_EFFICIENCY)
    return max(computing_s + moving_s + exposed_comm_s, overlapped_comm_s) / (
        1 - pipeline_bubble(config.parallel, resolved.grad_accum)
    )


def search(
    config: Config, world_size: int, board: AcceleratorSpec, reserve: float, on_gpu: bool, rows: int
) -> tuple[int, list[tuple[Layout, RunEstimate]]]:
    """How many layouts there are; and of those that may fit the likely fastest, simulated, beside the one that is configured.
    Best first: those that fit by their tokens per second, then the others."""
    there = list(layouts(config, world_size, board))
    if not there:
        resolve(strip_file_settings(config), world_size)  # says why
        raise ConfigError("", f"no layout of {world_size} ranks can run")
    left = sorted(there, key=lambda layout: estimate_time(layout, board))
    room = board.memory_gib * GIB - reserve
    likely = []
    with suppress(ConfigError):
        as_it_is = strip_file_settings(config)
        likely.append(Layout({}, as_it_is, resolve(as_it_is, world_size)))
    plans: list[tuple[Layout, RunEstimate]] = []
    of_estimate: dict[tuple[str, str], float] = {}
    while True:
        # What was simulated shows how far the estimate is off for its like.
        left = [one for one in left if of_estimate.get(_like(one), _SURE) * estimate_memory(one) < room]
        likely += left[: min(cores(), rows - len(plans))]
        if not likely:
            return len(there), sorted(plans, key=lambda pair: (not pair[1].fits, -pair[1].tokens_per_second))
        left = [one for one in left if one not in likely]
        for layout, plan in _simulated(likely, world_size, board, reserve, on_gpu):
            plans.append((layout, plan))
            share = plan.largest.peak / estimate_memory(layout)
            of_estimate[_like(layout)] = min(share, of_estimate.get(_like(layout), share))
        likely = []


def _like(layout: Layout) -> tuple[str, str]:
    parallel = layout.config.parallel
    return layout.config.activation_checkpoint.mode, parallel.pipeline_schedule if parallel.pp > 1 else ""


def _simulated(
    some: Sequence[Layout], world_size: int, board: AcceleratorSpec, reserve: float, on_gpu: bool
) -> Iterator[tuple[Layout, RunEstimate]]:
    jobs = [(layout.config, rank) for layout in some for rank in representative_ranks(layout.resolved)]
    simulations = iter(simulate(jobs, world_size, on_gpu))
    for layout in some:
        of_layout = [next(simulations) for _ in representative_ranks(layout.resolved)]
        yield layout, combine(layout.config, layout.resolved, of_layout, board, reserve)

"""Search for the fastest parallel layouts that fit."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from trainer.config import Config, ConfigError
from trainer.config.load import check_combinations
from trainer.config.schema import toml_value
from trainer.parallel.pipeline import stages_per_rank
from trainer.planning.estimate import RunEstimate, combine, pipeline_bubble, representative_ranks, strip_file_settings
from trainer.planning.simulate import Simulation, simulate
from trainer.run.preflight import minimum_memory
from trainer.run.resolve import ResolvedRun, resolve
from trainer.runtime.accelerators import AcceleratorSpec
from trainer.runtime.device import DTYPES
from trainer.system.process import cores
from trainer.system.units import GIB

_MAX_PP = 16
_MODES = ("none", "selective", "full")
_RESET = {"pipeline_stages_per_rank": 0, "pipeline_split_points": (), "reshard_after_forward": "default"}
"""Settings of [parallel] that suit only one layout, with the defaults, which the candidates have."""
_HOPELESS = 0.95
"""Fraction of the best simulated speed: candidates whose likely speed is lower are not simulated."""


@dataclass(frozen=True)
class Candidate:
    settings: dict[str, dict[str, Any]]
    """Section -> name -> value of each setting that the candidate changes; empty for the configured layout."""
    config: Config
    resolved: ResolvedRun

    def toml(self) -> str:
        sections = {f"[{section}]": values for section, values in self.settings.items() if values}
        lines = ([head, *(f"{k} = {toml_value(v)}" for k, v in values.items())] for head, values in sections.items())
        return "\n".join(line for section in lines for line in section)

    def flags(self) -> list[str]:
        flags = {f"--{s}.{name}": value for s, values in self.settings.items() for name, value in values.items()}
        return [word for flag, value in flags.items() for word in (flag, toml_value(value).strip('"'))]

    def __str__(self) -> str:
        config = self.config
        words = [str(self.resolved.dims), f"checkpointing {config.activation_checkpoint.mode}"]
        if config.training.reduce_every_microbatch:
            words.append("reduce every microbatch")
        if self.resolved.dims.pp > 1:
            words.append(config.parallel.pipeline_schedule)
        return ", ".join(words) + " (as configured)" * (not self.settings)


def _powers_of_two(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length())]


def candidates(config: Config, world_size: int, accelerator: AcceleratorSpec) -> list[Candidate]:
    """Return every legal layout with tp inside a node and cp as configured, in every mode of activation checkpointing."""
    config = strip_file_settings(config)
    degrees = product(_powers_of_two(min(accelerator.gpus_per_node, world_size)), _powers_of_two(_MAX_PP))
    layouts = [
        (tp, pp, *choice)
        for tp, pp in degrees
        for choice in product(
            ("1F1B", "Interleaved1F1B") if pp > 1 else ("",), _MODES, (False,) if pp > 1 else (False, True)
        )
    ]
    return [candidate for layout in layouts for candidate in _legal(config, world_size, *layout)]


def _legal(
    config: Config, world_size: int, tp: int, pp: int, schedule: str, mode: str, reduce_every: bool
) -> Iterator[Candidate]:
    """Yield the layout as a candidate if it can run and differs from the candidates found before."""
    parallel = {"dp_replicate": 1, "dp_shard": -1, "cp": config.parallel.cp, "tp": tp, "pp": pp}
    if schedule:
        parallel["pipeline_schedule"] = schedule
    parallel |= {name: value for name, value in _RESET.items() if getattr(config.parallel, name) != value}
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
    with suppress(ConfigError):
        check_combinations(changed)
        resolved = resolve(changed, world_size)
        if not (reduce_every and resolved.grad_accum == 1):
            yield Candidate(settings, changed, resolved)


# ---------------------------------------------------------------- ranking


@dataclass(frozen=True)
class _BlockCost:
    """Cost of one transformer block and one microbatch on a rank."""

    activation_bytes: float
    seconds: float


def _family(candidate: Candidate) -> tuple[int, str]:
    """Return the key of the candidates that have the same _BlockCost: (tp, mode of activation checkpointing)."""
    return candidate.resolved.dims.tp, candidate.config.activation_checkpoint.mode


def _block_costs(
    found: Sequence[Candidate], world_size: int, accelerator: AcceleratorSpec, on_gpu: bool
) -> dict[tuple[int, str], _BlockCost]:
    """Simulate two models with few blocks for each family of candidates. The cost of a block follows from the difference."""
    families = {_family(candidate): candidate.config for candidate in reversed(found)}
    depth = found[0].config.activation_checkpoint.every_n_blocks
    shallow = [_shallow(config, n, world_size) for config in families.values() for n in (depth, 2 * depth)]
    simulations = simulate([(config, 0) for config in shallow], world_size, on_gpu)
    costs = {}
    for i, family in enumerate(families):
        once, twice = (_cost(shallow[j], simulations[j], world_size, accelerator) for j in (2 * i, 2 * i + 1))
        costs[family] = _BlockCost(
            (twice.activation_bytes - once.activation_bytes) / depth, (twice.seconds - once.seconds) / depth
        )
    return costs


def _shallow(config: Config, n_layers: int, world_size: int) -> Config:
    """Return the configuration with a model of n_layers blocks, one microbatch and no pipeline."""
    overrides = config.model.overrides | {"n_layers": n_layers}
    ranks = world_size // (config.parallel.cp * config.parallel.tp)
    batch = ranks * config.training.local_batch_size
    return replace(
        config,
        model=replace(config.model, overrides=overrides),
        parallel=replace(config.parallel, pp=1),
        training=replace(config.training, global_batch_size=batch, reduce_every_microbatch=False),
    )


def _cost(config: Config, simulation: Simulation, world_size: int, accelerator: AcceleratorSpec) -> _BlockCost:
    time = combine(config, resolve(config, world_size), [simulation], accelerator, 0.0).slowest
    seconds = time.matmuls_s + time.memory_s + time.exposed_comm_s
    return _BlockCost(max(simulation.timeline["activations"]), seconds)


def _likely_memory(candidate: Candidate, cost: _BlockCost) -> float:
    """Return the number of bytes of parameters, gradients, optimizer state, activations and receive buffers on the first rank."""
    resolved, config = candidate.resolved, candidate.config
    dims, stages = resolved.dims, stages_per_rank(config.parallel)
    parameters = resolved.num_parameters / (dims.tp * dims.pp)
    state, _ = minimum_memory(config, int(parameters / dims.fsdp))
    accumulates = resolved.grad_accum > 1 and not config.training.reduce_every_microbatch
    # Warm-up microbatches of 1F1B and of interleaved 1F1B (Narayanan et al. 2021).
    in_flight = dims.pp if stages == 1 else ((stages + 1) * dims.pp - 1) / stages
    activations = cost.activation_bytes * _blocks_per_rank(resolved) * min(in_flight, resolved.grad_accum)
    hidden = math.prod(resolved.hidden_shape) * DTYPES[config.training.compute_dtype].itemsize
    received = hidden * resolved.grad_accum * (2 * stages - 1) * (dims.pp > 1)
    return state + 4 * parameters * accumulates + activations + received  # gradients are accumulated in fp32


def _likely_speed(candidate: Candidate, cost: _BlockCost) -> float:
    """Return tokens per second."""
    resolved, training = candidate.resolved, candidate.config.training
    computing = cost.seconds * _blocks_per_rank(resolved) * resolved.grad_accum
    idle = pipeline_bubble(candidate.config.parallel, resolved.grad_accum)
    return training.global_batch_size * training.seq_len / computing * (1 - idle)


def _blocks_per_rank(resolved: ResolvedRun) -> float:
    return sum(len(stage.blocks) for stage in resolved.stages) / resolved.dims.pp


def ranked(
    found: Sequence[Candidate], world_size: int, accelerator: AcceleratorSpec, reserved_bytes: float, on_gpu: bool
) -> list[tuple[float, Candidate]]:
    """Return (likely tokens per second, candidate) for each candidate that probably fits, the fastest first."""
    costs = _block_costs(found, world_size, accelerator, on_gpu)
    limit = accelerator.memory_gib * GIB - reserved_bytes
    pairs = [(candidate, costs[_family(candidate)]) for candidate in found]
    fitting = [(_likely_speed(*pair), pair[0]) for pair in pairs if _likely_memory(*pair) < limit]
    return sorted(fitting, key=lambda pair: -pair[0])


def search(
    config: Config,
    world_size: int,
    accelerator: AcceleratorSpec,
    reserved_bytes: float,
    on_gpu: bool,
    max_candidates: int,
) -> tuple[int, list[tuple[Candidate, RunEstimate]]]:
    """Return the number of legal layouts, and estimates of the configured layout and of the layouts that are probably the
    fastest. Layouts that fit come first, ordered by speed."""
    found = candidates(config, world_size, accelerator)
    config = strip_file_settings(config)
    if not found:
        resolve(config, world_size)  # raises the reason
        raise ConfigError("", f"no layout of {world_size} ranks can run")
    likely = ranked(found, world_size, accelerator, reserved_bytes, on_gpu)
    with suppress(ConfigError):
        likely.insert(0, (math.inf, Candidate({}, config, resolve(config, world_size))))
    results: list[tuple[Candidate, RunEstimate]] = []
    while likely and len(results) < max_candidates:
        count = min(cores(), max_candidates - len(results))
        batch, likely = [candidate for _, candidate in likely[:count]], likely[count:]
        jobs = [(candidate.config, rank) for candidate in batch for rank in representative_ranks(candidate.resolved)]
        simulations = iter(simulate(jobs, world_size, on_gpu))
        for candidate in batch:
            of_ranks = [next(simulations) for _ in representative_ranks(candidate.resolved)]
            estimate = combine(candidate.config, candidate.resolved, of_ranks, accelerator, reserved_bytes)
            results.append((candidate, estimate))
        best = max((estimate.tokens_per_second for _, estimate in results if estimate.fits), default=0.0)
        likely = [(speed, candidate) for speed, candidate in likely if speed > _HOPELESS * best]
    return len(found), sorted(results, key=lambda pair: (not pair[1].fits, -pair[1].tokens_per_second))

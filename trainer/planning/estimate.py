"""Memory and speed of a run, estimated from simulations of a few of its ranks."""

from dataclasses import dataclass, replace

from trainer.config import (
    CompileConfig,
    Config,
    ConfigError,
    DataConfig,
    EvaluationConfig,
    ParallelConfig,
    TokenizerConfig,
)
from trainer.parallel.pipeline import SCHEDULES, stages_per_rank
from trainer.planning.roofline import StepTime, bubble, step_time
from trainer.planning.simulate import Simulation, simulate
from trainer.run.resolve import ResolvedRun, resolve
from trainer.runtime.accelerators import AcceleratorSpec
from trainer.system.units import GIB


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    simulations: list[Simulation]
    times: list[StepTime]
    resolved: ResolvedRun
    config: Config
    accelerator: AcceleratorSpec
    reserved_bytes: float
    """Number of bytes of device memory that the allocator cannot use."""

    @property
    def largest(self) -> Simulation:
        return max(self.simulations, key=lambda simulation: simulation.peak)

    @property
    def slowest(self) -> StepTime:
        return max(self.times, key=lambda time: time.total_s)

    @property
    def free_bytes(self) -> float:
        """Number of bytes of device memory that the reserve and the peak leave free; negative if the run does not fit."""
        return self.accelerator.memory_gib * GIB - self.reserved_bytes - self.largest.peak

    @property
    def host_free_bytes(self) -> float:
        """Number of bytes of the accelerator's share of host memory that are not offloaded memory. Other uses are not counted."""
        return self.accelerator.host_memory_gib * GIB - max(simulation.host for simulation in self.simulations)

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0 and self.host_free_bytes >= 0

    @property
    def tokens_per_step(self) -> int:
        return self.config.training.global_batch_size * self.config.training.seq_len

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.slowest.total_s

    @property
    def mfu(self) -> float:
        flops = self.resolved.flops_per_token * self.tokens_per_second
        return flops / (self.resolved.dims.world_size * self.accelerator.flops[self.config.training.compute_dtype])

    @property
    def checkpoint_bytes(self) -> int:
        return int(self.resolved.num_parameters * self.simulations[0].state_per_parameter)


def strip_file_settings(config: Config) -> Config:
    """Remove the settings that name files, and those of the compiler, which cannot be simulated."""
    data = DataConfig(document_mask=config.data.document_mask)
    return replace(
        config,
        tokenizer=TokenizerConfig(),
        data=data,
        evaluation=EvaluationConfig(),
        compile=CompileConfig(),
        parallel=replace(config.parallel, async_tensor_parallel=False),
    )


def representative_ranks(resolved: ResolvedRun) -> list[int]:
    """Return the first rank of the first, a middle and the last pipeline stage."""
    per_stage = resolved.dims.ranks_per_stage
    return sorted({stage * per_stage for stage in (0, resolved.dims.pp // 2, resolved.dims.pp - 1)})


def estimate(
    config: Config, world_size: int, accelerator: AcceleratorSpec, reserved_bytes: float, on_gpu: bool
) -> RunEstimate:
    """Simulate the representative ranks of a run. Raises ConfigError if the configuration cannot run or cannot be simulated."""
    if config.activation_checkpoint.mode == "budget":
        raise ConfigError(
            "activation_checkpoint.mode", "cannot be planned: the compiler selects the activations to save"
        )
    config = strip_file_settings(config)
    resolved = resolve(config, world_size)
    simulations = simulate([(config, rank) for rank in representative_ranks(resolved)], world_size, on_gpu)
    return combine(config, resolved, simulations, accelerator, reserved_bytes)


def pipeline_bubble(parallel: ParallelConfig, microbatches: int) -> float:
    """Return the fraction of a step in which a pipeline rank is idle (StepTime.bubble)."""
    if parallel.pp == 1:
        return 0.0
    splits = SCHEDULES[parallel.pipeline_schedule].splits_backward
    return bubble(parallel.pp, stages_per_rank(parallel), microbatches, splits)


def combine(
    config: Config,
    resolved: ResolvedRun,
    simulations: list[Simulation],
    accelerator: AcceleratorSpec,
    reserved_bytes: float,
) -> RunEstimate:
    """simulations: one for each of representative_ranks."""
    idle = pipeline_bubble(config.parallel, resolved.grad_accum)
    times = [
        step_time(s.op_costs, s.traffic, s.group_ranks, s.host_transfer_bytes, s.host_compute_bytes, accelerator, idle)
        for s in simulations
    ]
    return RunEstimate(
        simulations=simulations,
        times=times,
        resolved=resolved,
        config=config,
        accelerator=accelerator,
        reserved_bytes=reserved_bytes,
    )

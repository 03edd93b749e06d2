"""What a run needs, and how long it takes: the simulations of some of its ranks, put together."""

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
    board: AcceleratorSpec
    reserve: float
    """Bytes."""

    @property
    def largest(self) -> Simulation:
        return max(self.simulations, key=lambda simulation: simulation.peak)

    @property
    def slowest(self) -> StepTime:
        return max(self.times, key=lambda time: time.total_s)

    @property
    def left(self) -> float:
        """Bytes of the device that nothing needs; negative where they do not suffice."""
        return self.board.memory_gib * GIB - self.reserve - self.largest.peak

    @property
    def host_left(self) -> float:
        """The same of a device's share of host memory, of which the processes themselves take more."""
        return self.board.host_memory_gib * GIB - max(simulation.host for simulation in self.simulations)

    @property
    def fits(self) -> bool:
        return self.left >= 0 and self.host_left >= 0

    @property
    def tokens_per_step(self) -> int:
        return self.config.training.global_batch_size * self.config.training.seq_len

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.slowest.total_s

    @property
    def mfu(self) -> float:
        flops = self.resolved.flops_per_token * self.tokens_per_second
        return flops / (self.resolved.dims.world_size * self.board.flops[self.config.training.compute_dtype])

    @property
    def checkpoint(self) -> int:
        """Bytes: of the parameters and of the optimizer's state."""
        return int(self.resolved.num_parameters * self.simulations[0].state_per_parameter)


def strip_file_settings(config: Config) -> Config:
    """The same network, step and optimizer, without the settings that name files or leave work to the compiler."""
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
    """The first of the first, of a middle and of the last pipeline stage's ranks."""
    of_stage = resolved.dims.ranks_per_stage
    return sorted({stage * of_stage for stage in (0, resolved.dims.pp // 2, resolved.dims.pp - 1)})


def plan(config: Config, world_size: int, board: AcceleratorSpec, reserve: float, on_gpu: bool) -> RunEstimate:
    """Raises ConfigError for what cannot run, or cannot be planned."""
    if config.activation_checkpoint.mode == "budget":
        raise ConfigError("activation_checkpoint.mode", "cannot be planned: the compiler chooses what is kept")
    config = strip_file_settings(config)
    resolved = resolve(config, world_size)
    simulations = simulate([(config, rank) for rank in representative_ranks(resolved)], world_size, on_gpu)
    return combine(config, resolved, simulations, board, reserve)


def pipeline_bubble(parallel: ParallelConfig, microbatches: int) -> float:
    """Of the schedule; as of StepTime."""
    if parallel.pp == 1:
        return 0.0
    splits = SCHEDULES[parallel.pipeline_schedule].splits_backward
    return bubble(parallel.pp, stages_per_rank(parallel), microbatches, splits)


def combine(
    config: Config, resolved: ResolvedRun, simulations: list[Simulation], board: AcceleratorSpec, reserve: float
) -> RunEstimate:
    """simulations: of representative_ranks."""
    idle = pipeline_bubble(config.parallel, resolved.grad_accum)
    times = [step_time(s.work, s.traffic, s.group_ranks, s.host_moved, s.host_work, board, idle) for s in simulations]
    return RunEstimate(
        simulations=simulations, times=times, resolved=resolved, config=config, board=board, reserve=reserve
    )

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
from trainer.run.resolve import Setup, set_up
from trainer.runtime.accelerators import Board
from trainer.system.units import GIB


@dataclass(frozen=True, kw_only=True)
class Plan:
    simulations: list[Simulation]
    times: list[StepTime]
    setup: Setup
    config: Config
    board: Board
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
        flops = self.setup.flops_per_token * self.tokens_per_second
        return flops / (self.setup.dims.world_size * self.board.flops[self.config.training.compute_dtype])

    @property
    def checkpoint(self) -> int:
        """Bytes: of the parameters and of the optimizer's state."""
        return int(self.setup.num_parameters * self.simulations[0].state_per_parameter)


def without_files(config: Config) -> Config:
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


def chosen_ranks(setup: Setup) -> list[int]:
    """The first of the first, of a middle and of the last pipeline stage's ranks."""
    of_stage = setup.dims.ranks_of_stage
    return sorted({stage * of_stage for stage in (0, setup.dims.pp // 2, setup.dims.pp - 1)})


def plan(config: Config, world_size: int, board: Board, reserve: float, on_gpu: bool) -> Plan:
    """Raises ConfigError for what cannot run, or cannot be planned."""
    if config.activation_checkpoint.mode == "budget":
        raise ConfigError("activation_checkpoint.mode", "cannot be planned: the compiler chooses what is kept")
    config = without_files(config)
    setup = set_up(config, world_size)
    simulations = simulate([(config, rank) for rank in chosen_ranks(setup)], world_size, on_gpu)
    return assembled(config, setup, simulations, board, reserve)


def bubble_of(parallel: ParallelConfig, microbatches: int) -> float:
    """Of the schedule; as of StepTime."""
    if parallel.pp == 1:
        return 0.0
    splits = SCHEDULES[parallel.pipeline_schedule].splits_backward
    return bubble(parallel.pp, stages_per_rank(parallel), microbatches, splits)


def assembled(config: Config, setup: Setup, simulations: list[Simulation], board: Board, reserve: float) -> Plan:
    """simulations: of chosen_ranks."""
    idle = bubble_of(config.parallel, setup.grad_accum)
    times = [step_time(s.work, s.traffic, s.group_ranks, s.host_moved, s.host_work, board, idle) for s in simulations]
    return Plan(simulations=simulations, times=times, setup=setup, config=config, board=board, reserve=reserve)

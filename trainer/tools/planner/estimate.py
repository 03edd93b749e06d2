"""Estimate of the memory and speed of a run, from simulations of a few ranks."""

from dataclasses import dataclass
from functools import cached_property

from trainer.base.config import Config, ConfigError, compatibility
from trainer.base.config.schema.condition import Fact, Known
from trainer.base.config.schema.facts import FLOAT8_DEVICE, FLOAT8_GPU, PLANNED
from trainer.base.system.process import cores, meminfo
from trainer.base.system.units import GIB
from trainer.parallel.compilation import may_compile
from trainer.run.resolve import ResolvedRun, resolve
from trainer.runtime.accelerators import ACCELERATORS, SHORT_NAMES, AcceleratorSpec
from trainer.tools.planner.roofline import StepTime, pipeline_bubble, step_time
from trainer.tools.planner.simulate import Simulation, simulate, without_compiler

FRAGMENTATION = 0.1
"""Fraction of device memory that fragmentation of the allocator may waste."""
COMPILED_EXTRA = 1 / 6
"""Fraction of the planned peak that compiled blocks may need in addition if nothing is recomputed. On an H200, three such runs
needed 0.07, 0.10 and 0.16 (docs/measurements.md)."""


def this_machine() -> AcceleratorSpec:
    """Return the memory sizes and rates of this machine as one device. The rates are typical values."""
    memory_gib = meminfo("MemTotal") / GIB
    return AcceleratorSpec(
        flops={"fp8": 1e10 * cores(), "bf16": 1e11 * cores(), "fp32": 5e10 * cores()},
        memory_gib=memory_gib,
        host_memory_gib=memory_gib,
        host_memory_bandwidth=1e10 * cores(),
        pcie_bandwidth=1e10 * cores(),
        memory_bandwidth=1e10 * cores(),
        intra_node_bandwidth=2e9,
        inter_node_bandwidth=1e9,
        gpus_per_node=10**6,
        source="typical values of a CPU",
    )


@dataclass(frozen=True)
class Hardware:
    """The hardware for which a run is planned: one device for each rank."""

    world_size: int
    accelerator: AcceleratorSpec
    is_gpu: bool = True
    """Whether to simulate the kernels and the allocator of a GPU."""
    reserved_bytes: float = 0.0
    """Number of bytes of device memory that the allocator cannot use."""

    @property
    def usable_bytes(self) -> float:
        """Number of bytes of device memory that the allocator can use."""
        return self.accelerator.memory_gib * GIB - self.reserved_bytes

    def facts(self) -> dict[Fact, Known]:
        """Return what the compatibility table asks about the device."""
        able = [name for name, full in SHORT_NAMES.items() if "fp8" in ACCELERATORS[full].flops]
        has_float8 = Known("fp8" in self.accelerator.flops, f"{', '.join(able)} have them")
        return {FLOAT8_DEVICE: has_float8, FLOAT8_GPU: Known(self.is_gpu)}


@dataclass(frozen=True)
class RunEstimate:
    config: Config
    resolved: ResolvedRun
    simulations: list[Simulation]
    """Simulations of the representative ranks, in a step with the largest batch of the run."""
    hardware: Hardware
    expert_imbalance: float = 0.0
    """The experts of a simulated rank get 1 + expert_imbalance times the mean rows of the ranks of ep."""

    @cached_property
    def times(self) -> list[StepTime]:
        """Time of a step on each simulated rank."""
        bubble = pipeline_bubble(self.config.parallel, self.resolved.grad_accum)
        return [step_time(simulation, self.hardware.accelerator, bubble) for simulation in self.simulations]

    @property
    def largest(self) -> Simulation:
        return max(self.simulations, key=lambda simulation: simulation.peak)

    @property
    def slowest(self) -> StepTime:
        return max(self.times, key=lambda time: time.total_s)

    @property
    def free_bytes(self) -> float:
        """Usable device memory minus the peak memory, in bytes. It is negative if the run does not fit."""
        return self.hardware.usable_bytes - self.largest.peak

    @property
    def host_free_bytes(self) -> float:
        """Host memory per accelerator minus the peak of offloaded memory, in bytes. Other uses of host memory are not counted."""
        return self.hardware.accelerator.host_memory_gib * GIB - max(s.host for s in self.simulations)

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0 and self.host_free_bytes >= 0

    @property
    def margin_bytes(self) -> float:
        """Number of bytes of device memory that should stay free, because a run may need more than is simulated."""
        return margin_bytes(self.config, self.hardware, self.largest.peak)

    @property
    def is_tight(self) -> bool:
        """Whether the run fits, but leaves less memory free than the margin."""
        return self.fits and self.free_bytes < self.margin_bytes

    @property
    def sort_key(self) -> tuple[bool, bool, float]:
        """Sort key: a run that keeps the margin comes before a tight one, which comes before one that does not fit; of two
        such runs, the faster one comes first."""
        return not self.fits, self.is_tight, -self.tokens_per_second

    @property
    def run_s(self) -> float | None:
        """Duration of the run's steps in seconds, or None if its length is given in epochs of data that are not read here."""
        return self.seconds_after(0) if self.config.training.epochs is None else None

    def seconds_after(self, done: int) -> float:
        """Return the duration of the steps after step `done` in seconds. A step with a smaller batch than the simulated one is
        assumed to take as much less time; it takes longer."""
        training = self.config.training
        batches = training.samples_between(done, training.steps) / training.largest_batch_size
        return batches * self.slowest.total_s

    @property
    def tokens_per_second(self) -> float:
        training = self.config.training
        return training.largest_batch_size * training.seq_len / self.slowest.total_s

    @property
    def mfu(self) -> float:
        peak_flops = self.hardware.accelerator.flops[self.config.training.compute_dtype]
        return self.resolved.flops_per_token * self.tokens_per_second / (self.hardware.world_size * peak_flops)

    @property
    def checkpoint_bytes(self) -> int:
        return int(self.resolved.num_trained * self.simulations[0].state_per_parameter)


def margin_bytes(config: Config, hardware: Hardware, peak: float) -> float:
    """Return the number of bytes of device memory that a run with a planned peak should leave free."""
    compiled = may_compile(config.compile.enabled, config.parallel, hardware.is_gpu)
    extra = COMPILED_EXTRA * peak if compiled and config.activation_checkpoint.mode == "none" else 0.0
    return FRAGMENTATION * hardware.accelerator.memory_gib * GIB + extra


def representative_ranks(resolved: ResolvedRun) -> list[int]:
    """Return the lowest rank of each of three pipeline stages: the first, a middle one and the last."""
    per_stage = resolved.dims.ranks_per_stage
    return sorted({stage * per_stage for stage in (0, resolved.dims.pp // 2, resolved.dims.pp - 1)})


def check_imbalance(imbalance: float, resolved: ResolvedRun) -> None:
    """Raise ConfigError if no rank of a run can have this imbalance. imbalance: as in `estimate`."""
    option, ep = f"--expert-imbalance {imbalance:g}", resolved.dims.ep
    if imbalance and not resolved.structure.has_experts:
        raise ConfigError("", f"{option}: has no effect, because {resolved.model_name} has no experts")
    if imbalance and ep == 1:
        raise ConfigError(
            "", f"{option}: has no effect with parallel.ep 1: a rank computes the experts of its own tokens"
        )
    if imbalance > ep - 1:
        raise ConfigError("", f"{option}: must be at most parallel.ep - 1 = {ep - 1}: then one rank gets all rows")


def estimate(config: Config, hardware: Hardware, expert_imbalance: float = 0.0) -> RunEstimate:
    """Simulate the representative ranks of a run.

    Args:
        config: Of the run.
        hardware: On which it runs.
        expert_imbalance: The busiest rank of an ep group, which is simulated, gets 1 + expert_imbalance times the mean rows.

    Raises:
        ConfigError: The configuration cannot run or cannot be simulated.
    """
    compatibility.check(config, hardware.facts() | {PLANNED: Known(True)})
    resolved = resolve(without_compiler(config), hardware.world_size)
    check_imbalance(expert_imbalance, resolved)
    jobs = [(config, rank) for rank in representative_ranks(resolved)]
    simulations = simulate(jobs, hardware.world_size, hardware.is_gpu, expert_imbalance)
    return RunEstimate(config, resolved, simulations, hardware, expert_imbalance)

"""Settings of a run as a whole: its folder and device, its process groups, and what it does after faults."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from trainer.base.config.schema.condition import When
from trainer.base.config.schema.constraint import Constraint, Count

Seconds = Annotated[float, Constraint(min=1, max=10**7, unit="seconds")]
DeviceChoice = Literal["auto", "gpu", "cpu"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str = ""
    """Name of this run's folder inside output_folder. Empty: the name of the configuration file."""
    output_folder: str = "outputs"
    """Path of the folder that contains the run folders."""
    seed: Annotated[int, Constraint(min=0, max=2**63 - 1, fixed_on_resume=True)] = 0
    """Seed of the initial weights and of the sample order."""
    deterministic: Literal["auto", "on", "off"] = "auto"
    """Whether to make results bitwise reproducible, at some cost of speed on GPUs. "auto" means "on" on CPUs, "off" on GPUs."""
    device: DeviceChoice = "auto"
    """Device to train on. "auto": each rank's GPU, or the CPU on a machine without GPUs. "gpu": each rank's GPU, or an error."""

    @property
    def folder(self) -> Path:
        """Return the path of the run folder."""
        return Path(self.output_folder) / self.name


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    init_timeout_s: Seconds = 600.0
    """Maximum time that ranks wait for each other at startup."""
    timeout_s: Seconds = 600.0
    """Maximum time that a collective waits for a rank before the job fails."""


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    max_consecutive_skips: Count = 8
    """Number of consecutive skipped steps after which on_max_skips applies. A step may be skipped because of a
    spike, or because of a non-finite loss or gradient norm."""
    on_max_skips: Annotated[Literal["stop", "rollback"], Constraint(only_with=(When("checkpoint.enabled"),))] = "stop"
    """Action after max_consecutive_skips. "stop": end the run; "rollback": resume from the latest checkpoint without
    the samples of the skipped steps."""
    max_rollbacks: Count = 3
    """Maximum number of rollbacks. The run stops if it needs another rollback."""
    on_loss_spike: Literal["off", "skip", "rollback"] = "off"
    """Action after a spike, which is a loss or gradient norm far above those of the last 128 steps. "skip": skip the step;
    "rollback": resume from the latest checkpoint and skip the samples of the step."""
    spike_threshold_sigma: Annotated[
        float, Constraint(exclusive_min=0, max=10**6, used_with=When("resilience.on_loss_spike", ("skip", "rollback")))
    ] = 6.0
    """A loss or gradient norm is a spike if it exceeds the mean by more than this number of standard deviations."""
    straggler_ratio: Annotated[float | None, Constraint(exclusive_min=1)] = 1.5
    """Slowdown factor above which a rank is reported as a straggler. A rank is slow if its forward time of a block exceeds the
    median rank's by this factor, or if waiting for its data lengthens steps by this factor. "none": never warn."""
    hang_timeout_s: Annotated[float, Constraint(min=0, max=10**7, unit="seconds")] = 300.0
    """Time without a completed step after which the run prints every rank's stack and aborts. The limit is at least 5 times the
    longest step so far. A step that may compile (the first one, and parts of evaluations) has a limit of 12 times this setting,
    at least an hour. During checkpoints, the run aborts only if a rank's heartbeat is missing. 0: never abort. The time must be
    below [distributed] timeout_s."""

"""Preflight checks: whether the minimum memory and disk space that a run needs are available."""

import math
import shutil
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint.resume import list_checkpoints
from trainer.config import CheckpointConfig, ConfigError, OptimizerConfig, ParallelConfig, TrainingConfig
from trainer.runtime import device as devices
from trainer.runtime.device import DTYPES
from trainer.runtime.distributed import all_gather_objects, run_on_rank_0
from trainer.runtime.dtensor import to_local
from trainer.system.process import memory_available, node_id
from trainer.system.units import GIB


@dataclass(frozen=True)
class MemoryNeed:
    """Minimum memory of one rank, in bytes."""

    device: int
    host: int


def state_bytes(training: TrainingConfig, optimizer: OptimizerConfig) -> int:
    """Return the bytes per parameter in a checkpoint: the parameter, two moments, and the fp32 copy if there is one."""
    parameter = DTYPES[training.parameter_dtype].itemsize
    copy = 4 if optimizer.offload != "none" and parameter < 4 else 0
    return parameter + _moment_bytes(optimizer) + copy


def _moment_bytes(optimizer: OptimizerConfig) -> int:
    return 2 * (1 if optimizer.state_dtype == "8bit" else DTYPES[optimizer.state_dtype].itemsize)


def minimum_memory(
    count: int, training: TrainingConfig, optimizer: OptimizerConfig, parallel: ParallelConfig
) -> MemoryNeed:
    """Return the memory for parameters, gradients and optimizer state only, for a rank with `count` parameters."""
    parameter = DTYPES[training.parameter_dtype].itemsize
    moments = _moment_bytes(optimizer)
    gradient = 0 if optimizer.in_backward or optimizer.offload == "state_and_gradients" else parameter
    if parallel.cpu_offload:
        return MemoryNeed(device=0, host=count * (2 * parameter + moments))
    if optimizer.offload == "none":
        return MemoryNeed(device=count * (parameter + gradient + moments), host=0)
    host = (
        4 + parameter + moments + (parameter if parameter < 4 else 0)
    )  # fp32 copy, gradient, moments, copy of the parameter
    return MemoryNeed(device=count * (parameter + gradient), host=count * host)


def check_memory(
    parameters: Iterable[Tensor],
    training: TrainingConfig,
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    device: torch.device,
) -> None:
    """Raise ConfigError on all ranks if a rank has too little memory. parameters: this rank's, on the meta device."""
    need = minimum_memory(sum(to_local(p).numel() for p in parameters), training, optimizer, parallel)
    if device.type == "cpu":
        need = MemoryNeed(device=0, host=need.device + need.host)
    of_ranks = all_gather_objects((node_id(), need, devices.memory_free(device), memory_available()))
    host_bytes: dict[str, int] = defaultdict(int)
    advice = "scripts/plan.py shows the memory of each part, docs/memory.md how to reduce it"
    subject = "parameters, gradients and optimizer state alone need"
    for rank, (name, of_rank, free, available) in enumerate(of_ranks):
        if free is not None and of_rank.device > free:
            message = (
                f"{subject} {of_rank.device / GIB:.3g} GiB on rank {rank}, whose device has {free / GIB:.3g} GiB free"
            )
            raise ConfigError("", f"{message}; {advice}")
        host_bytes[name] += of_rank.host
        if available is not None and host_bytes[name] > available:
            message = f"more than the {available / GIB:.3g} GiB of host memory that {name} has free"
            raise ConfigError("", f"{subject} {host_bytes[name] / GIB:.3g} GiB up to rank {rank}, {message}; {advice}")


def remaining_checkpoints(config: CheckpointConfig, step: int, steps: int) -> int:
    """Return the number of checkpoints that a run writes between `step` and its end."""
    every = config.interval_steps or steps
    return steps // every - step // every + (steps % every > 0)


def check_disk(folder: Path, config: CheckpointConfig, num_bytes: int, step: int, steps: int) -> None:
    """Raise ConfigError on all ranks if the disk cannot hold the checkpoints. num_bytes: size of one checkpoint. step: number of
    completed steps."""
    remaining = remaining_checkpoints(config, step, steps)

    def needed(keep: int, existing: int) -> int:
        """Return the maximum number of new checkpoints on disk: old ones are deleted only after a new one is written."""
        count = max(1, keep + 1 - existing) if keep else remaining
        if keep and config.keep_interval_steps:
            every = config.interval_steps or steps
            interval = math.lcm(every, config.keep_interval_steps)  # only checkpoints that are due are saved
            count += max(0, (steps - keep * every) // interval - step // interval)
        return min(remaining, count)

    def check() -> None:
        free = shutil.disk_usage(folder).free
        existing = len(list_checkpoints(folder))
        count = needed(config.keep, existing)
        if count * num_bytes <= free:
            return
        message = f"{folder} has {free / GIB:.3g} GiB free"
        if num_bytes > free:
            raise ConfigError("run.output_folder", f"a checkpoint needs {num_bytes / GIB:.3g} GiB, but {message}")
        keep = next((k for k in (3, 2, 1) if needed(k, existing) * num_bytes <= free), None)
        advice = f"; keep = {keep} needs {needed(keep, existing) * num_bytes / GIB:.3g} GiB" if keep else ""
        raise ConfigError(
            "checkpoint.keep",
            f"up to {count} checkpoints of {num_bytes / GIB:.3g} GiB will exist at a time, but {message}{advice}",
        )

    run_on_rank_0(check)

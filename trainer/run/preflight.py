"""What a run needs for certain, against what there is: told before its work begins, not in the middle of it."""

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
    """Bytes."""

    device: int
    host: int


def state_bytes(training: TrainingConfig, optimizer: OptimizerConfig) -> int:
    """That a checkpoint holds of each parameter: itself, two averages, and a copy where that is more precise."""
    parameter = DTYPES[training.parameter_dtype].itemsize
    copy = 4 if optimizer.offload != "none" and parameter < 4 else 0
    return parameter + _averages(optimizer) + copy


def _averages(optimizer: OptimizerConfig) -> int:
    return 2 * (1 if optimizer.state_dtype == "8bit" else DTYPES[optimizer.state_dtype].itemsize)


def minimum_memory(
    count: int, training: TrainingConfig, optimizer: OptimizerConfig, parallel: ParallelConfig
) -> MemoryNeed:
    """Of a rank that has so many parameters, for them, their gradients and the optimizer, and for nothing else."""
    parameter = DTYPES[training.parameter_dtype].itemsize
    averages = _averages(optimizer)
    gradient = 0 if optimizer.in_backward or optimizer.offload == "state_and_gradients" else parameter
    if parallel.cpu_offload:
        return MemoryNeed(device=0, host=count * (2 * parameter + averages))
    if optimizer.offload == "none":
        return MemoryNeed(device=count * (parameter + gradient + averages), host=0)
    there = 4 + parameter + averages + (parameter if parameter < 4 else 0)  # copy, gradient, averages, what goes back
    return MemoryNeed(device=count * (parameter + gradient), host=count * there)


def check_memory(
    parameters: Iterable[Tensor],
    training: TrainingConfig,
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    device: torch.device,
) -> None:
    """Raises ConfigError on all ranks where one of them has too little. parameters: this rank's; they need no memory yet."""
    need = minimum_memory(sum(to_local(p).numel() for p in parameters), training, optimizer, parallel)
    if device.type == "cpu":
        need = MemoryNeed(device=0, host=need.device + need.host)
    of_ranks = all_gather_objects((node_id(), need, devices.memory_free(device), memory_available()))
    together: dict[str, int] = defaultdict(int)
    advice = "scripts/plan.py shows where memory goes, docs/memory.md what gives some back"
    what = "parameters, gradients and optimizer alone need"
    for rank, (name, of_rank, free, available) in enumerate(of_ranks):
        if free is not None and of_rank.device > free:
            told = f"{what} {of_rank.device / GIB:.3g} GiB on rank {rank}, whose device has {free / GIB:.3g} GiB left"
            raise ConfigError("", f"{told}; {advice}")
        together[name] += of_rank.host
        if available is not None and together[name] > available:
            told = f"more than the {available / GIB:.3g} GiB of host memory that {name} has left"
            raise ConfigError("", f"{what} {together[name] / GIB:.3g} GiB up to rank {rank}, {told}; {advice}")


def remaining_checkpoints(config: CheckpointConfig, step: int, steps: int) -> int:
    """That a run writes from a step to its end."""
    every = config.interval_steps or steps
    return steps // every - step // every + (steps % every > 0)


def check_disk(folder: Path, config: CheckpointConfig, size: int, step: int, steps: int) -> None:
    """Raises ConfigError on all ranks where checkpoints will find no room. folder: of the checkpoints; size: of one, in bytes;
    step: that has been trained."""
    to_come = remaining_checkpoints(config, step, steps)

    def together(keep: int, there: int) -> int:
        """Of them, beside those that are there: an old one goes when a new one is written."""
        more = max(1, keep + 1 - there) if keep else to_come
        if keep and config.keep_interval_steps:
            every = config.interval_steps or steps
            stay = math.lcm(every, config.keep_interval_steps)  # only what is due is saved
            more += max(0, (steps - keep * every) // stay - step // stay)
        return min(to_come, more)

    def check() -> None:
        free = shutil.disk_usage(folder).free
        there = len(list_checkpoints(folder))
        count = together(config.keep, there)
        if count * size <= free:
            return
        told = f"{folder} has {free / GIB:.3g} GiB left"
        if size > free:
            raise ConfigError("run.output_folder", f"a checkpoint takes {size / GIB:.3g} GiB, and {told}")
        few = next((k for k in (3, 2, 1) if together(k, there) * size <= free), None)
        advice = f"; keep = {few} needs {together(few, there) * size / GIB:.3g} GiB" if few else ""
        raise ConfigError(
            "checkpoint.keep",
            f"{count} checkpoints of {size / GIB:.3g} GiB will be there at a time, and {told}{advice}",
        )

    run_on_rank_0(check)

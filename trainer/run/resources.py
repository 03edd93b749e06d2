"""What a run needs of memory and disk, and whether it is there."""

import math
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from models.moe import is_stack
from models.spec import meta_model
from trainer.base.config import CheckpointConfig, Config, ConfigError
from trainer.base.config.checkpoints import list_checkpoints
from trainer.base.system.files import existing_part
from trainer.base.system.process import memory_available, node_id
from trainer.base.system.run_files import CHECKPOINTS
from trainer.base.system.spelling import counted
from trainer.base.system.units import GIB
from trainer.parallel.parameter_storage import shards_parameters
from trainer.run.resolve import ResolvedRun
from trainer.runtime import device as devices
from trainer.runtime.device import DTYPES
from trainer.runtime.distributed import all_gather_objects, run_on_rank_0
from trainer.runtime.dtensor import to_local


def checkpoint_bytes(config: Config, resolved: ResolvedRun) -> int:
    """Return the bytes of a checkpoint: of the trained parameters, their state in the optimizer and, if any, their fp32
    copy."""
    parameter = DTYPES[config.trained_dtype].itemsize
    copy = 4 if config.optimizer.offload != "none" and parameter < 4 else 0
    return int(resolved.num_trained * (parameter + resolved.optimizer.state_bytes + copy))


@dataclass(frozen=True, kw_only=True)
class OwnParameters:
    """The parameters of one rank."""

    trained: int
    """Number of those that it trains."""
    experts: int = 0
    """Number of those that it trains in stacks of experts."""
    frozen_bytes: int = 0
    state_bytes: float
    """Bytes of optimizer state and averaged weights."""

    @classmethod
    def of(cls, resolved: ResolvedRun, model_parts: Iterable[nn.Module]) -> "OwnParameters":
        """Count those of a rank. model_parts: its stages, parallelized, on the meta device."""
        trained, experts, frozen, state_bytes = 0, 0, 0, 0.0
        for part in model_parts:
            for name, p in part.named_parameters():
                local = to_local(p)
                if not p.requires_grad:
                    frozen += local.nbytes
                    continue
                trained += local.numel()
                experts += local.numel() if is_stack(part, name) else 0
                state_bytes += resolved.optimizer.state_bytes_of(name, local)
        return cls(trained=trained, experts=experts, frozen_bytes=frozen, state_bytes=state_bytes)

    @classmethod
    def mean(cls, config: Config, resolved: ResolvedRun) -> "OwnParameters":
        """Estimate those of a rank, without a model: an equal part of all."""
        dims, model = resolved.dims, meta_model(resolved.spec.model, resolved.sizes)
        ranks = dims.tp * dims.pp * dims.fsdp
        experts = sum(p.numel() for name, p in resolved.trained.tensors(model).items() if is_stack(model, name))
        frozen, trained = resolved.base_bytes if config.lora.rank else 0, resolved.num_trained // ranks
        return cls(
            trained=trained,
            experts=experts // ranks,
            frozen_bytes=frozen // ranks,
            state_bytes=trained * resolved.optimizer.state_bytes,
        )


def minimum_memory(config: Config, resolved: ResolvedRun, own: OwnParameters) -> tuple[int, int]:
    """Return the bytes of device memory and of host memory that a rank needs for its parameters, gradients and optimizer state
    alone. A run compares them with what is free; the planner's search adds the activations."""
    count, frozen = own.trained, own.frozen_bytes
    optimizer, parallel, dims = config.optimizer, config.parallel, resolved.dims
    parameter = DTYPES[config.trained_dtype].itemsize
    gradients = 0 if optimizer.frees_gradients else count * parameter
    accumulated = 0
    if resolved.grad_accum > 1 and not config.training.reduce_every_microbatch:
        # FSDP accumulates gradients that are neither reduced nor sharded. Without FSDP, the sum of more than two is fp32.
        sharded = shards_parameters(resolved.dims, resolved.structure, parallel)
        unsharded_width = 4 if resolved.grad_accum > 2 else 0
        width = DTYPES[parallel.reduce_dtype].itemsize if sharded else unsharded_width
        accumulated = ((count - own.experts) * dims.fsdp + own.experts * dims.efsdp) * width
    if parallel.cpu_offload:
        return accumulated, frozen + int(count * 2 * parameter + own.state_bytes)
    if optimizer.offload == "none":
        return frozen + int(count * parameter + own.state_bytes) + max(gradients, accumulated), 0
    copy = parameter if parameter < 4 else 0
    # The host holds an fp32 copy, the gradient, the state and a copy of the parameter.
    on_host = int(count * (4 + parameter + copy) + own.state_bytes)
    return frozen + count * parameter + max(gradients, accumulated), on_host


def check_memory(config: Config, resolved: ResolvedRun, model_parts: Iterable[nn.Module], device: torch.device) -> None:
    """Raise ConfigError on all ranks if a rank has too little memory. model_parts: this rank's stages, on the meta device."""
    on_device, on_host = minimum_memory(config, resolved, OwnParameters.of(resolved, model_parts))
    if device.type == "cpu":
        on_device, on_host = 0, on_device + on_host
    of_ranks = all_gather_objects((node_id(), on_host, memory_available(), on_device, devices.memory_free(device)))
    on_nodes: Counter[str] = Counter()
    for node, host_bytes, *_ in of_ranks:
        on_nodes[node] += host_bytes
    for rank, (node, _, free_on_host, device_bytes, free_on_device) in enumerate(of_ranks):
        device_memory = f"device memory on rank {rank}", device_bytes, free_on_device
        host_memory = f"host memory on {node}", on_nodes[node], free_on_host
        for memory, num_bytes, free in (device_memory, host_memory):
            if free is not None and num_bytes > free:
                message = f"{num_bytes / GIB:.3g} GiB of {memory}, but only {free / GIB:.3g} GiB are free"
                advice = "scripts/plan.py estimates the memory of a run, and docs/memory.md describes how to reduce it"
                raise ConfigError("", f"parameters, gradients and optimizer state alone need {message}; {advice}")


def remaining_checkpoints(config: CheckpointConfig, step: int, steps: int) -> int:
    """Return the number of checkpoints that a run writes between `step` and its end."""
    every = config.interval_steps or steps
    return steps // every - step // every + (steps % every > 0)


def disk_free(folder: Path) -> int:
    """Return the number of free bytes for files in a folder, which need not exist."""
    return shutil.disk_usage(existing_part(folder)).free


def check_disk(config: Config, resolved: ResolvedRun, step: int) -> None:
    """Raise ConfigError on all ranks if the disk cannot hold the checkpoints. step: number of completed steps."""
    folder, checkpoint, steps = config.run.folder / CHECKPOINTS, config.checkpoint, config.training.steps
    if not checkpoint.enabled:
        return
    num_bytes = checkpoint_bytes(config, resolved)
    remaining = remaining_checkpoints(checkpoint, step, steps)
    free, existing = run_on_rank_0(lambda: (disk_free(folder), len(list_checkpoints(folder))))

    def needed(keep: int) -> int:
        """Return the maximum number of new checkpoints that exist at a time if checkpoint.keep is `keep`. Old checkpoints are
        deleted only after a new checkpoint is written."""
        count = max(1, keep + 1 - existing) if keep else remaining
        if keep and checkpoint.keep_interval_steps:
            every = checkpoint.interval_steps or steps
            interval = math.lcm(every, checkpoint.keep_interval_steps)  # only checkpoints that are due are saved
            count += max(0, (steps - keep * every) // interval - step // interval)
        return min(remaining, count)

    count = needed(checkpoint.keep)
    if count * num_bytes <= free:
        return
    size, message = f"{num_bytes / GIB:.3g} GiB", f"{folder} has {free / GIB:.3g} GiB free"
    if num_bytes > free:
        raise ConfigError("run.output_folder", f"a checkpoint needs {size}, but {message}")
    keep = next((keep for keep in (3, 2, 1) if needed(keep) * num_bytes <= free), 0)
    advice = f"; keep = {keep} needs {needed(keep) * num_bytes / GIB:.3g} GiB" if keep else ""
    message = f"up to {counted(count, 'checkpoint')} of {size} will exist at a time, but {message}{advice}"
    raise ConfigError("checkpoint.keep", message)

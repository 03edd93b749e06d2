"""Parallel degrees and device meshes."""

import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from trainer.base.config import ConfigError, ParallelConfig
from trainer.runtime.collectives import lift_torch_limit


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Degrees of parallelism. The product of all but ep is the world size. The device meshes keep axes of size 1."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    world_size: int

    @classmethod
    def from_config(cls, config: ParallelConfig, world_size: int) -> "ParallelDims":
        """Return the degrees, with dp_shard = -1 resolved. Raises ConfigError if their product is not the world size."""
        degrees = {name: getattr(config, name) for name in ("pp", "dp_replicate", "cp", "tp")}
        wanted = max(config.dp_shard, 1) * math.prod(degrees.values())
        hint = ""
        if wanted > world_size:
            hint = f"; for {wanted} ranks: NGPU={wanted} ./run_llama_train.sh, or plan.py --world-size {wanted}"
        others = 1  # product of the degrees so far
        for name, degree in degrees.items():
            product = others * degree
            if config.dp_shard == -1 and world_size % product:
                factors = f"x {others} (product of the other degrees) = {product} " if others > 1 else ""
                raise ConfigError(f"parallel.{name}", f"{factors}must divide the number of ranks, {world_size}{hint}")
            others = product
        dp_shard = world_size // others if config.dp_shard == -1 else config.dp_shard
        total = others * dp_shard
        if total != world_size:
            above_1 = " ".join(f"x {name} {degree}" for name, degree in degrees.items() if degree > 1)
            factors = f"{above_1} = {total} " if above_1 else ""
            message = f"{factors}must equal the number of ranks, {world_size}; -1 uses all remaining ranks{hint}"
            raise ConfigError("parallel.dp_shard", message)
        dims = cls(**degrees, dp_shard=dp_shard, ep=config.ep, world_size=world_size)
        if dims.fsdp * dims.tp % dims.ep:
            ranks = f"dp_shard {dims.dp_shard} x cp {dims.cp} x tp {dims.tp} = {dims.fsdp * dims.tp}"
            raise ConfigError("parallel.ep", f"must divide {ranks}: these ranks share the experts")
        dims.require_groups_for(config.reshard_after_forward)
        return dims

    def require_groups_for(self, reshard_after_forward: str | int) -> None:
        """Raise ConfigError if the ranks of FSDP do not consist of several groups of this number of ranks."""
        if isinstance(reshard_after_forward, str):
            return
        if self.fsdp % reshard_after_forward or reshard_after_forward == self.fsdp:
            ranks = f"dp_shard {self.dp_shard}"
            if self.cp > 1:
                ranks += f" x cp {self.cp} = {self.fsdp}"
            message = f"must divide {ranks} and be below {self.fsdp}; 'always' reshards over all {self.fsdp} ranks"
            raise ConfigError("parallel.reshard_after_forward", message)

    @property
    def batch(self) -> int:
        """Number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks that together hold one pipeline stage."""
        return self.world_size // self.pp

    @property
    def fsdp(self) -> int:
        """Number of ranks over which parameters are sharded."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Number of ranks over which the parameters of an expert are sharded."""
        return self.fsdp * self.tp // self.ep

    def __str__(self) -> str:
        degrees = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
        return ", ".join(f"{name} {getattr(self, name)}" for name in degrees if getattr(self, name) > 1) or "one rank"


class Meshes:
    """Device meshes over the same ranks. Axes of the same name have the same ranks in all meshes and share a process group.
    All axes of size 1 share one group. Axes over all ranks use the world's group, except cp and ep: their exchanges would wait
    for the collectives of FSDP over the same ranks."""

    def __init__(
        self,
        dims: ParallelDims,
        device: torch.device,
        timeout: timedelta | None = None,
        has_experts: bool = False,
        exchanges_matrices: bool = False,
    ):
        """Create the process groups, collectively.

        Args:
            dims: The degrees.
            device: Of the ranks.
            timeout: Of collectives, not counting time in which the ranks are suspended. None: torch's default.
            has_experts: Whether the model has experts, which have a mesh of their own.
            exchanges_matrices: Whether the ranks of a pipeline stage exchange matrices (trainer/optim/exchange.py).
        """
        self.dims = dims
        groups: dict[str, ProcessGroup] = {}

        def mesh(**axes: int) -> DeviceMesh:
            ranks = torch.arange(dims.world_size).view(tuple(axes.values()))
            group_names = [name if size > 1 else "one_rank" for name, size in axes.items()]
            for axis, name in enumerate(group_names):
                if name not in groups:
                    # One row of ranks for each position on the other axes.
                    partition = ranks.movedim(axis, -1).flatten(0, -2).tolist()
                    groups[name] = _new_group(partition, name, timeout)
                    if timeout is not None and groups[name].size() > 1:
                        lift_torch_limit(groups[name])
            axis_groups = [groups[name] for name in group_names]
            return DeviceMesh.from_group(axis_groups, device.type, ranks, mesh_dim_names=tuple(axes))

        self.model = mesh(pp=dims.pp, dp_replicate=dims.dp_replicate, fsdp=dims.fsdp, tp=dims.tp)
        """Mesh that assigns the parameters to ranks."""
        self.experts = None
        """Mesh that assigns the parameters of experts to ranks. None for a model without experts."""
        if has_experts:
            self.experts = mesh(pp=dims.pp, dp_replicate=dims.dp_replicate, efsdp=dims.efsdp, ep=dims.ep)
        self.data = mesh(pp=dims.pp, batch=dims.batch, cp=dims.cp, tp=dims.tp)
        """Mesh that assigns samples and their tokens to ranks."""
        self.loss = mesh(pp=dims.pp, loss=dims.batch * dims.cp, tp=dims.tp)
        """Mesh whose axis "loss" contains the ranks that compute the loss of different tokens."""
        self.stage: ProcessGroup | None = None
        """The ranks of this rank's pipeline stage, if they exchange matrices."""
        if exchanges_matrices:
            partition = torch.arange(dims.world_size).view(dims.pp, dims.ranks_per_stage).tolist()
            self.stage = _new_group(partition, "stage", timeout)
            if timeout is not None:
                lift_torch_limit(self.stage)


def _new_group(partition: list[list[int]], axis: str, timeout: timedelta | None) -> ProcessGroup:
    """Return the process group of this rank's part.

    Args:
        partition: The ranks of each part; together, the parts contain all ranks.
        axis: Name of the mesh axis, which is shown in messages.
        timeout: Of collectives. None: torch's default.
    """
    if len(partition) == 1 and axis not in ("cp", "ep"):
        return dist.group.WORLD
    name = f"mesh_{axis}"
    if dist.group.WORLD.bound_device_id is not None:
        return dist.split_group(None, partition, timeout, group_desc=name)  # one call for all parts
    ranks = next(part for part in partition if dist.get_rank() in part)
    return dist.new_group(ranks, timeout, use_local_synchronization=True, group_desc=name)

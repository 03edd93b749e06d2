"""How the ranks of a run are arranged: the arithmetic, and the meshes made from it."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config import ConfigError, ParallelConfig


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Degrees whose product is the world. Every axis is always there, at size 1 too."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    world_size: int

    @classmethod
    def from_config(cls, config: ParallelConfig, world_size: int) -> "ParallelDims":
        """Fill in dp_shard = -1 and refuse degrees that do not make up the world."""
        given = {name: getattr(config, name) for name in ("pp", "dp_replicate", "cp", "tp")}
        others = 1
        for name, degree in given.items():
            if config.dp_shard == -1 and world_size % (others * degree):
                together = f"x the other degrees' {others} = {others * degree} " * (others > 1)
                raise ConfigError(f"parallel.{name}", f"{together}must divide the {world_size} ranks of this run")
            others *= degree
        dp_shard = world_size // others if config.dp_shard == -1 else config.dp_shard
        if others * dp_shard != world_size:
            chosen = " ".join(f"x {name} {degree}" for name, degree in given.items() if degree > 1)
            makes = f"{chosen} makes {others * dp_shard} ranks, but " * (others > 1)
            raise ConfigError(
                "parallel.dp_shard",
                f"{makes}this run has {world_size} rank{'s' * (world_size > 1)}; -1 takes what is left",
            )
        dims = cls(**given, dp_shard=dp_shard, world_size=world_size)
        reshard = config.reshard_after_forward
        if isinstance(reshard, int) and (dims.fsdp % reshard or reshard == dims.fsdp):
            product = f"dp_shard {dims.dp_shard}" + (f" x cp {dims.cp} = {dims.fsdp}" if dims.cp > 1 else "")
            raise ConfigError(
                "parallel.reshard_after_forward",
                f"as a number it must divide {product} and be smaller; always reshards to all of them",
            )
        return dims

    @property
    def batch(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that hold the parameters of one pipeline stage between them."""
        return self.world_size // self.pp

    @property
    def fsdp(self) -> int:
        """Ranks that the parameters are sharded over."""
        return self.dp_shard * self.cp

    def __str__(self) -> str:
        degrees = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
        return ", ".join(f"{name} {getattr(self, name)}" for name in degrees if getattr(self, name) > 1) or "one rank"


class Meshes:
    """Three views of the same ranks."""

    model: DeviceMesh
    """pp, dp_replicate, fsdp (= dp_shard x cp), tp: where parameters live."""
    data: DeviceMesh
    """pp, batch (= dp_replicate x dp_shard), cp, tp: who reads which samples."""
    loss: DeviceMesh
    """pp, loss (= batch x cp), tp: who averages what."""

    def __init__(self, dims: ParallelDims, device: torch.device):
        def mesh(**axes: int) -> DeviceMesh:
            return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

        self.model = mesh(pp=dims.pp, dp_replicate=dims.dp_replicate, fsdp=dims.fsdp, tp=dims.tp)
        self.data = mesh(pp=dims.pp, batch=dims.batch, cp=dims.cp, tp=dims.tp)
        self.loss = mesh(pp=dims.pp, loss=dims.batch * dims.cp, tp=dims.tp)

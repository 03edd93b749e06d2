"""How parameters are kept between uses, and how a forward gets them."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from models.spec import Structure, styles_in_blocks
from trainer.adapters.nf4 import BLOCK, stored_bytes
from trainer.base.config import ConfigError, ParallelConfig
from trainer.parallel.fsdp import apply_fsdp
from trainer.parallel.mesh import Meshes, ParallelDims
from trainer.parallel.quantized import quantize_weights
from trainer.parallel.tensor import shard_shape
from trainer.parallel.unsharded import cast_parameters
from trainer.runtime.device import DTYPES


@dataclass(frozen=True, kw_only=True)
class ParameterStorage:
    """The only owner of this choice.

    | parameter | kept as | what a forward gets |
    |---|---|---|
    | in `quantized` | codes and scales (quantized.py) | the parts; each product dequantizes its matrix |
    | others, with FSDP | a shard in its own dtype | gathered in the dtype of the computation (fsdp.py) |
    | others, without | its own dtype | a copy in the dtype of the computation, per block (unsharded.py) |
    """

    dtype: str
    """Of the computation, "bf16" or "fp32"."""
    quantized: Collection[str] = ()
    """Names of the weights that are kept in 4 bits."""
    is_double: bool = False
    """Whether their scales are quantized too."""

    def parameter_bytes(self, model: nn.Module, dtype: torch.dtype) -> int:
        """Return the bytes of all parameters, as they are kept.

        Args:
            model: The complete model, without adapters.
            dtype: Of the parameters that are not quantized.
        """
        return sum(
            stored_bytes(tuple(p.shape), self.is_double) if name in self.quantized else p.numel() * dtype.itemsize
            for name, p in model.named_parameters()
        )

    def replace_weights(self, model: nn.Module, meshes: Meshes) -> None:
        """Replace the weights that are not kept as they are, in place. Adapters are applied afterwards: they call the products
        that they find."""
        if self.quantized:
            quantize_weights(model, self.quantized, self.is_double, meshes.model.device_type)

    def provide(self, model: nn.Module, structure: Structure, meshes: Meshes, parallel: ParallelConfig) -> None:
        """Make the forwards of blocks and of other units get their parameters, in place."""
        if shards_parameters(meshes.dims, structure, parallel):
            apply_fsdp(model, structure, meshes, parallel, self.dtype)
        else:
            cast_parameters(model, structure, DTYPES[self.dtype])


def shards_parameters(dims: ParallelDims, structure: Structure, parallel: ParallelConfig) -> bool:
    """Return whether FSDP manages the parameters. A single data-parallel rank needs FSDP only to shard experts, to offload
    parameters, or in a pipeline, whose schedules rely on FSDP to accumulate gradients."""
    shards_experts = structure.has_experts and dims.efsdp > 1
    return dims.dp_replicate * dims.fsdp > 1 or shards_experts or parallel.pp > 1 or parallel.cpu_offload


def require_storable(quantized: Collection[str], model: nn.Module, structure: Structure, dims: ParallelDims) -> None:
    """Raise ConfigError if this layout cannot keep the weights `quantized` in 4 bits. model: the complete model."""
    styles = styles_in_blocks(model, structure.blocks_path)
    for name in sorted(quantized):
        shape = model.get_parameter(name).shape[-2:]
        if shard_shape(shape, styles.get(name.removesuffix(".weight"), ""), dims.tp)[1] % BLOCK:
            rule = f"{BLOCK} x tp = {BLOCK * dims.tp} must divide the {shape[-1]} columns of {name}"
            raise ConfigError("parallel.tp", f"splits blocks of [lora] base_dtype: {rule}")

"""Tiny models, parallelized as the Trainer does it."""

import torch
import torch.distributed as dist

from models.context import Context
from models.decoder import Decoder
from models.llama import LlamaSizes, llama
from trainer.base.config import ActivationCheckpointConfig, ParallelConfig
from trainer.parallel.attention import CPU_BACKEND
from trainer.parallel.float8 import NO_FLOAT8, Float8
from trainer.parallel.init_weights import allocate, initialize
from trainer.parallel.mesh import Meshes, ParallelDims
from trainer.parallel.parallelize import parallelize
from trainer.parallel.parameter_storage import ParameterStorage
from trainer.parallel.sample_layout import SampleLayout
from trainer.parallel.stages import Stage, partition_blocks, stages_of_rank

CPU = torch.device("cpu")


def build_model_parts(
    sizes: LlamaSizes,
    config: ParallelConfig,
    checkpointing: ActivationCheckpointConfig = ActivationCheckpointConfig(),  # noqa: B008  (frozen)
    compiled: bool = False,
    dtype: str = "fp32",
    float8: Float8 = NO_FLOAT8,
) -> tuple[dict[Stage, Decoder], Meshes]:
    """Return this rank's stages of the model, with initial weights."""
    meshes = Meshes(ParallelDims.from_config(config, dist.get_world_size()), CPU)
    with torch.device("meta"):
        model = llama(sizes)
    structure = model.structure()
    stages = stages_of_rank(partition_blocks(model, structure, config), meshes.model["pp"].get_local_rank(), config)
    settings = (stages, meshes, config, checkpointing, compiled, ParameterStorage(dtype=dtype))
    run = {"layout": layout_of(meshes), "attention_backend": CPU_BACKEND, "float8": float8}
    model_parts = parallelize(lambda: llama(sizes), structure, *settings, **run)
    for part in model_parts.values():
        allocate(part, CPU)
        initialize(part, seed=0)
    return model_parts, meshes


def layout_of(meshes: Meshes) -> SampleLayout:
    return SampleLayout(cp=meshes.data["cp"], seq_len=16, by_document=False, dtype=torch.float32)


def build_model(sizes: LlamaSizes, config: ParallelConfig, **kwargs) -> Decoder:
    """Return the parallelized model of a layout without a pipeline."""
    (model,) = build_model_parts(sizes, config, **kwargs)[0].values()
    return model


def reference(sizes: LlamaSizes) -> Decoder:
    """Return the same model on one device, without parallelism."""
    model = llama(sizes)
    initialize(model, seed=0)
    return model


def inputs(sizes: LlamaSizes, batch: int = 2, seq: int = 16) -> tuple[torch.Tensor, Context]:
    """Return tokens and their context."""
    tokens = torch.randint(sizes.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(1))
    return tokens, Context.of(tokens)

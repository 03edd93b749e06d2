"""Adapters with dropout, also on a base in 4 bits, in sharded and compiled blocks."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from models.llama import LlamaSizes, llama
from tests.parallel.tiny_models import CPU, inputs, layout_of, reference
from tests.training_runs import without_code_generation
from trainer.adapters.apply import apply_lora
from trainer.adapters.nf4 import quantized_weights
from trainer.adapters.select import LORA_B, select_parameters, select_quantized
from trainer.base.config import ActivationCheckpointConfig, LoraConfig, ParallelConfig
from trainer.objective.cross_entropy import CrossEntropyHead
from trainer.parallel.attention import CPU_BACKEND
from trainer.parallel.init_weights import allocate, initialize
from trainer.parallel.mesh import Meshes, ParallelDims
from trainer.parallel.parallelize import parallelize
from trainer.parallel.parameter_storage import ParameterStorage
from trainer.parallel.stages import partition_blocks

SIZES = LlamaSizes(dim=128, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=128, vocab_size=64)
LORA = LoraConfig(rank=4, dropout=0.4)


def gradients(mode, compiled, base_dtype):
    """Return the full gradients of the adapters after one step, with tensor parallelism over all ranks."""
    torch._dynamo.reset()
    config = ParallelConfig(tp=dist.get_world_size())
    with torch.device("meta"):
        model = llama(SIZES)
    structure = model.structure()
    lora = replace(LORA, base_dtype=base_dtype)
    trained = select_parameters(model, structure, lora)
    adapt = partial(apply_lora, blocks=structure.blocks_path, trained=trained, config=lora, seed=0)
    quantized = select_quantized(model, structure, lora)
    storage = ParameterStorage(dtype="fp32", quantized=quantized, is_double=base_dtype == "nf4_double")
    meshes, stages = (
        Meshes(ParallelDims.from_config(config, config.tp), CPU),
        partition_blocks(model, structure, config),
    )
    settings = (
        config,
        ActivationCheckpointConfig(mode=mode),
        compiled,
        storage,
        layout_of(meshes),
        CPU_BACKEND,
        adapt,
    )
    with without_code_generation():
        (part,) = parallelize(lambda: llama(SIZES), structure, stages, meshes, *settings).values()
    allocate(part, CPU)
    initialize(part, seed=0, lora=LORA)
    full = dict(reference(SIZES).named_parameters())
    for name, weight in quantized_weights(part).items():
        weight.fill(lambda region, name=name: full[name].detach()[region])
    trained = {name: p for name, p in part.named_parameters() if p.requires_grad}
    for name, p in trained.items():
        if name.endswith(LORA_B):  # it starts at zero, which would hide the gradients of the other matrix
            torch.nn.init.constant_(p, 0.1)
    tokens, context = inputs(SIZES)
    for context_of_step in (context._replace(samples=context.samples + 7), context):  # the first step compiles
        part.zero_grad()
        part(tokens, context_of_step, head=CrossEntropyHead(tokens.roll(-1, 1), 1024)).backward()
    return {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in trained.items()}


@pytest.mark.parametrize(
    ("mode", "base_dtype"),
    [("selective", "keep"), ("full", "nf4_double")],
)
def test_compiled_blocks_on_two_ranks_drop_the_values_of_one_rank(ranks, mode, base_dtype):
    (expected,) = ranks(1).run(gradients, "none", False, base_dtype)
    actual, _ = ranks(2).run(gradients, mode, True, base_dtype)
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        assert gradient.any()
        # A single value that is dropped on one side only changes a gradient by more than 1e-3 of its norm.
        assert (actual[name] - gradient).norm() < 1e-4 * gradient.norm(), name

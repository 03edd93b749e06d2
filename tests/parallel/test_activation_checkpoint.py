"""Bytes that a block saves for backward, measured against the formulas of docs/parallelism.md."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from models.llama import LlamaSizes, llama
from tests.parallel.tiny_models import CPU, inputs, reference
from trainer.base.config import ActivationCheckpointConfig
from trainer.base.config.fields import settings
from trainer.objective.cross_entropy import CrossEntropyHead
from trainer.parallel.activation_checkpoint import SAVEABLE_OPS, block_forward, recompute_policy
from trainer.parallel.feed_forward import apply_gated_products
from trainer.parallel.float8 import NO_FLOAT8, Float8, apply_float8
from trainer.parallel.init_weights import allocate, initialize
from trainer.parallel.quantized import quantize_weights
from trainer.parallel.tensor import apply_tensor
from trainer.tools.planner.recorder import Recorder

SIZES = LlamaSizes(dim=64, n_layers=2, n_heads=8, n_kv_heads=4, hidden_dim=160, vocab_size=64)
BATCH, SEQ = 2, 32


LINEARS = [*(f"attention.w{name}" for name in "qkvo"), *(f"feed_forward.w{i}" for i in (1, 2, 3))]
NEEDS_FLOAT8 = pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 cannot scale rows on a CPU")
IN_FLOAT8 = Float8(frozenset(f"layers.{i}.{name}" for i in range(2) for name in LINEARS), by_row=True)


def build_model(sizes, checkpointing, dtype=torch.bfloat16, float8=NO_FLOAT8, in_4_bits=False):
    """Return a model sharded over all ranks, without FSDP, whose gathered parameters would count as memory."""
    with torch.device("meta"):
        model = llama(sizes).to(dtype)
    apply_float8(model, float8)
    apply_gated_products(model)
    ranks = dist.get_world_size()
    policies = {
        name: recompute_policy(int(name), checkpointing, gathers=ranks > 1, compiled=False) for name in model.layers
    }
    if ranks > 1:
        gathers = {name for name, policy in policies.items() if policy == "gathers"}
        apply_tensor(model, model.structure(), init_device_mesh("cpu", (ranks,)), True, gathers)
    if in_4_bits:
        weights = {
            f"{name}.weight" for name, m in model.layers.named_modules(prefix="layers") if isinstance(m, nn.Linear)
        }
        quantize_weights(model, weights, is_double=False, device_type="cpu")
    for name, block in model.layers.named_children():
        block.forward = block_forward(block.forward, policies[name], checkpointing, compiled=False)
    allocate(model, CPU)
    initialize(model, seed=0)
    return model


def live_bytes(recorder):
    """Return the number of bytes that were allocated since the recording began and are still in use."""
    return sum(a.num_bytes for a in recorder.alive(recorder.num_events) if a.born >= 0)


def bytes_saved_by_a_block(checkpointing, float8=NO_FLOAT8, of=SIZES, in_4_bits=False):
    """Return the bytes that one more block keeps alive after forward, its output included."""
    live = []
    for layers in (1, 2):
        sizes = replace(of, n_layers=layers)
        model = build_model(sizes, checkpointing, float8=float8, in_4_bits=in_4_bits)
        batch = inputs(sizes, BATCH, SEQ)
        with Recorder() as recorder:
            loss = model(*batch, head=CrossEntropyHead(batch[0], 1024))
        for _ in range(8):  # a thread of gloo may keep the buffers of a collective until its next one
            dist.barrier()
        gc.collect()
        live.append(live_bytes(recorder))
        loss.backward()
    return live[1] - live[0]


def formula(mode, recompute, ranks, sizes=SIZES):
    """Return the bytes per rank in bf16 on CPU, by docs/parallelism.md, "Activation memory of a block"."""
    tokens, h, f = BATCH * SEQ, sizes.dim, sizes.hidden_dim
    k = sizes.n_kv_heads * sizes.head_dim
    lse = 4 * tokens * sizes.n_heads / ranks
    output = 2 * tokens * h / ranks
    if mode == "full":
        return output
    if mode == "selective":
        matmuls = 2 * tokens * ((h + 2 * k + 2 * f) / ranks + (2 * h if ranks == 1 else 0))
        reduce_scatters = 2 * output if ranks > 1 else 0
        return matmuls + (2 * tokens * h / ranks + lse) + reduce_scatters + output
    norms = 2 * (8 * tokens * h + 4 * tokens) / ranks
    gathered = 2 * 2 * tokens * h / (ranks if recompute else 1)
    attention = 2 * tokens * (2 * h + 2 * k) / ranks + lse
    gated = 2 * 2 * tokens * f / ranks
    return norms + gathered + attention + gated


MODES = [("none", False), ("none", True), ("selective", True), ("full", True)]


def bytes_saved_in_every_mode(float8):
    settings = {key: ActivationCheckpointConfig(mode=key[0], recompute_all_gather=key[1]) for key in MODES}
    return {key: bytes_saved_by_a_block(checkpointing, float8) for key, checkpointing in settings.items()}


@pytest.mark.parametrize("float8", [NO_FLOAT8, pytest.param(IN_FLOAT8, marks=NEEDS_FLOAT8)], ids=["bf16", "float8"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_activation_memory_of_a_block_equals_the_formula_in_every_mode(ranks, size, float8):
    for saved in ranks(size).run(bytes_saved_in_every_mode, float8):
        assert saved == {mode: formula(*mode, size) for mode in MODES}
        gathered_inputs_without_their_shards = 4 * SEQ * BATCH * SIZES.dim * (1 - 1 / size)
        assert saved["none", False] - saved["none", True] == gathered_inputs_without_their_shards


@pytest.mark.parametrize("size", [1, 2])
def test_selective_recomputation_saves_products_with_weights_in_4_bits_like_others(ranks, size):
    checkpointing = ActivationCheckpointConfig(mode="selective")
    sizes = replace(SIZES, dim=128, hidden_dim=256)  # rows of 64 values on each rank
    saved = ranks(size).run(bytes_saved_by_a_block, checkpointing, NO_FLOAT8, sizes, True)
    assert saved == [formula("selective", True, size, sizes)] * size


def gradients(checkpointing):
    model = build_model(SIZES, checkpointing, torch.float32)
    batch = inputs(SIZES, BATCH, SEQ)
    with Recorder() as recorder:
        model(*batch, head=CrossEntropyHead(batch[0].roll(-1, 1), 1024)).backward()
    return {name: p.grad for name, p in model.named_parameters()}, recorder.op_counts["mm"]


def gradients_of_each(checkpointings):
    return [gradients(checkpointing) for checkpointing in checkpointings]


SELECTIONS = {
    "full": (ActivationCheckpointConfig(mode="full"), 12),
    "every second block": (ActivationCheckpointConfig(mode="full", every_n_blocks=2), 6),
    "selective": (ActivationCheckpointConfig(mode="selective"), 0),
    # three of seven matmuls are saved; the last one is not needed
    "every second matmul": (ActivationCheckpointConfig(mode="selective", save_every_nth_matmul=2), 6),
    "only attention": (ActivationCheckpointConfig(mode="selective", save=("attention",)), 12),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_gradients_are_bitwise_identical_and_unsaved_matmuls_are_recomputed(ranks, name):
    checkpointing, recomputed_matmuls = SELECTIONS[name]
    ((expected, matmuls), (actual, matmuls_with_recomputation)) = ranks(1).run(
        gradients_of_each, [ActivationCheckpointConfig(), checkpointing]
    )[0]
    assert matmuls_with_recomputation - matmuls == recomputed_matmuls
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_the_gated_activation_saves_two_tensors_of_its_width():
    model = reference(replace(SIZES, n_layers=1))
    apply_gated_products(model)
    x = torch.randn(BATCH, SEQ, SIZES.dim)
    with Recorder() as recorder:
        out = model.layers["0"].feed_forward(x)
    assert live_bytes(recorder) - out.nbytes == 2 * BATCH * SEQ * SIZES.hidden_dim * 4


def test_saveable_operators_are_the_values_of_the_setting():
    save_type = settings()["activation_checkpoint.save"].type
    assert save_type.__args__[0].__args__ == tuple(SAVEABLE_OPS)


def test_checkpointed_blocks_are_chosen_by_their_index_in_the_full_model():
    config = ActivationCheckpointConfig(mode="full", every_n_blocks=3)
    assert [n for n in range(8) if recompute_policy(n, config, gathers=False, compiled=False) == "all"] == [0, 3, 6]
    assert recompute_policy(1, config, gathers=True, compiled=False) == "gathers"
    assert recompute_policy(1, config, gathers=True, compiled=True) == "gathers_compiled"
    assert recompute_policy(1, config, gathers=False, compiled=True) == "nothing"


@pytest.mark.parametrize("policy", ["all", "selected"])
def test_a_compiled_block_before_all_that_is_trained_recomputes_nothing(policy):
    """torch cannot compile a checkpoint around attention that has no backward, as if only the last blocks have adapters."""
    torch._dynamo.reset()
    config = ActivationCheckpointConfig(mode="full" if policy == "all" else "selective")

    def attention(h):
        return F.scaled_dot_product_attention(h, h, h, is_causal=True).sin()

    forward = block_forward(attention, policy, config, compiled=True, is_trained=False)
    h = torch.rand(1, 2, 8, 16)
    torch.testing.assert_close(forward(h), attention(h))
    h.requires_grad_()  # as behind trained embeddings
    (gradient,) = torch.autograd.grad(forward(h).sum(), h)
    torch.testing.assert_close(gradient, torch.autograd.grad(attention(h).sum(), h)[0])

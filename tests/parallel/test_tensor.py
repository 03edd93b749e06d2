"""Tensor parallelism: gradients of sharded matrices, communication per block, shapes independent of the degree."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from models.llama import LlamaSizes
from tests.parallel.tiny_models import build_model, inputs, reference
from trainer.base.config import ActivationCheckpointConfig, ParallelConfig
from trainer.objective.cross_entropy import CrossEntropyHead
from trainer.parallel import float8
from trainer.parallel.float8 import NO_FLOAT8, Float8, apply_float8
from trainer.parallel.tensor import styles
from trainer.tools.planner.recorder import Recorder
from trainer.tools.testing.double import double_precision
from trainer.tools.testing.ranks import RankError

SIZES = LlamaSizes(
    dim=32, n_layers=2, n_heads=8, n_kv_heads=4, hidden_dim=48, vocab_size=61
)  # 61: no degree divides it


class Linears(nn.Module):
    """Two column-wise matrices that read one input, followed by a row-wise one; with biases."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.left, self.right, self.out = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=draw)

    def forward(self, x):
        return self.out(torch.sin(self.left(x)) * self.right(x))


LINEARS = ("left", "right", "out")
RECIPES = {
    "none": NO_FLOAT8,
    "tensorwise": Float8(frozenset(LINEARS), False),
    "rowwise": Float8(frozenset(LINEARS), True),
}


def gradients_of_linears(sequence_parallel, recompute, recipe, no_powers=False):
    """Compare output and all gradients of a sharded module with those of a full one."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,))
    full, sharded = Linears().double(), Linears().double()  # double: rounding cannot hide an error
    for model in (full, sharded):
        apply_float8(model, RECIPES[recipe])
    by_name = styles(sequence_parallel, recompute)
    for name, style in {"left": "column", "right": "column", "out": "row"}.items():
        parallelize_module(sharded.get_submodule(name), mesh, by_name[style], src_data_rank=None)
    sharded = parallelize_module(sharded, mesh, by_name["gather"], src_data_rank=None)

    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, 16, generator=draw, dtype=torch.float64)
    weights_of_output = torch.randn(2, 8, 16, generator=draw, dtype=torch.float64)
    local = (lambda t: t.chunk(ranks, 1)[rank].clone()) if sequence_parallel else torch.clone
    x_full, x_local = x.clone().requires_grad_(), local(x).requires_grad_()
    with double_precision(), patch.object(float8, "power_of_two", (lambda x: x) if no_powers else float8.power_of_two):
        compare_linears(full, sharded, x_full, x_local, weights_of_output, local)


def compare_linears(full, sharded, x_full, x_local, weights_of_output, local):
    out = sharded(x_local)
    expected = full(x_full)
    (out * local(weights_of_output)).sum().backward()
    (expected * weights_of_output).sum().backward()

    torch.testing.assert_close(out, local(expected))
    torch.testing.assert_close(x_local.grad, local(x_full.grad))
    for (name, actual), parameter in zip(sharded.named_parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(actual.grad.full_tensor(), parameter.grad, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
@pytest.mark.parametrize("size", [2, 4])
def test_sharded_linears_have_the_gradients_of_full_ones(ranks, size, sequence_parallel, recompute):
    for recipe in RECIPES:
        ranks(size).run(gradients_of_linears, sequence_parallel, recompute, recipe)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products_in_float8_with_other_scales_than_powers_of_two_depend_on_the_layout(ranks, recipe):
    with pytest.raises(RankError, match="not close"):
        ranks(2).run(gradients_of_linears, True, False, recipe, True)


def one_step(tp, tied):
    """Compare loss, gradients and logits of a sharded model with those of the full one. Return the names of its parameters."""
    sizes = replace(SIZES, tied_embeddings=tied)
    model = build_model(sizes, ParallelConfig(tp=tp))
    batch = inputs(sizes)
    labels = batch[0].roll(-1, 1)
    loss = model(*batch, head=CrossEntropyHead(labels, 5))
    loss.backward()
    full = reference(sizes)
    logits = full(*batch)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected)
    replicas = dist.get_world_size() // tp  # they read the same batch, and FSDP sums their gradients
    full_parameters = dict(full.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.shape == full_parameters[name].shape
        torch.testing.assert_close(
            parameter.grad.full_tensor() / replicas,
            full_parameters[name].grad,
            rtol=1e-4,
            atol=1e-4,
            msg=lambda t, n=name: f"{n}: {t}",
        )
    with torch.no_grad():
        torch.testing.assert_close(model(*batch), logits)  # without a head: full logits on every rank
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("size", "tp"), [(2, 2), (4, 4), (4, 2)])
def test_a_sharded_model_has_the_gradients_of_the_full_one_for_any_vocabulary(ranks, size, tp, tied):
    names = ranks(size).run(one_step, tp, tied)[0]
    assert names == [name for name, _ in reference(replace(SIZES, tied_embeddings=tied)).named_parameters()]


def gathers_of_a_block(recompute, sequence_parallel, mode):
    """Return the all-gathers in forward and in backward, and the matmuls in backward, of one block."""
    counts = []
    for layers in (1, 2):
        sizes = replace(SIZES, n_layers=layers)
        model = build_model(
            sizes,
            ParallelConfig(tp=dist.get_world_size(), sequence_parallel=sequence_parallel),
            checkpointing=ActivationCheckpointConfig(mode=mode, recompute_all_gather=recompute),
        )
        batch = inputs(sizes)
        # DTensor runs an operator on fake tensors when it first sees it, which would be counted too.
        model(*batch, head=CrossEntropyHead(batch[0], 1024)).backward()
        with Recorder() as forward:
            loss = model(*batch, head=CrossEntropyHead(batch[0], 1024))
        with Recorder() as backward:
            loss.backward()
        counts.append(
            (
                forward.op_counts["all_gather_into_tensor"],
                backward.op_counts["all_gather_into_tensor"],
                backward.op_counts["mm"],
            )
        )
    return tuple(b - a for a, b in zip(*counts, strict=True))


@pytest.mark.parametrize(
    ("mode", "recompute", "expected"),
    # The backward of seven matmuls has fourteen. A checkpointed block recomputes all but the last one.
    [
        ("none", False, (2, 2, 14)),
        ("none", True, (2, 4, 14)),
        ("selective", True, (2, 4, 15)),  # and wo, whose full-width product is not saved
        ("full", True, (2, 4, 20)),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_backward_recomputes_only_the_gathers(ranks, size, mode, recompute, expected):
    assert set(ranks(size).run(gathers_of_a_block, recompute, True, mode)) == {expected}


def test_without_sequence_parallelism_a_block_gathers_nothing(ranks):
    assert ranks(2).run(gathers_of_a_block, True, False, "none")[0][:2] == (0, 0)

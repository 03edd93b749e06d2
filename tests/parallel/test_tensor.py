"""Tensor parallelism: gradients of the cut matrices, communication per block, shapes that do not depend on the degree."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from models.llama.sizes import LlamaSizes
from tests.parallel.tiny_models import inputs, reference
from tests.parallel.tiny_models import whole as cut_network
from trainer.config import ActivationCheckpointConfig, ParallelConfig
from trainer.loss import CrossEntropyHead
from trainer.parallel.tensor import styles
from trainer.testing.operators import Operators

SIZES = LlamaSizes(
    dim=32, n_layers=2, n_heads=8, n_kv_heads=4, hidden_dim=48, vocab_size=61
)  # 61: no degree divides it


class Linears(nn.Module):
    """Two column-wise matrices that read one input, and a row-wise one behind them; with biases."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.one, self.two, self.back = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=draw)

    def forward(self, x):
        return self.back(torch.sin(self.one(x)) * self.two(x))


def gradients_of_linears(sequence_parallel, recompute):
    """Cut and whole: output, gradient of the input, gradients of all weights and biases."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,))
    whole, cut = Linears().double(), Linears().double()  # in double, rounding hides nothing
    words = styles(sequence_parallel, recompute)
    for name, word in {"one": "column", "two": "column", "back": "row"}.items():
        parallelize_module(cut.get_submodule(name), mesh, words[word], src_data_rank=None)
    cut = parallelize_module(cut, mesh, words["gather"], src_data_rank=None)

    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, 16, generator=draw, dtype=torch.float64)
    weights_of_output = torch.randn(2, 8, 16, generator=draw, dtype=torch.float64)
    mine = (lambda t: t.chunk(ranks, 1)[rank].clone()) if sequence_parallel else torch.clone
    x_whole, x_mine = x.clone().requires_grad_(), mine(x).requires_grad_()
    placement = Shard(1) if sequence_parallel else Replicate()
    out = cut(DTensor.from_local(x_mine, mesh, [placement]))
    expected = whole(x_whole)
    (out * mine(weights_of_output)).sum().backward()
    (expected * weights_of_output).sum().backward()

    torch.testing.assert_close(out, mine(expected))
    torch.testing.assert_close(x_mine.grad, mine(x_whole.grad))
    for (name, one), other in zip(cut.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("size", [2, 4])
def test_gradients_of_cut_linears_are_those_of_whole_ones(ranks, size, sequence_parallel, recompute):
    ranks(size).run(gradients_of_linears, sequence_parallel, recompute)


def one_step(tp, tied):
    """Loss, gradients and logits of a network beside the same on one device; the names of its parameters."""
    sizes = replace(SIZES, tied_embeddings=tied)
    model = cut_network(sizes, ParallelConfig(tp=tp))
    batch = inputs(sizes)
    labels = batch[0].roll(-1, 1)
    loss = model(*batch, head=CrossEntropyHead(labels, 5))
    loss.backward()
    whole = reference(sizes)
    logits = whole(*batch)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected)
    copies = dist.get_world_size() // tp  # that read the same batch, whose gradients FSDP adds up
    others = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.shape == others[name].shape
        torch.testing.assert_close(
            parameter.grad.full_tensor() / copies,
            others[name].grad,
            rtol=1e-4,
            atol=1e-4,
            msg=lambda t, n=name: f"{n}: {t}",
        )
    with torch.no_grad():
        torch.testing.assert_close(model(*batch), logits)  # without a head: the whole logits on every rank
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("size", "tp"), [(2, 2), (4, 4), (4, 2)])
def test_a_cut_network_has_the_gradients_of_the_whole_one_whatever_the_vocabulary(ranks, size, tp, tied):
    names = ranks(size).run(one_step, tp, tied)[0]
    assert names == [name for name, _ in reference(replace(SIZES, tied_embeddings=tied)).named_parameters()]


def gathers_of_a_block(recompute, sequence_parallel, mode):
    """All-gathers in forward and in backward, and matmuls in backward, of one block of two."""
    counts = []
    for layers in (1, 2):
        sizes = replace(SIZES, n_layers=layers)
        model = cut_network(
            sizes,
            ParallelConfig(tp=dist.get_world_size(), sequence_parallel=sequence_parallel),
            checkpointing=ActivationCheckpointConfig(mode=mode, recompute_all_gather=recompute),
        )
        batch = inputs(sizes)
        # DTensor tries operators it has not seen before on fake tensors, which would be counted too.
        model(*batch, head=CrossEntropyHead(batch[0], 1024)).backward()
        with Operators() as forward:
            loss = model(*batch, head=CrossEntropyHead(batch[0], 1024))
        with Operators() as backward:
            loss.backward()
        counts.append((forward.all_gathers, backward.all_gathers, backward.matmuls))
    return tuple(two - one for one, two in zip(*counts, strict=True))


@pytest.mark.parametrize(
    ("mode", "recompute", "expected"),
    # Backward of seven matmuls: fourteen. A checkpointed block computes all but the last again.
    [
        ("none", False, (2, 2, 14)),
        ("none", True, (2, 4, 14)),
        ("selective", True, (2, 4, 15)),  # and wo, whose whole-width product is not kept
        ("full", True, (2, 4, 20)),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_only_the_gathers_are_made_again_in_backward(ranks, size, mode, recompute, expected):
    assert set(ranks(size).run(gathers_of_a_block, recompute, True, mode)) == {expected}


def test_without_sequence_parallelism_a_block_gathers_nothing(ranks):
    assert ranks(2).run(gathers_of_a_block, True, False, "none")[0][:2] == (0, 0)

"""Recurrences over sequences that are split between ranks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from models.context import Context
from models.delta_net import Carry, DeltaRule, RecurrentKind
from tests.models.test_delta_net import GROUPS, HEADS, KEY, VALUE, WIDTH, drawn, gradients, leaves
from trainer.parallel.context_parallel import shard_tensor
from trainer.parallel.recurrence import ContextCarry, Documents

KIND = RecurrentKind(key_heads=HEADS, value_heads=HEADS * GROUPS, widths=(KEY, VALUE), filter_width=WIDTH)
SEQ = 16 * 24


def deviation_of_a_split_sequence(is_packed):
    """Return the largest deviations of results and gradients from those of the whole sequence, relative to the largest value."""
    mesh, rank, size = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank(), dist.get_world_size()
    arguments = drawn(2, SEQ, 0.05)
    variables = leaves(arguments)
    documents = torch.stack([torch.arange(SEQ) // 37, torch.arange(SEQ).clamp(max=SEQ // 2) // 100])
    samples = torch.arange(2)

    def mask(carry, documents):
        context = Context(documents, documents, samples)
        return Documents(KIND, carry)(context) if is_packed else None

    whole = DeltaRule(Carry())(*arguments, mask(Carry(), documents))
    shard = partial(shard_tensor, rank=rank, ranks=size)
    carry, (qkv, filters, *rates) = ContextCarry(mesh), arguments
    own = [shard(x) for x in qkv], filters, *(shard(x) for x in rates)
    result = DeltaRule(carry)(*own, mask(carry, shard(documents)))
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(0), dtype=whole.dtype)
    expected = gradients(whole, variables)
    actual = list(torch.autograd.grad((result * shard(weights)).sum(), variables))
    for gradient in actual:
        dist.all_reduce(gradient)
    pairs = [(result, shard(whole)), *zip(actual, expected, strict=True)]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_split_sequence_has_the_results_and_gradients_of_the_whole_one(ranks, size, is_packed):
    assert max(ranks(size).run(deviation_of_a_split_sequence, is_packed)) < 1e-11

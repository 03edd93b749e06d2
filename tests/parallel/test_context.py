"""Attention over sequences that are cut between ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from models.llama.model import CausalAttention
from scripts.operators import Operators
from trainer.batch import Batch
from trainer.parallel.context import ContextAttention, cut_sequence


def numbered(seq):
    tokens = torch.arange(2 * seq).view(2, seq)
    return Batch(tokens, tokens + 1, torch.arange(seq).repeat(2, 1), tokens // 7)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_have_the_whole_sequence_between_them_and_tokens_keep_their_places(ranks):
    whole = numbered(16)
    cut = [cut_sequence(whole, rank, ranks) for rank in range(ranks)]
    assert {c.tokens.shape for c in cut} == {(2, 16 // ranks)}
    everything = torch.cat([c.tokens for c in cut], dim=1)
    assert torch.equal(everything.sort(dim=1).values, whole.tokens)
    for one in cut:
        for name in ("labels", "positions", "documents"):
            at = one.positions
            assert torch.equal(getattr(one, name), getattr(whole, name).gather(1, at))


@pytest.mark.parametrize("ranks", [2, 4])
def test_under_a_causal_mask_all_ranks_have_the_same_work(ranks):
    keys = {(cut_sequence(numbered(16), rank, ranks).positions + 1).sum().item() for rank in range(ranks)}
    assert len(keys) == 1


def attention(kv_heads, recompute):
    """Output and gradients of this rank's part beside the whole; all-gathers in forward and backward."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, heads, 32, 8, generator=draw).requires_grad_() for heads in (4, kv_heads, kv_heads)]
    weights = torch.randn(2, 4, 32, 8, generator=draw)
    nothing = torch.zeros(2, 32)
    expected = CausalAttention()(*whole, nothing, nothing)
    (expected * weights).sum().backward()

    def mine(tensor):
        chunks = tensor.detach().chunk(2 * size, 2)
        return torch.cat((chunks[rank], chunks[-1 - rank]), 2)

    parts = [mine(t).requires_grad_() for t in whole]
    with Operators() as forward:
        out = ContextAttention(mesh, recompute)(*parts, nothing, nothing)
    with Operators() as backward:
        (out * mine(weights)).sum().backward()
    torch.testing.assert_close(out, mine(expected))
    for part, one in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad, mine(one.grad), rtol=1e-5, atol=1e-5)
    return forward.all_gathers, backward.all_gathers


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("size", [2, 4])
def test_attention_is_that_of_the_whole_sequence(ranks, size, kv_heads, recompute):
    gathers = set(ranks(size).run(attention, kv_heads, recompute))
    assert gathers == {(1, 1 if recompute else 0)}

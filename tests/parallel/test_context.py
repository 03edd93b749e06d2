"""Attention over sequences that are cut between ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from models.llama.model import CausalAttention
from trainer.batch import Batch
from trainer.parallel.attention import DenseMask, FlexAttention, FlexBlockMask
from trainer.parallel.context import AllGatherAttention, shard_sequence, shard_tensor
from trainer.testing.operators import Operators


def numbered(seq):
    tokens = torch.arange(2 * seq).view(2, seq)
    return Batch(tokens, tokens + 1, torch.arange(seq).repeat(2, 1), tokens // 7)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_have_the_whole_sequence_between_them_and_tokens_keep_their_places(ranks):
    whole = numbered(16)
    cut = [shard_sequence(whole, rank, ranks) for rank in range(ranks)]
    assert {c.tokens.shape for c in cut} == {(2, 16 // ranks)}
    everything = torch.cat([c.tokens for c in cut], dim=1)
    assert torch.equal(everything.sort(dim=1).values, whole.tokens)
    for one in cut:
        for name in ("labels", "positions", "documents"):
            at = one.positions
            assert torch.equal(getattr(one, name), getattr(whole, name).gather(1, at))


@pytest.mark.parametrize("ranks", [2, 4])
def test_under_a_causal_mask_all_ranks_have_the_same_work(ranks):
    keys = {(shard_sequence(numbered(16), rank, ranks).positions + 1).sum().item() for rank in range(ranks)}
    assert len(keys) == 1


def attention(kv_heads, recompute):
    """Output and gradients of this rank's part beside the whole; all-gathers in forward and backward."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, heads, 32, 8, generator=draw).requires_grad_() for heads in (4, kv_heads, kv_heads)]
    weights = torch.randn(2, 4, 32, 8, generator=draw)
    expected = CausalAttention()(*whole, None)
    (expected * weights).sum().backward()

    def mine(tensor):
        chunks = tensor.detach().chunk(2 * size, 2)
        return torch.cat((chunks[rank], chunks[-1 - rank]), 2)

    parts = [mine(t).requires_grad_() for t in whole]
    with Operators() as forward:
        mask = DenseMask(mesh, False, torch.float32)(None, torch.zeros(2, 32 // size))
        out = AllGatherAttention(CausalAttention(), mesh, recompute)(*parts, mask)
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


def documents_apart(kernel):
    """Largest difference of output and gradients of packed documents, cut over the ranks, from each document alone."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, heads, 32, 8, generator=draw).requires_grad_() for heads in (4, 2, 2)]
    weights = torch.randn(2, 4, 32, 8, generator=draw)
    lengths = [[5, 1, 20, 6], [16, 9, 7]]
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in lengths])
    expected = torch.zeros_like(weights)
    for row, numbers in enumerate(lengths):
        for start, length in zip(torch.tensor([0, *numbers]).cumsum(0).tolist(), numbers, strict=False):
            part = [t[row : row + 1, :, start : start + length] for t in whole]
            expected[row : row + 1, :, start : start + length] = CausalAttention()(*part, None)
    (expected * weights).sum().backward()

    def mine(tensor):
        return torch.cat([tensor.detach().chunk(2 * size, 2)[i] for i in (rank, 2 * size - 1 - rank)], 2)

    parts = [(mine(t) if size > 1 else t.detach().clone()).requires_grad_() for t in whole]
    if kernel == "table":
        mask, attend = DenseMask(mesh, True, torch.float32), CausalAttention()
    else:
        mask, attend = FlexBlockMask(mesh, True, compiled=False), FlexAttention(compiled=False)
    if size > 1:
        attend = AllGatherAttention(attend, mesh, recompute=True)
    mask = mask(None, shard_tensor(documents, rank, size))
    if kernel == "blocks":  # torch has no backward of it on a CPU
        with torch.no_grad():
            out = attend(*(part.detach() for part in parts), mask)
        return (out - (mine(expected) if size > 1 else expected)).abs().max().item()
    out = attend(*parts, mask)
    (out * (mine(weights) if size > 1 else weights)).sum().backward()
    pairs = [(out, expected), *((part.grad, one.grad) for part, one in zip(parts, whole, strict=True))]
    return max((a - (mine(b) if size > 1 else b)).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("kernel", ["table", "blocks"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_attention_ends_at_the_borders_of_documents(ranks, size, kernel):
    assert max(ranks(size).run(documents_apart, kernel)) < 5e-6

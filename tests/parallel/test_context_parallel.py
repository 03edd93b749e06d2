"""Context parallelism: attention over sequences that are split between ranks."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from models.attention import AttentionKind, CausalAttention, CausalMask, attention_kernel, visible_keys
from models.context import Context
from trainer.batch import Batch
from trainer.parallel.attention import FlexAttention, Mask, create_dense_mask, with_sinks
from trainer.parallel.context_parallel import AllGatherAttention, shard_sequence, shard_tensor
from trainer.parallel.mixers import kernel_name
from trainer.parallel.sample_layout import SampleLayout
from trainer.tools.planner.recorder import Recorder

create_float_mask = partial(create_dense_mask, dtype=torch.float32)
kind_of = partial(AttentionKind, n_heads=4, n_kv_heads=2, widths=(16, 16))
FULL = kind_of()


def distinct_tokens(seq):
    tokens = torch.arange(2 * seq).view(2, seq)
    return Batch(tokens, tokens + 1, torch.arange(seq).repeat(2, 1), tokens // 7, torch.tensor([5, 3]))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_form_the_full_sequence_and_tokens_keep_their_positions(ranks):
    full = distinct_tokens(16)
    shards = [shard_sequence(full, rank, ranks) for rank in range(ranks)]
    assert {shard.tokens.shape for shard in shards} == {(2, 16 // ranks)}
    gathered = torch.cat([shard.tokens for shard in shards], dim=1)
    assert torch.equal(gathered.sort(dim=1).values, full.tokens)
    for shard in shards:
        for name in ("labels", "positions", "documents"):
            assert torch.equal(getattr(shard, name), getattr(full, name).gather(1, shard.positions))
        assert torch.equal(shard.samples, full.samples)


@pytest.mark.parametrize("ranks", [2, 4])
def test_under_a_causal_mask_all_ranks_have_the_same_work(ranks):
    keys = {(shard_sequence(distinct_tokens(16), rank, ranks).positions + 1).sum().item() for rank in range(ranks)}
    assert len(keys) == 1


def attention(kv_heads, recompute):
    """Compare output and gradients of this rank's shard with attention over the full sequence. Return the all-gathers in forward
    and in backward."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    draw = torch.Generator().manual_seed(0)
    full = [torch.randn(2, heads, 32, 8, generator=draw).requires_grad_() for heads in (4, kv_heads, kv_heads)]
    weights = torch.randn(2, 4, 32, 8, generator=draw)
    expected = CausalAttention(FULL)(*full, None)
    (expected * weights).sum().backward()

    def local(tensor):
        chunks = tensor.detach().chunk(2 * size, 2)
        return torch.cat((chunks[rank], chunks[-1 - rank]), 2)

    shards = [local(t).requires_grad_() for t in full]
    with Recorder() as forward:
        mask = Mask(FULL, mesh, False, create_float_mask)(packed(torch.zeros(2, 32 // size)))
        out = AllGatherAttention(CausalAttention(FULL), mesh, recompute)(*shards, mask)
    with Recorder() as backward:
        (out * local(weights)).sum().backward()
    torch.testing.assert_close(out, local(expected))
    for shard, tensor in zip(shards, full, strict=True):
        torch.testing.assert_close(shard.grad, local(tensor.grad), rtol=1e-5, atol=1e-5)
    return forward.op_counts["all_gather_into_tensor"], backward.op_counts["all_gather_into_tensor"]


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_attention_equals_full_attention(ranks, size, kv_heads, recompute):
    gathers = set(ranks(size).run(attention, kv_heads, recompute))
    assert gathers == {(1, 1 if recompute else 0)}


def packed(documents):
    return Context.of(documents)._replace(documents=documents)


def largest_difference_from_separate_documents(kernel):
    """Return the largest difference of output and gradients between packed documents, split over the ranks, and separate ones."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    draw = torch.Generator().manual_seed(0)
    full = [torch.randn(2, heads, 32, 8, generator=draw).requires_grad_() for heads in (4, 2, 2)]
    weights = torch.randn(2, 4, 32, 8, generator=draw)
    lengths = [[5, 1, 20, 6], [16, 9, 7]]
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in lengths])
    expected = torch.zeros_like(weights)
    for row, row_lengths in enumerate(lengths):
        for start, length in zip(torch.tensor([0, *row_lengths]).cumsum(0).tolist(), row_lengths, strict=False):
            document = [t[row : row + 1, :, start : start + length] for t in full]
            expected[row : row + 1, :, start : start + length] = CausalAttention(FULL)(*document, None)
    (expected * weights).sum().backward()

    def local(tensor):
        return torch.cat([tensor.detach().chunk(2 * size, 2)[i] for i in (rank, 2 * size - 1 - rank)], 2)

    shards = [(local(t) if size > 1 else t.detach().clone()).requires_grad_() for t in full]
    if kernel == "dense":
        mask, attend = Mask(FULL, mesh, True, create_float_mask), CausalAttention(FULL)
    else:
        mask, attend = Mask(FULL, mesh, True, create_block_mask), FlexAttention(FULL, flex_attention)
    if size > 1:
        attend = AllGatherAttention(attend, mesh, recompute=True)
    mask = mask(packed(shard_tensor(documents, rank, size)))
    if kernel == "flex":  # torch has no CPU backward for it
        with torch.no_grad():
            out = attend(*(shard.detach() for shard in shards), mask)
        return (out - (local(expected) if size > 1 else expected)).abs().max().item()
    out = attend(*shards, mask)
    (out * (local(weights) if size > 1 else weights)).sum().backward()
    pairs = [(out, expected), *((shard.grad, tensor.grad) for shard, tensor in zip(shards, full, strict=True))]
    return max((a - (local(b) if size > 1 else b)).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("kernel", ["dense", "flex"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_attention_ends_at_document_boundaries(ranks, size, kernel):
    assert max(ranks(size).run(largest_difference_from_separate_documents, kernel)) < 5e-6


KINDS = [
    kind_of(window=5),
    kind_of(softcap=1.5, scale=0.7),
    kind_of(window=9, softcap=2.0),
    kind_of(window=64, scale=0.2),
    kind_of(sinks=True),
    kind_of(window=6, sinks=True),
]


def largest_difference_between_backends(kind, by_document):
    """Return the largest difference of flex_attention, on this rank's part of the sequence, from the dense kernel on one rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh, one = (
        init_device_mesh("cpu", (size,)),
        init_device_mesh("cpu", (size, 1), mesh_dim_names=("all", "one"))["one"],
    )
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 32, 8, generator=draw) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=draw) if kind.sinks else None
    documents = torch.arange(32).div(12, rounding_mode="floor").repeat(2, 1)
    dense = Mask(kind, one, by_document, create_float_mask)(packed(documents))
    expected = shard_tensor(attention_kernel(kind)(q, k, v, dense, sinks).transpose(1, 2), rank, size).transpose(1, 2)
    mask = Mask(kind, mesh, by_document, create_block_mask)(packed(shard_tensor(documents, rank, size)))
    local = shard_tensor(q.transpose(1, 2), rank, size).transpose(1, 2)
    return (FlexAttention(kind, flex_attention)(local, k, v, mask, sinks) - expected).abs().max().item()


@pytest.mark.parametrize("by_document", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_windows_capped_scores_and_sinks_are_equal_in_all_kernels(ranks, size, kind, by_document):
    assert max(ranks(size).run(largest_difference_between_backends, kind, by_document)) < 5e-6


def test_sinks_are_equal_to_a_key_without_a_value_with_their_gradients():
    """In the CPU's kernel, and in the formula for kernels that return the logsumexp of the scores."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, 8, generator=draw).requires_grad_() for heads in (4, 2, 2))
    sinks, weights = torch.randn(4, generator=draw).requires_grad_(), torch.randn(2, 4, 9, 8, generator=draw)
    inputs = (q, k, v, sinks)

    def gradients(out):
        return torch.autograd.grad(
            (out * weights).sum(), inputs, retain_graph=True
        )  # both results are compared with one

    visible = visible_keys(9, 9, None, q.device)
    scores = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    masked = torch.where(visible, scores, -torch.inf)
    table = torch.cat([masked, sinks[:, None, None].expand(2, 4, 9, 1)], -1).softmax(-1)
    expected = table @ F.pad(v.repeat_interleave(2, 1), (0, 0, 0, 1))
    kernel = attention_kernel(kind_of(sinks=True))(q, k, v, None, sinks)
    formula = with_sinks(CausalAttention(FULL)(q, k, v, None), masked.logsumexp(-1), sinks)
    for out in (kernel, formula):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(gradients(out), gradients(expected))


def test_without_documents_a_window_is_the_models_own_mask(ranks):
    for kind in KINDS:
        assert ranks(1).run(mask_difference, kind) == [0.0]


def mask_difference(kind):
    """Return the largest difference between the results of the model's own mask and of the trainer's."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 32, 8, generator=draw) for heads in (4, 2, 2))
    context = packed(torch.zeros(2, 32, dtype=torch.int64))
    dense = Mask(kind, init_device_mesh("cpu", (1,)), False, create_float_mask)(context)
    own = CausalMask(kind.window)(context)
    sinks = torch.randn(4, generator=draw) if kind.sinks else None
    results = [attention_kernel(kind)(q, k, v, mask, sinks) for mask in (dense, own)]
    return 0.0 if torch.allclose(*results, atol=1e-6) else (results[0] - results[1]).abs().max().item()


def test_the_name_of_the_attention_kernel():
    def name(kind, device, by_document=False):
        one = SimpleNamespace(size=lambda: 1)
        layout = SampleLayout(cp=one, seq_len=32, by_document=by_document, dtype=torch.float32)
        return kernel_name(kind, layout, 1, torch.device(device))

    assert name(FULL, "cpu") == "flash_attention"
    assert name(FULL, "cuda", by_document=True) == "flex_attention"
    assert name(kind_of(softcap=2.0), "cpu") == "math"
    assert name(kind_of(sinks=True), "cpu") == "math"
    assert name(kind_of(sinks=True), "cuda") == "flex_attention"
    assert name(kind_of(window=8), "cuda") == "flex_attention"
    assert name(kind_of(window=32), "cpu") == "flash_attention"
    assert name(kind_of(widths=(24, 16)), "cpu") == "math"  # flash attention needs values as wide as keys

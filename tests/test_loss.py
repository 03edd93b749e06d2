import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.dev.benchmark import loss_table
from trainer.batch import IGNORE_INDEX
from trainer.loss import CrossEntropyHead


class Operators(TorchDispatchMode):
    """Name and elements of the result of every operator."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen.append((str(func), out.numel() if isinstance(out, torch.Tensor) else 0))
        return out


def problem(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 16, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=draw).to(dtype).requires_grad_()
    labels = torch.randint(50, (2, 7), generator=draw)
    labels[0, 2:4] = IGNORE_INDEX
    return hidden, weight, labels


def plain(hidden, weight, labels):
    logits = F.linear(hidden, weight).float().flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 14, 100])
def test_chunked_loss_and_gradients_are_those_of_the_whole_logits(chunk_tokens):
    hidden, weight, labels = problem()
    (CrossEntropyHead(labels, chunk_tokens)(hidden, weight) / 12).backward()
    reference = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    expected = plain(*reference, labels) / 12
    expected.backward()
    torch.testing.assert_close(CrossEntropyHead(labels, chunk_tokens)(hidden, weight) / 12, expected)
    torch.testing.assert_close(hidden.grad, reference[0].grad)
    torch.testing.assert_close(weight.grad, reference[1].grad)


def test_the_value_is_fp32_also_in_bf16():
    hidden, weight, labels = problem(torch.bfloat16)
    loss = CrossEntropyHead(labels, 4)(hidden, weight)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain(hidden, weight, labels), rtol=1e-6, atol=0)
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_without_gradients_none_are_made():
    hidden, weight, labels = problem()
    with torch.no_grad():
        loss = CrossEntropyHead(labels, 4)(hidden, weight)
    assert loss.grad_fn is None
    torch.testing.assert_close(loss, plain(hidden, weight, labels).detach())


def products(gradients):
    """Matrix products of one loss over two chunks."""
    hidden, weight, labels = problem()
    with torch.set_grad_enabled(gradients), Operators() as operators:
        CrossEntropyHead(labels, 7)(hidden, weight)
    return sum(name in ("aten.mm.default", "aten.addmm.default") for name, _ in operators.seen)


def test_evaluation_makes_no_gradients():
    assert products(gradients=True) == 6
    assert products(gradients=False) == 2


def test_a_batch_without_targets_has_loss_zero_and_no_gradient():
    hidden, weight, labels = problem()
    loss = CrossEntropyHead(torch.full_like(labels, IGNORE_INDEX), 4)(hidden, weight)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


def test_no_tensor_holds_the_whole_logits():
    """The largest tensor that any operator returns has one chunk's logits."""
    hidden, weight, labels = torch.randn(1, 512, 8), torch.randn(1000, 8), torch.zeros(1, 512, dtype=torch.int64)
    weight.requires_grad_()
    with Operators() as operators:
        CrossEntropyHead(labels, 64)(hidden, weight).backward()
    assert max(size for _, size in operators.seen) == 64 * 1000


def cut_vocabulary(vocab, dtype):
    """The loss over a vocabulary that is cut between ranks, and its gradients, beside those of the whole logits."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 16, generator=draw).to(dtype)
    weight = (torch.randn(vocab, 16, generator=draw) * 3).to(
        dtype
    )  # large logits, so that the normalizer must be the whole one
    labels = torch.randint(vocab, (2, 7), generator=draw)
    labels[0, 2:4] = IGNORE_INDEX
    reference = [t.clone().requires_grad_() for t in (hidden, weight)]
    expected = plain(*reference, labels)
    expected.backward()

    cut = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    mine = hidden.clone().requires_grad_()
    loss = CrossEntropyHead(labels, 4)(DTensor.from_local(mine, mesh, [Replicate()]), cut)
    loss.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(mine.grad, reference[0].grad, **tolerance)
    torch.testing.assert_close(cut.grad.full_tensor(), reference[1].grad, **tolerance)
    with torch.no_grad():
        again = CrossEntropyHead(labels, 100)(DTensor.from_local(mine, mesh, [Replicate()]), cut)
    torch.testing.assert_close(again, expected.detach(), rtol=1e-6, atol=0)
    return loss.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("size", "vocab"), [(2, 50), (2, 51), (4, 50), (4, 49)])
def test_a_vocabulary_cut_between_ranks_gives_the_same_loss_and_gradients(ranks, size, vocab, dtype):
    assert set(ranks(size).run(cut_vocabulary, vocab, dtype)) == {torch.float32}


def test_chunks_need_an_eighth_of_the_memory_of_the_whole_logits_at_most():
    """At 8,192 tokens and a vocabulary of 128,256; a cut vocabulary needs its share of that."""
    table = loss_table(seq=8192, vocab=128_256, dim=64, degrees=[1, 2], chunk_tokens=1024, dtype="fp32")
    whole, chunked, cut = (activations for _, activations, _ in table)
    assert chunked * 8 <= whole
    assert cut <= 0.55 * chunked


def test_with_the_gradient_of_a_wide_weight_they_still_need_less_than_a_third():
    """The gradient is summed up in fp32, which whole logits do without."""
    whole, chunked = loss_table(seq=8192, vocab=128_256, dim=4096, degrees=[1], chunk_tokens=1024, dtype="bf16")
    assert chunked[1] * 8 <= whole[1]
    assert chunked[2] * 3 <= whole[2]

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.base.system.units import GIB
from trainer.batch import IGNORE_INDEX
from trainer.objective import cross_entropy as loss_module
from trainer.objective.cross_entropy import CrossEntropyHead
from trainer.tools.planner.recorder import Recorder


class Operators(TorchDispatchMode):
    """Name and result size in elements of every operator."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((str(func), out.numel() if isinstance(out, torch.Tensor) else 0))
        return out


def random_inputs(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 16, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=draw).to(dtype).requires_grad_()
    labels = torch.randint(50, (2, 7), generator=draw)
    labels[0, 2:4] = IGNORE_INDEX
    return hidden, weight, labels


def full_logits(hidden, weight, softcap=None):
    logits = F.linear(hidden, weight).flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def full_loss(hidden, weight, labels, softcap=None):
    logits = full_logits(hidden, weight, softcap)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def full_squares(hidden, weight, labels, softcap=None):
    """Return the sum of the squared log-sum-exp of the targets' logits."""
    return full_logits(hidden, weight, softcap)[labels.flatten() != IGNORE_INDEX].logsumexp(-1).square().sum()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_the_z_loss_adds_its_gradient_and_not_its_value(chunk_tokens, softcap):
    hidden, weight, labels = random_inputs()
    loss, squares = sums = CrossEntropyHead(labels, chunk_tokens, z_loss=0.1)(hidden, weight, softcap)
    (sums / 12).backward(torch.ones(2))  # as in SpmdStep
    reference = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected, expected_squares = (f(*reference, labels, softcap) for f in (full_loss, full_squares))
    ((expected + 0.1 * expected_squares) / 12).backward()
    torch.testing.assert_close([loss, squares], [expected.float(), expected_squares.float()])
    for actual, exact in zip((hidden, weight), reference, strict=True):
        torch.testing.assert_close(actual.grad, exact.grad.float())


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_the_loss_of_prediction_layers_adds_its_gradient_and_not_its_value(chunk_tokens, z_loss):
    hidden, weight, labels = random_inputs()
    parts = [torch.randn_like(hidden) for _ in range(2)]
    hidden = torch.cat((hidden.detach(), *parts)).requires_grad_()
    labels = torch.stack((labels, labels.roll(1, 1), labels.flip(1)), -1)
    head = CrossEntropyHead(labels, chunk_tokens, z_loss=z_loss, prediction_weight=0.3)
    sums = head(hidden, weight)
    sums.backward(torch.ones_like(sums))
    reference = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    states = reference[0].chunk(3)
    losses, squares = (
        [f(state, reference[1], labels[..., k]) for k, state in enumerate(states)] for f in (full_loss, full_squares)
    )
    predicted, predicted_squares = (sum(values[1:]) / 2 for values in (losses, squares))
    (losses[0] + 0.3 * predicted + z_loss * (squares[0] + 0.3 * predicted_squares)).backward()
    expected = [losses[0], predicted, *([squares[0]] if z_loss else [])]
    torch.testing.assert_close(sums, torch.stack(expected).float())
    for actual, exact in zip((hidden, weight), reference, strict=True):
        torch.testing.assert_close(actual.grad, exact.grad.float())


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 14, 100])
def test_chunked_loss_and_gradients_equal_those_of_full_logits(chunk_tokens):
    hidden, weight, labels = random_inputs()
    loss = CrossEntropyHead(labels, chunk_tokens)(hidden, weight) / 12
    loss.backward()
    reference = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    expected = full_loss(*reference, labels) / 12
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(hidden.grad, reference[0].grad)
    torch.testing.assert_close(weight.grad, reference[1].grad)


def test_the_loss_is_fp32_for_bf16_inputs():
    hidden, weight, labels = random_inputs(torch.bfloat16)
    loss = CrossEntropyHead(labels, 4)(hidden, weight)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, full_loss(hidden, weight, labels), rtol=1e-6, atol=0)
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_backward_through_one_loss_adds_its_own_gradient(dtype):
    """Zero-bubble schedules run backward once for the gradients of inputs and once for those of weights."""
    hidden, weight, labels = random_inputs(dtype)
    loss = CrossEntropyHead(labels, 4)(hidden, weight)
    loss.backward(retain_graph=True)
    first = [hidden.grad.clone(), weight.grad.clone()]
    (2 * loss).backward()
    torch.testing.assert_close([hidden.grad, weight.grad], [3 * gradient for gradient in first], rtol=1e-2, atol=1e-6)


def test_the_loss_has_no_graph_without_grad_mode():
    hidden, weight, labels = random_inputs()
    with torch.no_grad():
        loss = CrossEntropyHead(labels, 4)(hidden, weight)
    assert loss.grad_fn is None
    torch.testing.assert_close(loss, full_loss(hidden, weight, labels).detach())


def count_matmuls(gradients):
    """Return the number of matrix products of one loss over two chunks."""
    hidden, weight, labels = random_inputs()
    with torch.set_grad_enabled(gradients), Operators() as operators:
        CrossEntropyHead(labels, 7)(hidden, weight)
    return sum(name.startswith(("aten.mm.", "aten.addmm.")) for name, _ in operators.calls)


def test_evaluation_computes_no_gradients():
    assert count_matmuls(gradients=True) == 6
    assert count_matmuls(gradients=False) == 2


def test_a_batch_without_targets_has_loss_zero_and_no_gradient():
    hidden, weight, labels = random_inputs()
    loss = CrossEntropyHead(torch.full_like(labels, IGNORE_INDEX), 4)(hidden, weight)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


def test_no_tensor_holds_full_logits():
    """The largest result of any operator is one chunk of logits."""
    hidden, weight, labels = torch.randn(1, 512, 8), torch.randn(1000, 8), torch.zeros(1, 512, dtype=torch.int64)
    weight.requires_grad_()
    with Operators() as operators:
        CrossEntropyHead(labels, 64)(hidden, weight).backward()
    assert max(size for _, size in operators.calls) == 64 * 1000


def sharded_vocabulary(vocab, dtype, softcap, z_loss):
    """Compare the loss over a sharded vocabulary and its gradients with those of full logits."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 16, generator=draw).to(dtype)
    # large logits, so that the normalizer of one shard would be wrong
    weight = (torch.randn(vocab, 16, generator=draw) * 3).to(dtype)
    labels = torch.randint(vocab, (2, 7), generator=draw)
    labels[0, 2:4] = IGNORE_INDEX
    reference = [t.clone().requires_grad_() for t in (hidden, weight)]
    expected = torch.stack([full_loss(*reference, labels, softcap), full_squares(*reference, labels, softcap)])
    expected.backward(torch.tensor([1.0, z_loss]))
    expected = expected.detach() if z_loss else expected[0].detach()

    sharded_weight = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    local_hidden = hidden.clone().requires_grad_()
    replicated = DTensor.from_local(local_hidden, mesh, [Replicate()])
    loss = CrossEntropyHead(labels, 4, z_loss=z_loss)(replicated, sharded_weight, softcap)
    loss.backward(torch.ones_like(loss))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(local_hidden.grad, reference[0].grad, **tolerance)
    torch.testing.assert_close(sharded_weight.grad.full_tensor(), reference[1].grad, **tolerance)
    with torch.no_grad():
        unchunked = CrossEntropyHead(labels, 100, z_loss=z_loss)(replicated, sharded_weight, softcap)
    torch.testing.assert_close(unchunked, expected, rtol=1e-6, atol=0)
    return loss.dtype


@pytest.mark.parametrize(("softcap", "z_loss"), [(None, 0.0), (5.0, 0.0), (None, 0.01), (5.0, 0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("size", "vocab"), [(1, 50), (2, 50), (2, 51), (4, 50), (4, 49)])
def test_a_sharded_vocabulary_gives_the_same_loss_and_gradients(ranks, size, vocab, dtype, softcap, z_loss):
    assert set(ranks(size).run(sharded_vocabulary, vocab, dtype, softcap, z_loss)) == {torch.float32}


SEQ, VOCAB = 8192, 128_256


def peaks_gib(loss, dim, dtype, tp=1):
    """Return the peak memory of forward and backward without the inputs, in GiB: without and with the gradient of the weight."""
    mesh = init_device_mesh("cpu", (tp,))
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden = torch.empty(1, SEQ, dim, dtype=dtype, requires_grad=True)
        weight = torch.empty(-(-VOCAB // tp), dim, dtype=dtype, requires_grad=True)
        inputs = [hidden, weight, torch.zeros(1, SEQ, dtype=torch.int64)]
        if tp > 1:
            full = {"shape": (VOCAB, dim), "stride": (dim, 1)}
            inputs[0] = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
            inputs[1] = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False, **full)
        with Recorder(on_gpu=True) as recorder:
            loss(*inputs).backward()
    gradients = {weight.numel() * itemsize for itemsize in (2, 4)}
    new = [
        recorder.timeline(lambda a, ignored=ignored: a.born >= 0 and a.num_bytes not in ignored)
        for ignored in (gradients, ())
    ]
    return tuple(int(timeline.sum(axis=0).max()) / GIB for timeline in new)


def chunked_loss(hidden, weight, labels):
    return CrossEntropyHead(labels, 1024)(hidden, weight)


@pytest.fixture
def fake_group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def test_chunks_need_at_most_a_twentieth_of_the_memory_of_full_logits(fake_group):
    """At 8,192 tokens and a vocabulary of 128,256. A sharded vocabulary needs its share of that."""
    _, full = peaks_gib(full_loss, 64, torch.float32)
    (chunked, _), (sharded, _) = (peaks_gib(chunked_loss, 64, torch.float32, tp) for tp in (1, 2))
    assert (full, chunked, sharded) == pytest.approx((11.74, 0.491, 0.247), rel=0.02)


def test_chunks_with_the_gradient_of_a_wide_weight_need_less_than_a_third(fake_group):
    """Chunks accumulate the gradient in fp32, full logits do not. docs/measurements.md has these figures."""
    _, full = peaks_gib(full_loss, 4096, torch.bfloat16)
    assert full == pytest.approx(11.74, rel=0.02)
    for tp, figures in {1: (0.80, 3.06), 2: (0.43, 1.59), 8: (0.19, 0.49)}.items():
        assert peaks_gib(chunked_loss, 4096, torch.bfloat16, tp) == pytest.approx(figures, rel=0.02)


@pytest.mark.parametrize(("dtype", "z_loss"), [(torch.float32, 0.0), (torch.bfloat16, 0.0), (torch.float32, 0.1)])
def test_the_compiled_loss_equals_the_eager_one(monkeypatch, dtype, z_loss):
    """The compiler's own code is not tested, only the function that it compiles. The logits are capped."""
    torch._dynamo.reset()  # it compiles a function for a limited number of dtypes
    compiled = torch.compile(loss_module._losses_and_gradient, fullgraph=True, dynamic=False, backend="eager")
    monkeypatch.setattr(loss_module, "_compiled_losses_and_gradient", lambda: compiled)
    results = []
    for is_compiled in (False, True):
        hidden, weight, labels = random_inputs(dtype)
        head = CrossEntropyHead(labels, 4, is_compiled, z_loss)
        loss = head(hidden, weight, 5.0)
        loss.backward(torch.ones_like(loss))
        with torch.no_grad():
            assert torch.equal(head(hidden, weight, 5.0), loss)
        results.append((loss.detach(), hidden.grad, weight.grad))
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(eager, other)

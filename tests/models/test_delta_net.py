"""The gated delta rule: its chunked form against its formula, and the cache of its state."""

from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from models import MODELS, affine_scan
from models.affine_scan import AffineMaps
from models.delta_net import CHUNK, Carry, DeltaRule, boundaries_of, segments_of, unit
from models.kda import ChannelDeltaRule
from models.qwen_next import Qwen35Sizes
from tests.models.families import inputs, model_of
from trainer.inference.kv_cache import CachedState, KvCache

HEADS, GROUPS, KEY, VALUE, WIDTH = 2, 2, 6, 5, 4


def drawn(rows: int, tokens: int, decay: float = 1.0, channels: int = 1) -> tuple:
    """Return random arguments of a kernel in double precision, without documents. channels: decays of a head and token."""
    draw = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    shapes = (HEADS, KEY), (HEADS, KEY), (HEADS * GROUPS, VALUE)
    qkv = [normal(rows, tokens, *shape) for shape in shapes]
    filters = [normal(heads * width, 1, WIDTH) / 2 for heads, width in shapes]
    rate, beta = (
        torch.rand(rows, tokens, HEADS * GROUPS, n, generator=draw, dtype=torch.float64) for n in (channels, 1)
    )
    return qkv, filters, -decay * rate, beta[..., 0]


def leaves(arguments: tuple) -> list[torch.Tensor]:
    qkv, filters, *rates = arguments
    return [x.requires_grad_() for x in (*qkv, *filters, *rates)]


def formula(qkv, filters, log_decay, beta) -> torch.Tensor:
    """Return the result for one document, token by token."""
    convolved = []
    for x, weights in zip(qkv, filters, strict=True):
        padded = F.pad(x.flatten(2), (0, 0, WIDTH - 1, 0))
        sums = sum(padded[:, i : i + x.shape[1]] * weights[:, 0, i] for i in range(WIDTH))
        convolved.append(F.silu(sums).view_as(x))
    q, k, v = convolved
    q, k = (unit(x).repeat_interleave(GROUPS, 2) for x in (q, k))
    state, out = q.new_zeros(len(q), HEADS * GROUPS, KEY, VALUE), []
    for t in range(q.shape[1]):
        key, query = k[:, t, :, :, None], q[:, t, :, :, None] * KEY**-0.5
        state = log_decay[:, t].exp()[..., None] * state
        correction = beta[:, t][..., None, None] * (v[:, t][:, :, None] - key.mT @ state)
        state = state + key @ correction
        out.append((query.mT @ state)[:, :, 0])
    return torch.stack(out, 1)


def gradients(out: torch.Tensor, of: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    return list(torch.autograd.grad((out * weights).sum(), of))


@pytest.mark.parametrize("tokens", [1, 3, CHUNK - 1, CHUNK, CHUNK + 1, 150])
@pytest.mark.parametrize("decay", [0.01, 1.0, 300.0])
@pytest.mark.parametrize(("kernel", "channels"), [(DeltaRule, 1), (ChannelDeltaRule, KEY)])
def test_the_chunked_form_equals_the_formula_for_each_document(kernel, channels, tokens, decay):
    """A slow decay would show a state that passes a boundary, a fast one an overflow."""
    arguments = drawn(2, tokens, decay, channels)
    variables = leaves(arguments)
    parts, spans = [], list(pairwise(sorted({0, 1, tokens // 3, tokens // 2, tokens})))
    for start, end in spans:
        qkv, filters, *rates = arguments
        parts.append(formula([x[:, start:end] for x in qkv], filters, *(x[:, start:end] for x in rates)))
    expected = torch.cat(parts, 1)
    documents = torch.cat([torch.full((end - start,), start) for start, end in spans])
    documents = torch.cat((torch.full((WIDTH - 1,), -2), documents)).expand(2, -1)
    actual = kernel(Carry())(*arguments, documents)
    assert torch.allclose(actual, expected, rtol=0, atol=1e-12)
    for a, b in zip(gradients(actual, variables), gradients(expected, variables), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)


def test_without_boundaries_the_kernel_is_that_of_one_document():
    arguments = drawn(2, 100)
    variables = leaves(arguments)
    actual, expected = DeltaRule(Carry())(*arguments, None), formula(*arguments)
    assert torch.allclose(actual, expected, rtol=0, atol=1e-12)
    for a, b in zip(gradients(actual, variables), gradients(expected, variables), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)


def test_another_document_does_not_even_change_the_rounding():
    qkv, filters, log_decay, beta = drawn(1, 90)
    documents = torch.cat((torch.full((WIDTH - 1,), -2), torch.arange(90) // 37))[None]

    def of_second(factor: float) -> torch.Tensor:
        first = torch.where(torch.arange(90) < 37, factor, 1.0)[None, :, None]
        arguments = [x * first[..., None] for x in qkv], filters, log_decay * first[..., None], beta * first
        with torch.no_grad():
            return DeltaRule(Carry())(*arguments, documents)[:, 37:74]

    assert torch.equal(of_second(1.0), of_second(0.3))


def test_segments_count_the_boundaries_since_the_token_before_the_row():
    documents = torch.tensor([[7, 7, 7, 7, 8, 8, -1], [7, 7, 6, 7, 7, 7, 7]])
    assert segments_of(documents, 3).tolist() == [[0, 1, 1, 2], [1, 1, 1, 1]]
    visible, sees_state, reaches_end = boundaries_of(segments_of(documents, 3), 2, documents)
    assert visible.shape == (2, 2, 1, 2, 2)  # (chunks, rows, 1, size, size)
    assert sees_state[..., 0].tolist() == [[[[True, False]], [[False, False]]], [[[True, False]], [[True, True]]]]
    assert reaches_end[..., 0].tolist() == [[[[False, True]], [[True, True]]], [[[False, True]], [[True, True]]]]


def maps(chunks: int) -> AffineMaps:
    draw = torch.Generator().manual_seed(0)
    shapes = (chunks, 2, 3, 4, 4), (chunks, 2, 3, 4, 5)
    return AffineMaps(*(torch.randn(shape, generator=draw, dtype=torch.float64) / 2 for shape in shapes))


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 8])
def test_maps_compose_and_their_states_follow_each_other(chunks):
    own, initial = maps(chunks), torch.randn(2, 3, 4, 5, dtype=torch.float64)
    states = [initial]
    for a, b in zip(*own, strict=True):
        states.append(a @ states[-1] + b)
    assert torch.allclose(own.states(initial), torch.stack(states))
    (a,), (b,) = own.composed()
    assert torch.allclose(a @ initial + b, states[-1])


def test_the_scan_has_the_gradients_of_its_formula():
    own, initial = maps(3), torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    variables = *(x.requires_grad_() for x in own), initial
    assert gradcheck(lambda a, b, s: AffineMaps(a, b).states(s), variables)
    torch.library.opcheck(affine_scan._scan, (*variables, False))


def test_a_state_that_is_not_reset_between_requests_is_found():
    """Negative control of the tests of the cache."""
    model, tokens = model_of("qwen3.5", 1), inputs()[0]
    prompts = [{0: tokens[0, :20].tolist()}, {0: tokens[1, :9].tolist()}]

    def answers() -> list[torch.Tensor]:
        cache = KvCache(model, model.structure(), model.sizes, torch.float32)
        results = [cache.next_logits(rows) for rows in prompts]
        with cache.removed():
            return results

    def kept(state: CachedState, length: int) -> bool:
        state.end = length
        return True

    right = answers()
    with patch.object(CachedState, "truncate", kept):
        wrong = answers()
    assert torch.equal(right[0], wrong[0])
    assert (right[1] - wrong[1]).abs().max() > 1e-3 * right[1].abs().max()


def test_a_convolution_of_one_token_is_refused():
    sizes = MODELS["qwen3.5"].by_size["debug"]
    with pytest.raises(ValueError, match="linear_conv_kernel_dim 1 must be at least 2"):
        Qwen35Sizes(**{**vars(sizes), "linear_conv_kernel_dim": 1})
    with pytest.raises(ValueError, match="linear_num_key_heads 3 must divide linear_num_value_heads 8"):
        Qwen35Sizes(**{**vars(sizes), "linear_num_key_heads": 3})

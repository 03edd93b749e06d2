import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from models import MODELS
from models.attention import Attention
from models.context import Context
from models.decoder import Decoder
from models.llama import LlamaSizes, llama
from models.rope import rotate_pairs
from trainer.parallel.rotation import rotate_by_complex_product

SMALL = LlamaSizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=64)
CPU = torch.device("cpu")


def build(sizes: LlamaSizes) -> Decoder:
    torch.manual_seed(0)
    return llama(sizes)


def inputs(sizes: LlamaSizes, batch: int = 2, seq: int = 10):
    tokens = torch.randint(sizes.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(1))
    return tokens, Context.of(tokens)


def test_rotation_is_a_complex_product():
    x = torch.randn(2, 5, 3, 8)
    frequencies = 1 / 10_000 ** (torch.arange(0, 8, 2) / 8)
    angles = torch.outer(torch.arange(5), frequencies)
    factors = torch.polar(torch.ones(5, 4), angles)[:, None]
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * factors)
    rope = torch.view_as_real(factors)
    torch.testing.assert_close(rotate_pairs(x, rope), expected.flatten(-2))
    torch.testing.assert_close(rotate_by_complex_product(x, rope), expected.flatten(-2))


def test_frequencies_without_scaling():
    sizes = replace(SMALL, rope_theta=10_000.0)
    torch.testing.assert_close(sizes.rope().frequencies(CPU), 1 / 10_000 ** (torch.arange(0, 8, 2) / 8))


@pytest.mark.parametrize(("family", "size"), [("llama3.1", "8b"), ("llama3.2", "1b")])
def test_frequencies_scaled_as_in_llama_3_1(family, size):
    """The published rule for each pair, by wavelength, with its two thresholds."""
    sizes = MODELS[family].by_size[size]
    expected = []
    for pair in range(sizes.head_dim // 2):
        frequency = 500_000.0 ** (-2 * pair / sizes.head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength > 8192 / 1.0:
            frequency /= sizes.rope_factor
        elif wavelength > 8192 / 4.0:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            frequency = (1 - smooth) * frequency / sizes.rope_factor + smooth * frequency
        expected.append(frequency)
    torch.testing.assert_close(sizes.rope().frequencies(CPU), torch.tensor(expected), rtol=1e-5, atol=0)
    assert len({round(f / 500_000.0 ** (-2 * i / sizes.head_dim), 3) for i, f in enumerate(expected)}) > 3


def test_grouped_query_attention_is_attention_with_repeated_heads():
    torch.manual_seed(0)
    attention = Attention(SMALL.dim, SMALL.attention_kind(), rotate_pairs)
    x = torch.randn(2, 6, 32)
    _, context = inputs(SMALL, seq=6)
    rope = SMALL.rope()(context.positions)
    q = rotate_pairs(attention.wq(x).view(2, 6, 4, 8), rope).transpose(1, 2)
    k = rotate_pairs(attention.wk(x).view(2, 6, 2, 8), rope).transpose(1, 2).repeat_interleave(2, dim=1)
    v = attention.wv(x).view(2, 6, 2, 8).transpose(1, 2).repeat_interleave(2, dim=1)
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    expected = attention.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(attention(x, context._replace(rope=rope)), expected)


def test_a_token_attends_only_to_earlier_tokens():
    model = build(SMALL)
    tokens, context = inputs(SMALL)
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % SMALL.vocab_size
    before, after = model(tokens, context), model(changed, context)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert (before[:, 6:] - after[:, 6:]).abs().amax(-1).min() > 1e-4


def test_logits_depend_on_distances_not_on_absolute_positions():
    model = build(SMALL)
    tokens, context = inputs(SMALL)
    later = context._replace(positions=context.positions + 100)
    torch.testing.assert_close(model(tokens, context), model(tokens, later))


def test_without_a_context_each_row_is_one_document():
    tokens, context = inputs(SMALL)
    assert context.positions.tolist() == [list(range(10))] * 2 and not context.documents.any()
    assert context.samples.tolist() == [0, 1]
    model = build(SMALL)
    assert torch.equal(model(tokens), model(tokens, context))


def test_a_head_is_applied_inside_the_output_module():
    model = build(SMALL)
    tokens, context = inputs(SMALL)
    logits = model(tokens, context)
    assert logits.shape == (2, 10, 64)
    torch.testing.assert_close(model(tokens, context, head=F.linear), logits)


def test_tied_embeddings_are_one_parameter():
    model = build(replace(SMALL, tied_embeddings=True))
    assert model.output.weight is model.tok_embeddings.weight
    assert "output.weight" not in dict(model.named_parameters())


def test_flops_per_token_equal_a_count_by_hand():
    """Every product of a model with one layer, dim 4, hidden 6, vocab 10, two heads, one kv head."""
    sizes = LlamaSizes(dim=4, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=6, vocab_size=10)
    multiply_adds = 4 * 4 + 2 * (4 * 2) + 4 * 4 + 3 * (4 * 6) + 4 * 10
    attention = 4 * (1 + 2 + 3 + 4 + 5) / 5 * 2  # token i attends to i keys; scores and values
    assert llama(sizes).flops_per_token(5) == 3 * 2 * (multiply_adds + attention)


def test_flops_of_8b_are_six_per_matrix_parameter_plus_attention():
    with torch.device("meta"):
        model = MODELS["llama3"].model(MODELS["llama3"].by_size["8b"])
    matrix_parameters = 8_030_261_248 - 128_256 * 4096 - 65 * 4096  # neither the embedding nor the norms
    assert model.flops_per_token(8192) == 6 * matrix_parameters + 6 * 32 * 4096 * 8193


def test_initial_values_have_the_documented_standard_deviation():
    model = build(SMALL)  # two layers: sqrt(2 n_layers) = 2
    for name, inputs_of_matrix, std in (
        ("tok_embeddings.weight", 400, 0.05),
        ("layers.0.attention.wq.weight", 400, 0.05),
        ("layers.1.attention.wo.weight", 400, 0.025),
        ("layers.1.feed_forward.w2.weight", 100, 0.05),
        ("output.weight", 100, 0.1),
    ):
        rows = torch.empty(500, inputs_of_matrix)
        model.init_parameter(name, rows, torch.Generator().manual_seed(0))
        assert rows.std().item() == pytest.approx(std, rel=0.02)
        assert abs(rows.mean().item()) < std / 50
    rows = torch.empty(8)
    model.init_parameter("layers.0.attention_norm.weight", rows, torch.Generator())
    assert rows.tolist() == [1.0] * 8

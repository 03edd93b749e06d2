"""Rotary encoding of blocks that are not compiled."""

import torch

from models import MODELS
from models.llama import LlamaSizes
from models.rope import rotate_halves
from tests.parallel.tiny_models import inputs, reference
from trainer.parallel.rotation import apply_complex_rotation, rotate_by_complex_product

SIZES = LlamaSizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=64)


def test_a_complex_product_changes_no_logits():
    model, (tokens, context) = reference(SIZES), inputs(SIZES)
    expected = model(tokens, context)
    apply_complex_rotation(model)
    assert {block.attention.rotate for block in model.layers.values()} == {rotate_by_complex_product}
    torch.testing.assert_close(model(tokens, context), expected)


def test_layers_that_rotate_halves_keep_their_rotation():
    with torch.device("meta"):
        model = MODELS["qwen3"].model(MODELS["qwen3"].by_size["debug"])
    apply_complex_rotation(model)
    assert {block.attention.rotate for block in model.layers.values()} == {rotate_halves}

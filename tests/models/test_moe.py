"""Routers, products of groups of rows, and the order of a token's experts."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from models import MODELS
from models.huggingface_tensors import is_stacked
from models.mixtral import MixtralSizes
from models.moe import MixtureOfExperts, Router, is_stack
from models.row_groups import grouped_product
from models.sizes import DEBUG
from models.spec import meta_model
from trainer.tools.testing.random_parameters import randomize

SIZES = MixtralSizes(**DEBUG | {"dim": 8, "hidden_dim": 12, "n_experts": 4, "experts_per_token": 2})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 9, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 24), (6, 10), (16, 10)])
def test_a_grouped_product_and_its_gradients_equal_those_of_a_loop(dtype, counts, inputs, outputs):
    """Rows of 6 values have strides that torch's kernel refuses."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), inputs, generator=generator).to(dtype).requires_grad_()
    weights = torch.randn(len(counts), outputs, inputs, generator=generator).to(dtype).requires_grad_()
    actual = grouped_product(x, weights, torch.tensor(counts))
    expected = torch.cat([F.linear(rows, w) for rows, w in zip(x.split(counts), weights, strict=True)])
    torch.testing.assert_close(actual, expected)
    of_actual = torch.autograd.grad(actual.sum(), (x, weights))  # the gradient of a sum is an expanded tensor
    of_expected = torch.autograd.grad(expected.sum(), (x, weights))
    torch.testing.assert_close(of_actual, of_expected)
    assert (of_actual[1][torch.tensor(counts) == 0] == 0).all()


def test_fake_tensors_pass_through_a_grouped_product_in_fp32():
    with FakeTensorMode():
        x, weights = torch.empty(7, 16, requires_grad=True), torch.empty(3, 24, 16, requires_grad=True)
        result = grouped_product(x, weights, torch.empty(3, dtype=torch.int64))
        result.sum().backward()
    assert (result.shape, x.grad.shape, weights.grad.shape) == ((7, 24), (7, 16), (3, 24, 16))


def test_of_equal_scores_the_lower_index_comes_first():
    router = Router(SIZES)
    with torch.no_grad():
        router.weight.fill_(0.5)
        routing = router(torch.ones(1, 3, 8))
    assert routing.experts.tolist() == [[[0, 1]] * 3]
    assert torch.equal(routing.weights, torch.full((1, 3, 2), 0.5))


@pytest.mark.parametrize("family", [name for name, spec in MODELS.items() if "debug" in spec.by_size])
def test_the_stacks_of_a_model_are_those_of_its_files(family):
    spec = MODELS[family]
    model = meta_model(spec.model, spec.by_size["debug"])
    stacks = {name for name, _ in model.named_parameters() if is_stack(model, name)}
    assert stacks == {name for name, _ in model.named_parameters() if is_stacked(spec.huggingface, name)}
    assert {name.rpartition(".")[0] for name in stacks} == {
        n for n, _ in model.named_modules() if n.endswith(".experts")
    }


def test_the_result_of_a_token_does_not_depend_on_the_other_tokens():
    mixture = MixtureOfExperts(SIZES)
    randomize(mixture)
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1))
    together = mixture(x)
    alone = torch.cat([mixture(x[:, i : i + 1]) for i in range(9)], 1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)

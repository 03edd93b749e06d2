"""Adapters of experts: a model with them equals the model with merged matrices."""

import pytest
import torch

from models import MODELS
from models.context import Context
from models.spec import multiply_adds
from trainer.adapters.apply import apply_lora
from trainer.adapters.select import matrices_of, select_parameters, weight_of
from trainer.base.config import ConfigError, LoraConfig
from trainer.parallel.init_weights import initialize

TOKENS = torch.arange(2, 26).view(1, 24)
CONFIG = LoraConfig(rank=4, targets=("*.experts.*",))


def adapted(family, config=CONFIG):
    """Return a debug model without adapters, the same with adapters whose second matrices are not zero, and what is trained."""
    spec, models = MODELS[family], []
    for lora in (None, config):
        model = spec.model(spec.by_size["debug"])
        structure = model.structure()
        if lora is not None:
            trained = select_parameters(model, structure, lora)
            apply_lora(model, structure.blocks_path, trained, lora, seed=0)
        initialize(model, seed=0, lora=lora)
        models.append(model)
    draw = torch.Generator().manual_seed(0)
    for name in trained.shapes:
        if name.endswith("lora_b"):
            models[1].get_parameter(name).data.normal_(0, 0.1, generator=draw)
    return *models, trained


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_result_and_gradients_are_those_of_merged_matrices(family):
    base, model, trained = adapted(family)
    assert {name.rpartition(".")[2] for name in trained.adapted} == {"w1", "w2", "w3"} and not trained.fully
    weights = {name: base.get_parameter(name) for name in trained.adapted}
    for name, weight in weights.items():
        a, b = map(model.get_parameter, matrices_of(name))
        weight.data += CONFIG.scale * b.data @ a.data
        assert weight_of(matrices_of(name)[0]) == weight_of(matrices_of(name)[1]) == name
    results = [m(TOKENS, Context.of(TOKENS)) for m in (base, model)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    for result in results:
        result.square().sum().backward()
    for name, weight in weights.items():
        a, b = map(model.get_parameter, matrices_of(name))
        assert a.grad.any() and b.grad.any()
        for gradient, expected in ((a.grad, b.mT @ weight.grad), (b.grad, weight.grad @ a.mT)):
            assert (gradient - CONFIG.scale * expected).norm() <= 1e-4 * gradient.norm()
        idle = ~weight.grad.flatten(1).any(1)  # experts without tokens
        assert not a.grad[idle].any() and not b.grad[idle].any()
    assert all(p.grad is None for name, p in model.named_parameters() if name not in trained.names)


def test_an_expert_without_tokens_has_zero_gradients():
    _, model, _ = adapted("mixtral")
    layer = model.get_submodule("layers.0.feed_forward")
    rows, counts = torch.ones(8, layer.experts.w1.shape[-1]), torch.tensor([3, 0, 2, 0, 0, 0, 0, 3])
    layer.experts(rows, counts).sum().backward()
    for name in ("w1_lora_a", "w1_lora_b", "w2_lora_a", "w2_lora_b"):
        gradient = layer.experts.get_parameter(name).grad.flatten(1)
        assert torch.equal(gradient.any(1), counts > 0)


def test_flops_count_the_experts_of_a_token_only():
    spec = MODELS["mixtral"]
    with torch.device("meta"):
        model = spec.model(spec.by_size["debug"])
    trained = select_parameters(model, model.structure(), CONFIG)
    used = sum(p[0] * p[1] * p[2] for p in trained.shapes.values()) * spec.by_size["debug"].experts_per_token
    used //= spec.by_size["debug"].n_experts
    expected = model.flops_per_token(32) - 2 * sum(multiply_adds(model).values()) + 6 * used
    assert trained.flops_per_token(model, 32) == expected


def test_a_router_is_no_target():
    with torch.device("meta"):
        model = MODELS["mixtral"].model(MODELS["mixtral"].by_size["debug"])
    with pytest.raises(ConfigError) as error:
        select_parameters(model, model.structure(), LoraConfig(rank=4, targets=("*.router",)))
    problem = "*.router matches no linear module or matrix of experts of the blocks"
    hint = "layers.0.feed_forward.router can only be trained fully, see [lora] train_fully"
    assert error.value.message == f"{problem}; {hint}"

"""Biases of experts, and their routers."""

import pytest
import torch

from models import MODELS
from models.gpt_oss import BiasedRouter
from models.row_groups import grouped_product
from models.spec import is_bias, meta_model
from trainer.base.config import OptimizerConfig
from trainer.base.config.load import load_config
from trainer.optim.parameter_groups import resolve_groups
from trainer.parallel.init_weights import allocate, initialize
from trainer.tools.testing.allocations import build_step

SPEC = MODELS["gpt-oss"]
SIZES = SPEC.by_size["debug"]
BIASES = {"bias", "sinks", "b1", "b2", "b3"}


@pytest.mark.parametrize("inputs", [8, 6])  # with and without torch's kernel, which needs aligned rows
def test_biases_of_groups_are_added_and_their_gradients_are_summed_in_fp32(inputs):
    for dtype in (torch.float32, torch.bfloat16):
        x, weights, biases = (torch.randn(s, dtype=dtype) for s in ((1002, inputs), (3, 8, inputs), (3, 8)))
        biases.requires_grad_()
        counts = torch.tensor([2, 0, 1000])
        rows = grouped_product(x, weights, counts, biases)
        assert torch.equal(rows, grouped_product(x, weights, counts) + biases.repeat_interleave(counts, 0))
        rows.backward(torch.ones_like(rows))
        assert torch.equal(biases.grad, counts[:, None].expand(3, 8).to(dtype))  # a sum in bf16 would end at 256


def test_biases_and_sinks_start_at_zero_and_do_not_decay():
    with torch.device("meta"):
        model = SPEC.model(SIZES)
    allocate(model, torch.device("cpu"))
    initialize(model, seed=0)
    parameters = dict(model.named_parameters())
    biases = {name for name in parameters if is_bias(model, name)}
    assert {name.rpartition(".")[2] for name in biases} == BIASES
    assert biases == {name for name, p in parameters.items() if not p.any()}
    decays = {
        n: group.weight_decay for group in resolve_groups(OptimizerConfig(), parameters, biases) for n in group.names
    }
    undecayed = {name for name, decay in decays.items() if not decay}
    assert undecayed == {name for name in parameters if name in biases or "norm" in name}
    assert decays.keys() == parameters.keys()


def test_the_bias_of_the_router_decides_and_the_weights_of_a_token_sum_to_one():
    router = BiasedRouter(SIZES)
    torch.nn.init.zeros_(router.weight)
    router.bias.data.copy_(torch.tensor([0.0, 3.0, -1.0, 2.0, 2.0, 0.0, 0.0, 0.0]))
    routing = router(torch.randn(1, 2, SIZES.dim))
    assert routing.experts.tolist() == [[[1, 3]] * 2]  # of equal logits, that of the lower index
    torch.testing.assert_close(routing.weights[0, 0], torch.tensor([3.0, 2.0]).softmax(0))


def test_the_update_knows_the_stacked_biases_of_a_sharded_model(ranks):
    assert ranks(2).run(undecayed_dims) == [{1, 2}] * 2


def undecayed_dims():
    """Return the numbers of dims of the parameters without weight decay, after FSDP has changed the classes of the modules."""
    settings = "--model.name gpt-oss --parallel.dp_shard 2 --parallel.ep 2 --optimizer.weight_decay 0.1"
    engine, _ = build_step(load_config(settings.split()))
    (updater,) = engine.optimizer.updaters
    return {p.dim() for group in updater.param_groups if not group["weight_decay"] for p in group["params"]}


def test_the_published_model_has_biases_in_every_module():
    model = meta_model(SPEC.model, SPEC.by_size["20b"])
    layer = {name.removeprefix("layers.0.") for name, _ in model.named_parameters() if name.startswith("layers.0.")}
    assert {name for name in layer if name.rpartition(".")[2] in BIASES} == {
        *(f"attention.{w}.bias" for w in ("wq", "wk", "wv", "wo")),
        *("attention.sinks", "feed_forward.router.bias"),
        *(f"feed_forward.experts.{b}" for b in ("b1", "b2", "b3")),
    }

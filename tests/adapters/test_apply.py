"""Dropout and initial values of adapters."""

import pytest
import torch
from torch import nn

from models.context import Context
from trainer.adapters.apply import AdapterDropout, apply_lora
from trainer.adapters.select import LORA_A, LORA_B, TrainedParameters, adapter_shapes, init_adapter
from trainer.base.config import ActivationCheckpointConfig, LoraConfig
from trainer.parallel.activation_checkpoint import block_forward, recompute_policy
from trainer.parallel.parallelize import configure_compiler


class OneBlock(nn.Module):
    """A model with one block, which drops values of its input."""

    def __init__(self, name, function):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Module()})
        self.layers[name].forward = function

    def forward(self, h, context, head=None):
        (block,) = self.layers.values()
        return block(h, context)


def kept_values(documents, positions, samples, block="0", module_key=1, seed=0):
    """Return whether the dropout keeps each value of 64 columns, (batch, seq, 64). documents, positions: (batch, seq); samples:
    (batch,)."""
    dropout = AdapterDropout(0.25, seed)
    model = OneBlock(block, lambda h, context: dropout(h, module_key, 0))
    dropout.attach(model, "layers")
    result = model(torch.ones(*documents.shape, 64), Context(positions, documents, samples))
    torch.testing.assert_close(result, torch.where(result > 0, 4 / 3, 0.0))
    return result > 0


def test_a_quarter_of_the_values_is_dropped():
    kept = kept_values(torch.full((1, 4096), 5), torch.arange(4096)[None], torch.tensor([3]))[0]
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.005)
    assert kept.float().mean(0).sub(0.75).abs().max() < 0.04  # of each column
    assert len(kept.unique(dim=0)) == 4096


def test_tokens_of_different_samples_documents_and_positions_drop_different_values():
    documents, positions = torch.arange(64).repeat(8, 2), torch.arange(2).repeat_interleave(64).repeat(8, 1)
    kept = kept_values(documents, positions, torch.arange(8))
    assert len(kept.flatten(0, 1).unique(dim=0)) == 8 * 64 * 2


def test_blocks_modules_and_seeds_drop_different_values():
    zero = torch.zeros(1, 1, dtype=torch.int64)
    arguments = ({}, {"block": "1"}, {"module_key": 2}, {"seed": 1})
    masks = torch.stack([kept_values(zero, zero, zero[0], **changed)[0, 0] for changed in arguments])
    assert len(masks.unique(dim=0)) == 4
    assert torch.equal(kept_values(zero, zero, zero[0]), kept_values(zero, zero, zero[0]))


@pytest.mark.parametrize("compiled", [False, True])
def test_recomputation_after_another_microbatch_drops_the_same_values(compiled):
    torch._dynamo.reset()
    configure_compiler(ActivationCheckpointConfig(), None)
    gradients = []
    for mode in ("none", "full", "selective"):
        dropout = AdapterDropout(0.25, seed=0)
        model = OneBlock("0", lambda h, context: (dropout(h, 1, 0) * h).cos() * h)  # noqa: B023  (called in the iteration)
        dropout.attach(model, "layers")
        (block,) = model.layers.values()
        config = ActivationCheckpointConfig(mode=mode)
        block.forward = block_forward(block.forward, recompute_policy(0, config, False, compiled), config, compiled)
        inputs = [torch.ones(1, 8, 4, requires_grad=True) for _ in range(2)]
        contexts = [Context.of(h[..., 0].long(), first_position=8 * i) for i, h in enumerate(inputs)]
        results = [model(h, context) for h, context in zip(inputs, contexts, strict=True)]
        for result in results:
            result.sum().backward()
        gradients.append(torch.cat([h.grad for h in inputs]))
    assert not torch.equal(*gradients[0])
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0])


def test_an_adapter_drops_inputs_in_training_only():
    config = LoraConfig(rank=4, dropout=0.5)
    model = OneBlock("0", lambda h, context: linear(h))
    model.layers["0"].wq = linear = nn.Linear(64, 8, bias=False)
    trained = TrainedParameters(frozenset(), adapter_shapes(model, ["layers.0.wq.weight"], 4))
    apply_lora(model, "layers", trained, config, seed=0)
    for parameter in (linear.lora_a, linear.lora_b):
        nn.init.ones_(parameter)
    x, context = torch.ones(1, 1, 64), Context.of(torch.zeros(1, 1, dtype=torch.int64))
    product = config.scale * 4 * 64
    with torch.no_grad():
        torch.testing.assert_close(model(x, context) - x @ linear.weight.T, torch.full((1, 1, 8), product))
    in_training = model(x, context) - x @ linear.weight.T
    assert 0.5 * product < in_training[0, 0, 0] < 1.5 * product and in_training[0, 0, 0] != product


@pytest.mark.parametrize("init", ["kaiming", "gaussian"])
def test_initial_values_have_the_distribution_of_peft(init):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    layer = peft.tuners.lora.Linear(
        nn.Linear(1024, 8), "default", peft.LoraConfig(init_lora_weights=True if init == "kaiming" else init), r=64
    )
    expected, ours = layer.lora_A["default"].weight.detach(), torch.empty(64, 1024)
    init_adapter(LoraConfig(rank=64, init=init), LORA_A, ours, torch.Generator().manual_seed(0))
    assert ours.std().item() == pytest.approx(expected.std().item(), rel=0.02)
    assert ours.abs().max().item() == pytest.approx(expected.abs().max().item(), rel=0.2)
    b = torch.ones(8, 64)
    init_adapter(LoraConfig(rank=64, init=init), LORA_B, b, torch.Generator())
    assert not b.any() and not layer.lora_B["default"].weight.any()

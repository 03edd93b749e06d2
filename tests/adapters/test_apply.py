"""Dropout and initial values of adapters."""

import pytest
import torch
from torch import nn

from trainer.adapters.apply import AdapterDropout, apply_lora
from trainer.adapters.select import LORA_A, LORA_B, TrainedParameters, adapter_shapes, init_adapter
from trainer.batch import DOCUMENT_BITS
from trainer.config import LoraConfig


def kept_values(documents, positions, block="layers.0", module_key=1, seed=0):
    """Return whether the dropout keeps each value of 64 columns, (tokens, 64)."""
    dropout = AdapterDropout(0.25, seed)
    documents, positions = torch.tensor([documents]), torch.tensor([positions])
    dropout.start(nn.Module(), (documents, positions, documents), {})
    forward = dropout.around(dropout.inside(lambda x: dropout(x, module_key, 0)), block)
    result = forward(torch.ones(1, documents.shape[1], 64))
    torch.testing.assert_close(result, torch.where(result > 0, 4 / 3, 0.0))
    return result[0] > 0


def test_a_quarter_of_the_values_is_dropped():
    kept = kept_values([5] * 4096, list(range(4096)))
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.005)
    assert kept.float().mean(0).sub(0.75).abs().max() < 0.04  # of each column
    assert len(kept.unique(dim=0)) == 4096


def test_tokens_of_different_samples_documents_and_positions_drop_different_values():
    documents = [sample * 2**DOCUMENT_BITS + document for sample in range(8) for document in range(64)]
    assert len(kept_values(documents * 2, [0] * 512 + [1] * 512).unique(dim=0)) == 1024


def test_blocks_modules_and_seeds_drop_different_values():
    arguments = ({}, {"block": "layers.1"}, {"module_key": 2}, {"seed": 1})
    masks = torch.stack([kept_values([0], [0], **changed)[0] for changed in arguments])
    assert len(masks.unique(dim=0)) == 4
    assert torch.equal(kept_values([0], [0]), kept_values([0], [0]))


def test_an_adapter_drops_inputs_in_training_only():
    config = LoraConfig(rank=4, dropout=0.5)
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.ModuleDict({"wq": nn.Linear(64, 8, bias=False)})})})
    trained = TrainedParameters(frozenset(), adapter_shapes(model, ["layers.0.wq"], 4))
    dropout = apply_lora(model, "layers", trained, config, seed=0)
    linear = model.get_submodule("layers.0.wq")
    for parameter in (linear.lora_a, linear.lora_b):
        nn.init.ones_(parameter)
    documents = torch.zeros(1, 1, dtype=torch.int64)
    dropout.start(model, (documents, documents, documents), {})
    dropout.keys = dropout.token_keys
    x = torch.ones(1, 1, 64)
    product = config.scale * 4 * 64
    with torch.no_grad():
        torch.testing.assert_close(linear(x) - x @ linear.weight.T, torch.full((1, 1, 8), product))
    in_training = linear(x) - x @ linear.weight.T
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

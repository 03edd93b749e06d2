"""Multi-token prediction against transformers' MtpModel, whose layers are those of the family."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from models import MODELS
from models.spec import saved_weights
from tests.models.families import distance, hf_model_of, inputs, model_of, randomize, split_rows
from trainer.batch import IGNORE_INDEX, Batch
from trainer.objective.cross_entropy import CrossEntropyHead
from trainer.objective.prediction import with_future
from trainer.tools.testing.transformers_model import stored_tensors

WEIGHT = 0.3
LIMIT = 2e-4
"""Of the relative deviation of a gradient: random recurrences enlarge rounding errors of fp32, by up to 1.1e-4 here."""


def reference_with_layers(family, depth):
    """Return transformers' model and its MtpModel with random parameters."""
    main = copy.deepcopy(hf_model_of(family, 0))
    config = main.config
    config.num_mtp_layers, config.mtp_layer_types = depth, ["full_attention"] * depth
    layers = MtpModel(main, depth).eval()
    randomize(layers.layers)
    return main, layers


def names_in_model(layers, n_layers):
    """Return our stored name -> name in MtpModel of the parameters of its layers."""
    names = {}
    for name in layers.layers.state_dict():
        index, inner = name.split(".", 1)
        inner = inner.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        names[f"model.layers.{n_layers + int(index)}.{inner}"] = f"layers.{name}"
    return names


@pytest.mark.parametrize(("family", "depth"), [("deepseek-v3", 2), ("glm-4.5", 2), ("qwen3-next", 1), ("qwen3.5", 1)])
def test_losses_and_gradients_equal_those_of_an_independent_loop_over_layers_of_transformers(family, depth):
    main, layers = reference_with_layers(family, depth)
    spec, sizes = MODELS[family], replace(model_of(family, 0).sizes, prediction_layers=depth)
    model = spec.model(sizes)
    names = names_in_model(layers, sizes.n_layers)
    own = dict(layers.named_parameters()) | dict(layers.named_buffers())
    stored = stored_tensors(main, main.state_dict() | {name: own[key].detach() for name, key in names.items()})
    model.load_state_dict(split_rows(spec, model, stored, saved_weights(model)), strict=False)

    tokens, context = inputs()
    labels = tokens.roll(-1, 1)
    labels[:, -1] = IGNORE_INDEX
    batch = with_future(Batch(tokens, labels, context.positions, context.documents, context.samples), depth)
    head = CrossEntropyHead(batch.labels, chunk_tokens=7, prediction_weight=WEIGHT)
    loss, predicted = model(tokens, context._replace(future=batch.future), head)
    loss.backward()

    main.zero_grad()
    layers.zero_grad()
    hidden = main.model(tokens).last_hidden_state
    expected = F.cross_entropy(main.lm_head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    total = 0
    for k in range(depth):
        future = F.pad(tokens, (0, k + 1))[:, k + 1 :]
        cache = MtpCache(config=main.config.get_mtp_config())
        hidden = layers.forward_layer(k, hidden, context.positions, cache, input_ids=future)
        later = F.pad(labels, (0, k + 1), value=IGNORE_INDEX)[:, k + 1 :]
        total += F.cross_entropy(layers.shared_head(hidden).flatten(0, 1), later.flatten(), reduction="sum") / depth
    (expected + WEIGHT * total).backward()
    assert distance(loss, expected) < 1e-6 and distance(predicted, total) < 1e-6
    gradients = {name: p.grad for name, p in main.named_parameters()}
    gradients |= {name: own[key].grad for name, key in names.items() if own[key].requires_grad}
    gradients = split_rows(spec, model, stored_tensors(main, gradients), dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        assert distance(parameter.grad, gradients[name], floor=1e-3) < LIMIT, name


def test_labels_and_tokens_stop_at_the_end_of_a_document():
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    labels = torch.tensor([[2, 3, IGNORE_INDEX, 5, 6, 7, IGNORE_INDEX, IGNORE_INDEX]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1]])
    batch = with_future(Batch(tokens, labels, tokens, documents, torch.zeros(1)), 2)
    none = IGNORE_INDEX
    assert batch.future[0].T.tolist() == [[2, 3, -1, 5, 6, 7, -1, -1], [3, -1, -1, 6, 7, -1, -1, -1]]
    assert batch.labels[0].T.tolist() == [
        [2, 3, none, 5, 6, 7, none, none],
        [3, none, none, 6, 7, none, none, none],
        [none, none, none, 7, none, none, none, none],
    ]
    assert with_future(batch, 0) is batch

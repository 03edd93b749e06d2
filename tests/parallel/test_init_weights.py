import torch
from torch import nn

from models.llama import LlamaSizes, llama
from tests.parallel.test_fsdp import build
from tests.training_runs import full, hash_of
from trainer.parallel.init_weights import allocate, initialize


def weights(settings):
    model = build(**settings)
    if not settings["tied"]:
        initialize(model, seed=0, width_ratio=0.25)
    return hash_of(dict(model.named_parameters()))


def test_initial_weights_do_not_depend_on_the_layout(ranks):
    for tied in (False, True):
        hashes = {
            *ranks(1).run(weights, {"tied": tied}),
            *ranks(2).run(weights, {"tied": tied}),
            *ranks(4).run(weights, {"tied": tied}),
            *ranks(4).run(weights, {"tied": tied, "dp_replicate": 2}),
            *ranks(4).run(weights, {"tied": tied, "fsdp_units": "root"}),
            *ranks(2).run(weights, {"tied": tied, "tp": 2}),
            *ranks(4).run(weights, {"tied": tied, "tp": 2}),
            *ranks(4).run(weights, {"tied": tied, "tp": 2, "cp": 2}),
        }
        assert len(hashes) == 1


def spread():
    model = build()
    wq = full(model.get_parameter("layers.0.attention.wq.weight"))
    halves = wq.chunk(2)
    equal_to_output = [
        name
        for name, p in model.named_parameters()
        if p.dim() == 2 and (full(p)[:2, :32] == full(model.get_parameter("output.weight"))[:2, :32]).all()
    ]
    return (halves[0] == halves[1]).any().item(), wq.std().item(), equal_to_output


def test_shards_and_parameters_are_drawn_independently(ranks):
    """A generator with the same seed on all ranks would give every shard the same values."""
    halves_agree, std, equal_to_output = ranks(2).run(spread)[0]
    assert not halves_agree
    assert 0.15 < std < 0.2  # 1 / sqrt(32)
    assert equal_to_output == ["output.weight"]


def test_parameters_with_more_rows_than_one_seed_are_filled(ranks):
    assert all(ranks(2).run(long_table))


def long_table():
    sizes = LlamaSizes(dim=4, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=4, vocab_size=2500)
    with torch.device("meta"):
        model = llama(sizes)
    allocate(model, torch.device("cpu"))
    initialize(model, seed=0)
    table = model.tok_embeddings.weight
    groups = table[:1024], table[1024:2048]
    return bool(table.std(dim=1).min() > 0 and not (groups[0] == groups[1]).any())


def test_initial_values_are_those_of_the_base_width_by_the_kind_of_the_parameter():
    """The model is four times as wide as that for which rates were tuned."""
    drawn = {}
    for ratio in (1.0, 0.25):
        model = llama(LlamaSizes(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=64))
        initialize(model, seed=0, width_ratio=ratio)
        drawn[ratio] = dict(model.named_parameters())
    for name, values in drawn[0.25].items():
        # The standard deviation of the embedding is 1 / sqrt(8), that of the output sqrt(8) / 32, others 1 / sqrt(inputs).
        factor = {"tok_embeddings.weight": 2.0, "output.weight": 0.5}.get(name, 1.0)
        assert torch.equal(values, drawn[1.0][name] * factor), name


class Convolution(nn.Module):
    """A model whose weight has three dims, but is no stack."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 3, 2))
        self.drawn = []

    def init_parameter(self, name, rows, generator):
        self.drawn.append(tuple(rows.shape))
        rows.fill_(1.0)


def test_a_parameter_of_three_dims_need_not_be_a_stack():
    model = Convolution()
    initialize(model, seed=0)
    assert model.drawn == [(5, 3, 2)] and (model.weight == 1).all()

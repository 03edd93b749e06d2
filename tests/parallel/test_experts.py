"""Expert parallelism: exchange of rows, initial weights, losses of the routers and statistics of the load."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from models.context import Context
from models.mixtral import MixtralSizes, mixtral
from models.moe import MixtureOfExperts
from models.sizes import DEBUG
from tests.parallel.tiny_models import layout_of
from tests.training_runs import full, hash_of
from trainer.base.config import ActivationCheckpointConfig, ConfigError, ExpertsConfig, ParallelConfig
from trainer.parallel.attention import CPU_BACKEND
from trainer.parallel.balance import Balance, ExpertLoad, apply_balance
from trainer.parallel.experts import AllToAllExchange
from trainer.parallel.init_weights import allocate, initialize
from trainer.parallel.mesh import Meshes, ParallelDims
from trainer.parallel.parallelize import parallelize
from trainer.parallel.parameter_storage import ParameterStorage
from trainer.parallel.stages import partition_blocks

CPU = torch.device("cpu")
SIZES = MixtralSizes(
    **DEBUG | {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "vocab_size": 64},
    **{"n_experts": 4, "experts_per_token": 2},
)


def exchanged(counts):
    """Send rows whose values name their sender and position. Each expert adds its index times 1000."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    rank, own = dist.get_rank(), torch.tensor(counts[dist.get_rank()])
    rows = (torch.arange(int(own.sum())) + 100.0 * rank)[:, None].requires_grad_()
    per_rank = len(own) // mesh.size()
    seen = []

    def experts(arrived, of_experts):
        seen.append(of_experts.tolist())
        index = torch.arange(per_rank).repeat_interleave(of_experts) + rank * per_rank
        return arrived + 1000.0 * index[:, None]

    result = AllToAllExchange(mesh["ep"])(experts, rows, own)
    result.sum().backward()
    expected = rows + 1000.0 * torch.arange(len(own)).repeat_interleave(own)[:, None]
    return torch.equal(result, expected), torch.equal(rows.grad, torch.ones_like(rows)), seen


@pytest.mark.parametrize(
    "counts",
    [
        [[1, 2, 3, 4], [4, 3, 2, 1]],
        [[0, 0, 5, 0], [0, 0, 7, 0]],  # one overfull expert, one rank without rows
        [[0, 0, 0, 0], [0, 3, 0, 0]],  # a rank that sends nothing
    ],
)
def test_every_row_reaches_its_expert_and_returns(ranks, counts):
    totals = torch.tensor(counts).sum(0).tolist()
    results = ranks(2).run(exchanged, counts)
    assert results == [(True, True, [totals[:2]]), (True, True, [totals[2:]])]


def initial_weights(degrees):
    config = ParallelConfig(**{"dp_shard": 1} | degrees)
    dims = ParallelDims.from_config(config, dist.get_world_size())
    meshes = Meshes(dims, CPU, has_experts=True)
    with torch.device("meta"):
        structure = mixtral(SIZES).structure()
        stages = partition_blocks(mixtral(SIZES), structure, config)
    settings = (
        config,
        ActivationCheckpointConfig(),
        False,
        ParameterStorage(dtype="fp32"),
        layout_of(meshes),
        CPU_BACKEND,
    )
    (model,) = parallelize(lambda: mixtral(SIZES), structure, stages, meshes, *settings).values()
    allocate(model, CPU)
    initialize(model, seed=0)
    return hash_of({name: full(p) for name, p in model.named_parameters()})


def test_initial_weights_do_not_depend_on_where_experts_are(ranks):
    hashes = {
        *ranks(1).run(initial_weights, {}),
        *ranks(2).run(initial_weights, {"dp_shard": 2, "ep": 2}),
        *ranks(2).run(initial_weights, {"tp": 2, "ep": 2}),
        *ranks(4).run(initial_weights, {"dp_shard": 2, "tp": 2, "ep": 4}),
    }
    assert len(hashes) == 1


def balanced(config, documents):
    """Return routing results of a layer, and its statistics, for one step of one rank."""
    torch.manual_seed(0)
    mixture = MixtureOfExperts(SIZES)
    for p in mixture.parameters():
        torch.nn.init.normal_(p)
    meshes = Meshes(ParallelDims.from_config(ParallelConfig(), 1), CPU, has_experts=True)
    x = torch.randn(len(documents), 8, SIZES.dim)[:, : len(documents[0])]
    context = Context.of(torch.zeros(x.shape[:2], dtype=torch.int64))._replace(documents=torch.tensor(documents))
    apply_balance(mixture, config, meshes, CPU)
    mixture.balance.num_samples.fill_(len(documents))
    routing = mixture.router(x)
    mixture(x, context).sum().backward()
    with torch.no_grad():
        mixture(x, context)  # an evaluation counts nothing
    totals = mixture.balance.totals
    return routing, (totals[:-2], totals[-2:]), mixture.router.weight.grad, mixture


def losses_of_one_sample():
    routing, (counts, values), *_ = balanced(ExpertsConfig(balance_loss=0.1, z_loss=0.01), [[0] * 6])
    theirs = load_balancing_loss_func((routing.logits[0],), SIZES.n_experts, SIZES.experts_per_token)
    z = routing.logits.logsumexp(-1).square().mean()
    return values.tolist(), [theirs.item() / SIZES.experts_per_token, z.item()], counts.tolist(), counts.sum().item()


def test_losses_of_one_sample_equal_their_formulas(ranks):
    """transformers' loss is the number of experts per token times larger."""
    ((actual, expected, _, total),) = ranks(1).run(losses_of_one_sample)
    assert actual == pytest.approx(expected, rel=1e-5) and total == 12


def padded_losses():
    config = ExpertsConfig(balance_loss=0.1, z_loss=0.01)
    *_, (counts, values), _, _ = balanced(config, [[0, 0, 0, -1, -1]])
    *_, (counts_without, values_without), _, _ = balanced(ExpertsConfig(), [[0, 0, 0, -1, -1]])
    *_, (_, values_of_valid), _, _ = balanced(config, [[0, 0, 0]])
    assert torch.allclose(values, values_of_valid)
    return counts.sum().item(), values.tolist(), counts_without.sum().item(), values_without.tolist()


def test_padding_is_in_no_loss_and_no_count(ranks):
    ((count, values, count_without, values_without),) = ranks(1).run(padded_losses)
    assert count == count_without == 6 and values_without == [0.0, 0.0]
    assert values[0] > 0 and values[1] > 0


def metrics_of_load(*counts_of_layers):
    *_, mixture = balanced(ExpertsConfig(), [[0] * 4])
    layers = torch.nn.ModuleDict({"0": mixture, "1": MixtureOfExperts(SIZES)})
    apply_balance(layers["1"], ExpertsConfig(), Meshes(ParallelDims.from_config(ParallelConfig(), 1), CPU), CPU)
    load = ExpertLoad([layers], SIZES, ExpertsConfig(), CPU)
    for layer, counts in enumerate(counts_of_layers):
        balance = layers[str(layer)].balance
        assert isinstance(balance, Balance)
        balance.totals.copy_(torch.tensor([*counts, 0, 0]))
    metrics = {name: value.item() for name, value in load.take().items()}
    load.take()
    return metrics, load.counts.sum().item()


def test_metrics_of_the_load(ranks):
    ((metrics, count_after),) = ranks(1).run(metrics_of_load, [4, 0, 4, 0], [2, 2, 2, 2])
    assert metrics == pytest.approx(
        {"balance_loss": 0.0, "router_z_loss": 0.0, "expert_load_violation": 0.5, "expert_load_violation_max": 1.0}
        | {"expert_load_entropy": 0.75, "idle_experts": 0.25}
    )
    assert count_after == 0  # the next step starts at zero
    ((of_one_layer, _),) = ranks(1).run(metrics_of_load, [4, 0, 4, 0], [0, 0, 0, 0])  # the other has not counted
    assert of_one_layer == pytest.approx(
        {"balance_loss": 0.0, "router_z_loss": 0.0, "expert_load_violation": 1.0, "expert_load_violation_max": 1.0}
        | {"expert_load_entropy": 0.5, "idle_experts": 0.5}
    )


@pytest.mark.parametrize(
    ("degrees", "world_size", "problem"),
    [({"dp_shard": 3, "ep": 2}, 3, "must divide dp_shard 3 x cp 1 x tp 1 = 3: these ranks share the experts")],
)
def test_degrees_that_do_not_fit_are_an_error(degrees, world_size, problem):
    with pytest.raises(ConfigError) as error:
        ParallelDims.from_config(ParallelConfig(**degrees), world_size)
    assert (error.value.key, error.value.message) == ("parallel.ep", problem)

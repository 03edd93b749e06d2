"""Muon: the update of one rank, in every layout."""

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from trainer.base.config import OptimizerConfig
from trainer.optim.exchange import Matrix, assign_owners, buckets
from trainer.optim.muon import COEFFICIENTS, orthogonalize
from trainer.optim.optimizer import optimizer_class
from trainer.optim.parameter_groups import resolve_groups
from trainer.runtime.dtensor import local_region, sharded_like

SHAPES = {"wide": (6, 24), "tall": (33, 8), "square": (16, 16), "few rows": (2, 40), "stack": (4, 12, 8)}


def values(seed):
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def muon(parameters, **settings):
    """Return Muon of all parameters."""
    config = OptimizerConfig(name="muon", **{"muon_dtype": "fp32", "weight_decay": 0.1, **settings})
    groups = resolve_groups(config, parameters, matrices=parameters)
    stage = dist.group.WORLD if dist.get_world_size() > 1 else None
    return optimizer_class(config)(parameters, config, groups, dist.get_world_size(), stage=stage)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, value in values(0).items():
            self.register_parameter(name, torch.nn.Parameter(value))


def tp_dim(name):
    return {"wide": 0, "tall": 1, "stack": 0}.get(name)


def sharded_model(layout):
    """Return a model sharded by `layout`, FSDP's and tp's part of the ranks."""
    model = Model()
    sizes = {name: int(size) for name, size in (word.split("=") for word in layout.split())}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "tp" in sizes:

        def shard(_, module, tp):
            for name, p in list(module.named_parameters()):
                dim = tp_dim(name)
                placement = Replicate() if dim is None else Shard(dim)
                module.register_parameter(name, torch.nn.Parameter(distribute_tensor(p.data, tp, [placement])))

        distribute_module(model, mesh["tp"], shard)
    others = tuple(name for name in sizes if name != "tp")
    if others:
        fully_shard(model, mesh=mesh[others])
    return model


def part_of(parameter, whole):
    """Return this rank's part of a tensor, sharded like the parameter."""
    _, region = local_region(parameter)
    return sharded_like(parameter, whole[region].contiguous())


def train(layout, settings, bucket_values=2**25):
    """Take three steps with given gradients, of which the second is skipped. Return whole parameters and momenta, and the number
    of collectives of a step."""
    model = Model() if layout is None else sharded_model(layout)
    parameters = dict(model.named_parameters())
    with mock.patch("trainer.optim.muon.BUCKET_VALUES", bucket_values):
        optimizer = muon(parameters, **settings)
    for step in range(3):
        optimizer.start_step(0.02)
        for name, gradient in values(step + 1).items():
            parameters[name].grad = part_of(parameters[name], gradient * (float("nan") if step == 1 else 1.0))
        with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
            optimizer.step(skip=torch.tensor(step == 1))
    tensors = {name: p.detach() for name, p in parameters.items()} | optimizer.state()
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}, exchange.call_count


SETTINGS = {"fp32": {"muon_dtype": "fp32", "cautious_decay": True}, "bf16": {"muon_dtype": "bf16"}}


@pytest.fixture(scope="module")
def one_rank(ranks):
    return {dtype: ranks(1).run(train, None, settings)[0][0] for dtype, settings in SETTINGS.items()}


LAYOUTS = ["fsdp=4", "dp_replicate=2 fsdp=2", "fsdp=2 tp=2", "tp=4", "dp_replicate=4 fsdp=1"]


@pytest.mark.parametrize("dtype", SETTINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_bits_of_one_rank(ranks, one_rank, layout, dtype):
    """Some shards are uneven and some are empty."""
    for tensors, calls in ranks(4).run(train, layout, SETTINGS[dtype]):
        assert tensors.keys() == one_rank[dtype].keys() and calls == 2
        assert [name for name in tensors if not torch.equal(tensors[name], one_rank[dtype][name])] == []


def test_several_buckets_have_the_bits_of_one(ranks, one_rank):
    for tensors, calls in ranks(4).run(train, "fsdp=4", SETTINGS["fp32"], 100):
        assert calls > 2
        assert [name for name in tensors if not torch.equal(tensors[name], one_rank["fp32"][name])] == []


def test_one_rank_exchanges_nothing(ranks):
    ((_, calls),) = ranks(1).run(train, None, {})
    assert calls == 0


# ------------------------------------------------------------ the rule


def steps_of_torch(nesterov):
    """Return parameters after three steps of this project's rule and of torch.optim.Muon, which iterates in bf16."""
    ours, theirs = ({n: torch.nn.Parameter(v.clone()) for n, v in values(0).items() if v.dim() == 2} for _ in range(2))
    optimizer = muon(ours, muon_dtype="bf16", muon_nesterov=nesterov, muon_momentum=0.9)
    reference = torch.optim.Muon(
        theirs.values(), weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
    )
    for step, lr in enumerate((0.02, 0.05, 0.01)):
        optimizer.start_step(lr)
        reference.param_groups[0]["lr"] = lr
        for name, gradient in values(step + 1).items():
            if name in ours:
                ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        optimizer.step(skip=torch.tensor(False))
        reference.step()
    return [(ours[name].detach(), theirs[name].detach()) for name in ours]


@pytest.mark.parametrize("nesterov", [True, False])
def test_one_rank_has_the_bits_of_torch(ranks, nesterov):
    (pairs,) = ranks(1).run(steps_of_torch, nesterov)
    assert len(pairs) == 4 and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("shape", [(6, 24), (33, 8), (16, 16)])
@pytest.mark.parametrize("coefficients", COEFFICIENTS)
def test_singular_values_become_about_one_and_singular_vectors_stay(shape, coefficients):
    matrix = torch.randn(3, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    matrix = u @ torch.diag_embed(s / s.amax(-1, keepdim=True) * 0.9 + 0.1) @ vt  # condition numbers of at most 10
    products = u.mT @ orthogonalize(matrix.float(), coefficients).double() @ vt.mT
    diagonal = products.diagonal(dim1=-2, dim2=-1)
    assert diagonal.min() > 0.6 and diagonal.max() < 1.3
    assert (products - torch.diag_embed(diagonal)).abs().max() < 1e-4


def test_a_matrix_of_zeros_stays_finite():
    assert orthogonalize(torch.zeros(2, 3, 4), "jordan").tolist() == torch.zeros(2, 3, 4).tolist()


SCALED = {"match_adamw": 0.2 * 24**0.5, "original": 1.0, "unit_rms": 0.5}


@pytest.mark.parametrize("scale", SCALED)
def test_the_scale_depends_on_rows_and_columns(ranks, scale):
    ((moved, direction),) = ranks(1).run(first_step, scale)
    torch.testing.assert_close(moved, -0.1 * SCALED[scale] * direction)


def first_step(scale):
    """Return by how much the first step moves a matrix, and the orthogonalized gradient."""
    p = torch.nn.Parameter(torch.zeros(6, 24))
    optimizer = muon({"wide": p}, muon_scale=scale)
    optimizer.start_step(0.1)
    p.grad = values(1)["wide"]
    optimizer.step(skip=torch.tensor(False))
    return p.detach(), orthogonalize(values(1)["wide"][None], "jordan")[0]


def cautious_step():
    """Return a matrix after one step with cautious decay, and what is expected."""
    start, gradient = values(0)["wide"], values(1)["wide"]
    start[0, :3] = 0.0
    p = torch.nn.Parameter(start.clone())
    optimizer = muon({"wide": p}, muon_scale="original", weight_decay=0.5, cautious_decay=True)
    optimizer.start_step(0.1)
    p.grad = gradient.clone()
    optimizer.step(skip=torch.tensor(False))
    direction = orthogonalize(gradient[None], "jordan")[0]
    return p.detach(), start - 0.1 * (direction + 0.5 * torch.where(direction * start >= 0, start, 0))


def test_cautious_decay_is_that_of_the_formula(ranks):
    torch.testing.assert_close(*ranks(1).run(cautious_step)[0])


# ------------------------------------------------------------ who does what


def matrix(*shape, holders=()):
    whole = tuple(slice(0, size) for size in shape)
    return Matrix(torch.empty(0), None, shape, dict.fromkeys(holders, whole))


def test_owners_share_the_work_and_hold_the_matrix_if_anyone_does():
    matrices = [matrix(8, 8), matrix(4, 4), matrix(8, 8), matrix(4, 4), matrix(16, 16, holders=(1,))]
    assign_owners(matrices, lambda m: m.shape[0], 2)
    assert matrices[-1].owner == 1
    loads = Counter()
    for m in matrices:
        loads[m.owner] += m.shape[0]
    assert loads == {0: 20, 1: 20}


def test_a_bucket_has_at_most_the_given_values_of_each_owner():
    matrices = [matrix(4, 4) for _ in range(6)] + [matrix(10, 10)]
    assign_owners(matrices, lambda m: m.shape[0] * m.shape[1], 2)
    found = buckets(matrices, 32)
    assert sorted(id(m) for bucket in found for m in bucket) == sorted(map(id, matrices))
    for bucket in found:
        for owner in (0, 1):
            own = [m.shape[0] * m.shape[1] for m in bucket if m.owner == owner]
            assert sum(own) <= 32 or len(own) == 1

"""The average of the weights: its formula wherever parameters are updated, and evaluations with it."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainer.base.config import OptimizerConfig
from trainer.optim.optimizer import optimizer_class
from trainer.optim.parameter_groups import resolve_groups
from trainer.optim.weight_average import WeightAverage
from trainer.parallel.fsdp import reshard_all
from trainer.runtime.dtensor import to_local

PLACEMENTS = [
    {},
    {"state_dtype": "bf16"},
    {"offload": "state"},
    {"offload": "state_and_gradients"},
    {"in_backward": True},
    {"name": "muon", "muon_dtype": "fp32"},
]


def build(parameters, decay, placement):
    config = OptimizerConfig(lr=0.1, ema_decay=decay, **placement)
    matrices = parameters if config.name == "muon" else ()
    groups = resolve_groups(config, parameters, matrices=matrices)
    optimizer = optimizer_class(config)(parameters, config, groups, dist.get_world_size())
    return optimizer, WeightAverage(optimizer, config.ema_decay)


def take_step(optimizer, average, parameters, seed, skip=False):
    draw = torch.Generator().manual_seed(seed)
    optimizer.start_step(0.1)
    sum((p.float() * torch.randn(p.shape, generator=draw)).sum() for p in parameters.values()).backward()
    optimizer.clip(None)
    optimizer.step(skip=torch.tensor(skip))
    average.update(torch.tensor(skip))


def averaged(placement, dtype):
    """Return the average after each of four steps, of which the third is skipped if it can be, and the expected ones."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 512).reshape(2, 256).to(dtype))
    parameters = {"weight": p}
    optimizer, average = build(parameters, 0.15, placement)
    optimizer.sync_master_weights(state_loaded=False)
    average.start()
    expected, found, wanted = p.detach().double(), [], []
    kept = 0
    for step in range(4):
        skip = step == 2 and not placement.get("in_backward")
        take_step(optimizer, average, parameters, step, skip)
        if not skip:
            kept += 1
            decay = min(0.15, (1 + kept) / (10 + kept))
            (target,) = optimizer.targets.values()  # the fp32 copy, if there is one
            expected = decay * expected + (1 - decay) * target.detach().double()
        found.append(average.state()["weight"].double())
        wanted.append(expected)
    assert average.state()["num_updates"] == kept
    return found, wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_the_average_follows_its_formula_wherever_parameters_are_updated(ranks, placement, dtype):
    ((found, wanted),) = ranks(1).run(averaged, placement, dtype)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def evaluated(reshard_after_forward):
    """Return the outputs of a sharded model before, during and after an evaluation with averages, and the expected one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 3, bias=False))
    mesh = init_device_mesh("cpu", (2,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    parameters = dict(model.named_parameters())
    _, average = build(parameters, 0.9, {})
    average.start()
    with torch.no_grad():
        for tensor in average.averages.values():
            tensor.mul_(2.0)
    x = torch.ones(1, 8)
    outputs = []
    before = [to_local(p.detach()).clone() for p in parameters.values()]
    with torch.no_grad():
        outputs.append(model(x))
        with average.in_use(partial(reshard_all, model)):
            outputs.append(model(x))
        outputs.append(model(x))
    assert all(torch.equal(to_local(p.detach()), old) for p, old in zip(parameters.values(), before, strict=True))
    return outputs


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_an_evaluation_sees_the_averages_and_leaves_no_trace(ranks, reshard_after_forward):
    for before, during, after in ranks(2).run(evaluated, reshard_after_forward):
        assert torch.equal(during, 4 * before), "each of the two products is doubled"
        assert torch.equal(after, before)

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trainer.config import OptimizerConfig
from trainer.optim.optimizer import Optimizer, parameter_groups
from trainer.runtime.device import DTYPES
from trainer.runtime.dtensor import sharded_like, to_local


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.RMSNorm(10), nn.Linear(10, 3, bias=False))


def test_norms_and_biases_do_not_decay():
    model = network()
    decayed, plain = parameter_groups(model.parameters(), 0.1)
    names = {p: name for name, p in model.named_parameters()}
    assert [names[p] for p in decayed["params"]] == ["0.weight", "2.weight"]
    assert [names[p] for p in plain["params"]] == ["0.bias", "1.weight"]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def clipped(max_norm, replicate):
    """Norm and clipped gradients of a sharded network, beside torch's own on the whole one."""
    reference = network()
    model = network()
    shape = (2, dist.get_world_size() // 2) if replicate else (dist.get_world_size(),)
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[: len(shape)]))
    optimizer = Optimizer(dict(model.named_parameters()), OptimizerConfig(), dist.group.WORLD, dist.get_world_size())
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) * 10
    for net in (model, reference):
        net(x).square().sum().backward()
    norm, votes = optimizer.clip(max_norm, vote=dist.get_rank() > 0)
    assert votes == dist.get_world_size() - 1
    expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm or float("inf"))
    torch.testing.assert_close(norm, expected)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-5, atol=1e-6)
    return norm.item()


@pytest.mark.parametrize("replicate", [False, True])
def test_clipping_is_that_of_the_whole_network(ranks, replicate):
    (norm, *others) = ranks(4).run(clipped, 1.0, replicate)
    assert norm > 10
    assert others == [norm] * 3


def test_a_norm_below_the_limit_leaves_gradients_alone(ranks):
    ranks(2).run(clipped, 1e9, False)
    ranks(2).run(clipped, None, False)


def norm_of_mixed_layouts():
    """Parameters on one axis of a 2 x 2 world, on both, on none: as tensor parallelism will leave them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    whole = [torch.full((4, 4), 1.0), torch.full((4, 4), 2.0), torch.full((4,), 3.0), torch.full((4, 4), 4.0)]
    model = nn.Module()
    layouts = (
        distribute_tensor(whole[0], mesh["fsdp"], [Shard(0)]),
        distribute_tensor(whole[1], mesh, [Shard(0), Shard(1)]),
        whole[2],
        distribute_tensor(whole[3], mesh, [Shard(0), Replicate()]),
    )
    for number, tensor in enumerate(layouts):
        model.register_parameter(str(number), nn.Parameter(tensor))
    optimizer = Optimizer(dict(model.named_parameters()), OptimizerConfig(), dist.group.WORLD, 4)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    return optimizer.clip(None)[0].item(), torch.cat([t.flatten() for t in whole]).norm().item()


def test_the_norm_counts_every_value_once_whatever_the_layouts(ranks):
    for norm, expected in ranks(4).run(norm_of_mixed_layouts):
        assert norm == pytest.approx(expected, rel=1e-6)


def stepped():
    """Three steps of ours and of torch's AdamW."""
    ours, theirs = network(), network()
    fully_shard(ours)
    optimizer = Optimizer(dict(ours.named_parameters()), OptimizerConfig(weight_decay=0.1), dist.group.WORLD, 1)
    reference = torch.optim.AdamW(parameter_groups(theirs.parameters(), 0.1), betas=(0.9, 0.95), eps=1e-8)
    for rate in (1e-2, 3e-2, 1e-3):
        optimizer.begin(rate)
        reference.zero_grad()
        for net in (ours, theirs):
            net(torch.ones(2, 6)).square().sum().backward()
        optimizer.step(skip=torch.tensor(False))
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other)
    return sorted(optimizer.state())


def test_steps_are_those_of_torch_and_state_is_named_after_parameters(ranks):
    names = ranks(1).run(stepped)[0]
    assert names == sorted(
        f"{p}/{q}" for p in ("0.weight", "0.bias", "1.weight", "2.weight") for q in ("exp_avg", "exp_avg_sq", "step")
    )


def skipped(precision):
    """State before and after a step that is left out, whose gradients are no numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 256), nn.RMSNorm(256), nn.Linear(256, 3, bias=False))
    fully_shard(model)
    config = OptimizerConfig(state_dtype=precision)
    optimizer = Optimizer(dict(model.named_parameters()), config, dist.group.WORLD, 1)

    def step(scale, skip):
        optimizer.begin(1e-2)
        (model(torch.ones(2, 6)).square().sum() * scale).backward()
        optimizer.clip(1.0)
        optimizer.step(skip=torch.tensor(skip))
        state = {name: p.full_tensor() for name, p in model.named_parameters()} | optimizer.state()
        return {
            name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for name, t in state.items()
        }

    before, after, then = step(1.0, False), step(float("nan"), True), step(1.0, False)
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return unchanged, all(t.isfinite().all() for t in then.values()), then["0.weight/step"].item()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "8bit"])
def test_an_update_that_is_left_out_changes_nothing(ranks, size, precision):
    assert ranks(size).run(skipped, precision) == [(True, True, 2.0)] * size


# ------------------------------------------------------------ in host memory


def fifty_steps(offload, dtypes=("fp32", "fp32"), max_norm=5.0, in_backward=False):
    """Of a network with small and frozen parameters: two microbatches a step, clipped, with a schedule; one step is left out.
    Returns parameters, state and norms."""
    parameter_dtype, state_dtype = dtypes
    model = network()
    model[0].bias.requires_grad_(False)
    model.to(DTYPES[parameter_dtype])
    fully_shard(model)
    named = dict(model.named_parameters())
    config = OptimizerConfig(offload=offload, in_backward=in_backward, state_dtype=state_dtype, weight_decay=0.1)
    optimizer = Optimizer(named, config, dist.group.WORLD, dist.get_world_size())
    norms = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for number in range(50):
        optimizer.begin(1e-2 / (1 + number))
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            x = torch.randn(4, 6, generator=generator).to(DTYPES[parameter_dtype])
            (model(x).square().sum() * (float("nan") if number == 20 else 1.0)).backward()
        norm, _ = optimizer.clip(max_norm)
        optimizer.step(skip=~norm.isfinite())
        norms.append(norm.item())
    assert all(p.grad is None for p in named.values()) or not (in_backward or offload == "state_and_gradients")
    tensors = named | optimizer.state()
    return {
        n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for n, t in tensors.items()
    }, norms


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("offload", ["state", "state_and_gradients"])
def test_an_update_on_the_host_is_that_of_the_device_bit_by_bit(ranks, offload, size):
    for (ours, our_norms), (theirs, their_norms) in zip(
        ranks(size).run(fifty_steps, offload), ranks(size).run(fifty_steps, "none"), strict=True
    ):
        assert set(ours) == set(theirs) and "0.bias/step" not in ours
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert our_norms[:20] == their_norms[:20] and our_norms[21:] == their_norms[21:]


@pytest.mark.parametrize("size", [1, 2])
def test_an_update_in_backward_is_that_after_it_bit_by_bit(ranks, size):
    """The step whose gradients are no numbers is left out of every parameter here too."""
    for (ours, our_norms), (theirs, their_norms) in zip(
        ranks(size).run(fifty_steps, "none", ("fp32", "fp32"), None, True),
        ranks(size).run(fifty_steps, "none", ("fp32", "fp32"), None, False),
        strict=True,
    ):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and set(ours) == set(theirs)
        assert our_norms[:20] == their_norms[:20] and our_norms[21:] == their_norms[21:]


def one_is_no_number():
    """Parameters that an update in backward has changed, when one of their gradients is no number."""
    model = network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(dict(model.named_parameters()), OptimizerConfig(in_backward=True), dist.group.WORLD, 1)
    model[2].weight.register_hook(lambda gradient: gradient * float("nan"))
    optimizer.begin(1e-2)
    model(torch.ones(2, 6)).square().sum().backward()
    norm, _ = optimizer.clip(None)
    assert not norm.isfinite() and all(p.isfinite().all() for p in model.parameters())
    return sorted(name for name, p in model.named_parameters() if not torch.equal(p, before[name]))


def test_a_gradient_that_is_no_number_changes_nothing_in_backward(ranks):
    (changed,) = ranks(1).run(one_is_no_number)
    assert "2.weight" not in changed


def chunks(precision, size):
    """Parameters and state after three updates, so many values at a time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 256), nn.Linear(256, 37, bias=False))
    config = OptimizerConfig(state_dtype=precision)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.optim.optimizer._CHUNK", size)
        optimizer = Optimizer(dict(model.named_parameters()), config, dist.group.WORLD, 1)
        for _ in range(3):
            optimizer.begin(1e-2)
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step(skip=torch.tensor(False))
    return {name: p.detach() for name, p in model.named_parameters()} | optimizer.state()


@pytest.mark.parametrize("precision", ["bf16", "8bit"])
def test_an_update_in_chunks_is_that_of_the_whole(ranks, precision):
    ((whole,), (cut,)) = (ranks(1).run(chunks, precision, size) for size in (2**23, 2560))
    assert set(whole) == set(cut) and all(torch.equal(whole[name], cut[name]) for name in whole)
    assert whole["1.weight/step"] == 3


def test_what_belongs_to_a_shard_stays_where_it_is(ranks):
    ranks(2).run(parts_of_shards)


def parts_of_shards():
    """On another device than the mesh, and written through the whole."""
    weight = distribute_tensor(torch.zeros(5, 512), init_device_mesh("cpu", (2,)), [Shard(0)])
    rows = to_local(weight).shape[0]
    codes, scales = torch.zeros(rows, 512, dtype=torch.uint8), torch.empty(rows, 2, device="meta")
    whole = sharded_like(weight, codes)
    assert (whole.shape, whole.dtype) == (weight.shape, torch.uint8)
    whole.to_local().fill_(7)
    assert (codes == 7).all()
    assert (
        sharded_like(weight, scales).shape == (5, 2) and sharded_like(weight, scales).to_local().device.type == "meta"
    )


def test_parameters_in_bf16_have_an_fp32_copy_on_the_host(ranks):
    ((tensors, _),) = ranks(1).run(fifty_steps, "state_and_gradients", ("bf16", "fp32"))
    master = tensors["0.weight/master"]
    assert master.dtype == torch.float32 and tensors["0.weight"].dtype == torch.bfloat16
    assert torch.equal(master.bfloat16(), tensors["0.weight"]) and not torch.equal(master.bfloat16().float(), master)


def test_averages_in_bf16_are_near_those_in_fp32(ranks):
    ((exact, _),) = ranks(1).run(fifty_steps, "none")
    for offload in ("none", "state"):
        ((rounded, _),) = ranks(1).run(fifty_steps, offload, ("fp32", "bf16"))
        assert rounded["2.weight/exp_avg"].dtype == torch.bfloat16
        assert rounded["2.weight/step"] == exact["2.weight/step"] == 49
        torch.testing.assert_close(rounded["2.weight"], exact["2.weight"], rtol=0.02, atol=0.002)
        assert not torch.equal(rounded["2.weight"], exact["2.weight"])

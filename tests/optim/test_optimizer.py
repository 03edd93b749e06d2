"""Optimizers of sharded parameters, on the device, in backward and in host memory."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trainer.base.config import OptimizerConfig
from trainer.optim.optimizer import optimizer_class
from trainer.optim.parameter_groups import resolve_groups
from trainer.runtime.device import DTYPES
from trainer.runtime.dtensor import sharded_like, to_local


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.RMSNorm(10), nn.Linear(10, 3, bias=False))


def optimizer_of(parameters, config, ranks_per_stage, biases=()):
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    return optimizer_class(config)(parameters, config, resolve_groups(config, trained, biases), ranks_per_stage, biases)


def test_stacked_biases_neither_decay_nor_are_their_moments_quantized():
    parameters = {name: nn.Parameter(torch.ones(2, 256)) for name in ("weight", "biases")}
    config = OptimizerConfig(weight_decay=0.5, lr=0.1, state_dtype="8bit")
    optimizer = optimizer_of(parameters, config, 1, {"biases"})
    optimizer.start_step(0.1)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(skip=torch.tensor(False))
    assert parameters["weight"].unique().tolist() == pytest.approx([0.95])
    assert parameters["biases"].unique().tolist() == [1.0]
    dtypes = {name: t.dtype for name, t in optimizer.state().items() if name.endswith("exp_avg")}
    assert dtypes == {"weight/exp_avg": torch.uint8, "biases/exp_avg": torch.float32}


def clip_and_compare(max_norm, replicate):
    """Compare norm and clipped gradients of a sharded model with those of clip_grad_norm_ on the full one. Return the norm. The
    first moment after one update is the clipped gradient, times 1 - beta1."""
    reference = build_model()
    model = build_model()
    shape = (2, dist.get_world_size() // 2) if replicate else (dist.get_world_size(),)
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[: len(shape)]))
    config = OptimizerConfig()
    optimizer = optimizer_of(dict(model.named_parameters()), config, dist.get_world_size())
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) * 10
    for m in (model, reference):
        m(x).square().sum().backward()
    norm, votes = optimizer.clip(max_norm, vote=dist.get_rank() > 0)
    assert votes == dist.get_world_size() - 1
    expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm or float("inf"))
    torch.testing.assert_close(norm, expected)
    optimizer.step(skip=torch.tensor(False))
    state = optimizer.state()
    for name, full in reference.named_parameters():
        clipped = state[f"{name}/exp_avg"].full_tensor() / (1 - config.betas[0])
        torch.testing.assert_close(clipped, full.grad, rtol=1e-5, atol=1e-6)
    return norm.item()


@pytest.mark.parametrize("replicate", [False, True])
def test_clipping_equals_clipping_of_the_full_model(ranks, replicate):
    (norm, *others) = ranks(4).run(clip_and_compare, 1.0, replicate)
    assert norm > 10
    assert others == [norm] * 3


def test_a_norm_below_the_limit_does_not_change_gradients(ranks):
    ranks(2).run(clip_and_compare, 1e9, False)
    ranks(2).run(clip_and_compare, None, False)


def norm_of_mixed_layouts():
    """Return the actual and the expected norm of parameters sharded over one, both or no axis of a 2 x 2 mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    full = [torch.full((4, 4), 1.0), torch.full((4, 4), 2.0), torch.full((4,), 3.0), torch.full((4, 4), 4.0)]
    model = nn.Module()
    layouts = (
        distribute_tensor(full[0], mesh["fsdp"], [Shard(0)]),
        distribute_tensor(full[1], mesh, [Shard(0), Shard(1)]),
        full[2],
        distribute_tensor(full[3], mesh, [Shard(0), Replicate()]),
    )
    for i, tensor in enumerate(layouts):
        model.register_parameter(str(i), nn.Parameter(tensor))
    optimizer = optimizer_of(dict(model.named_parameters()), OptimizerConfig(), 4)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    return optimizer.clip(None)[0].item(), torch.cat([t.flatten() for t in full]).norm().item()


def test_the_norm_counts_every_value_once_in_all_layouts(ranks):
    for norm, expected in ranks(4).run(norm_of_mixed_layouts):
        assert norm == pytest.approx(expected, rel=1e-6)


def step_and_compare():
    """Compare three steps with those of torch's AdamW. Return the names of the state."""
    model, reference_model = build_model(), build_model()
    fully_shard(model)
    optimizer = optimizer_of(dict(model.named_parameters()), OptimizerConfig(weight_decay=0.1), 1)
    matrices, others = (
        [p for p in reference_model.parameters() if (p.dim() == 2) == decays] for decays in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for lr in (1e-2, 3e-2, 1e-3):
        optimizer.start_step(lr)
        reference.zero_grad()
        for m in (model, reference_model):
            m(torch.ones(2, 6)).square().sum().backward()
        optimizer.step(skip=torch.tensor(False))
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
    for p, expected in zip(model.parameters(), reference_model.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), expected)
    return sorted(optimizer.state())


def test_steps_equal_those_of_torch_and_state_is_named_after_parameters(ranks):
    names = ranks(1).run(step_and_compare)[0]
    assert names == sorted(
        f"{p}/{q}" for p in ("0.weight", "0.bias", "1.weight", "2.weight") for q in ("exp_avg", "exp_avg_sq", "step")
    )


def skip_a_step(precision):
    """Return whether a skipped step changed nothing, whether the next one is finite, and the final step count."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 256), nn.RMSNorm(256), nn.Linear(256, 3, bias=False))
    fully_shard(model)
    config = OptimizerConfig(state_dtype=precision)
    optimizer = optimizer_of(dict(model.named_parameters()), config, dist.get_world_size())

    def step(scale, skip):
        optimizer.start_step(1e-2)
        (model(torch.ones(2, 6)).square().sum() * scale).backward()
        optimizer.clip(1.0)
        optimizer.step(skip=torch.tensor(skip))
        state = {name: p.full_tensor() for name, p in model.named_parameters()} | optimizer.state()
        return {
            name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for name, t in state.items()
        }

    before, after, later = step(1.0, False), step(float("nan"), True), step(1.0, False)
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return unchanged, all(t.isfinite().all() for t in later.values()), later["0.weight/step"].item()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "8bit"])
def test_a_skipped_step_changes_nothing(ranks, size, precision):
    assert ranks(size).run(skip_a_step, precision) == [(True, True, 2.0)] * size


# ------------------------------------------------------------ in host memory


def fifty_steps(offload, dtypes=("fp32", "fp32"), max_norm=5.0, in_backward=False):
    """Train a model with small and frozen parameters: two microbatches a step, clipping, a schedule, one skipped step.
    Return parameters with state, and norms."""
    parameter_dtype, state_dtype = dtypes
    model = build_model()
    model[0].bias.requires_grad_(False)
    model.to(DTYPES[parameter_dtype])
    fully_shard(model)
    parameters = dict(model.named_parameters())
    config = OptimizerConfig(offload=offload, in_backward=in_backward, state_dtype=state_dtype, weight_decay=0.1)
    optimizer = optimizer_of(parameters, config, dist.get_world_size())
    norms = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(50):
        optimizer.start_step(1e-2 / (1 + step))
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            x = torch.randn(4, 6, generator=generator).to(DTYPES[parameter_dtype])
            (model(x).square().sum() * (float("nan") if step == 20 else 1.0)).backward()
        norm, _ = optimizer.clip(max_norm)
        optimizer.step(skip=~norm.isfinite())
        norms.append(norm.item())
    assert all(p.grad is None for p in parameters.values()) or not (in_backward or offload == "state_and_gradients")
    tensors = parameters | optimizer.state()
    return {
        n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for n, t in tensors.items()
    }, norms


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("offload", ["state", "state_and_gradients"])
def test_an_update_in_host_memory_is_bitwise_identical_to_one_on_the_device(ranks, offload, size):
    for (tensors, norms), (expected, expected_norms) in zip(
        ranks(size).run(fifty_steps, offload), ranks(size).run(fifty_steps, "none"), strict=True
    ):
        assert set(tensors) == set(expected) and "0.bias/step" not in tensors
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        assert norms[:20] == expected_norms[:20] and norms[21:] == expected_norms[21:]


@pytest.mark.parametrize("size", [1, 2])
def test_an_update_in_backward_is_bitwise_identical_to_one_after_it(ranks, size):
    """All gradients of one step are non-finite, so that an update in backward skips every parameter too."""
    for (tensors, norms), (expected, expected_norms) in zip(
        ranks(size).run(fifty_steps, "none", ("fp32", "fp32"), None, True),
        ranks(size).run(fifty_steps, "none", ("fp32", "fp32"), None, False),
        strict=True,
    ):
        assert set(tensors) == set(expected)
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        assert norms[:20] == expected_norms[:20] and norms[21:] == expected_norms[21:]


def update_with_one_non_finite_gradient():
    """Return the names of the parameters that an update in backward changed, where one gradient is non-finite."""
    model = build_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_of(dict(model.named_parameters()), OptimizerConfig(in_backward=True), 1)
    model[2].weight.register_hook(lambda gradient: gradient * float("nan"))
    optimizer.start_step(1e-2)
    model(torch.ones(2, 6)).square().sum().backward()
    norm, _ = optimizer.clip(None)
    assert not norm.isfinite() and all(p.isfinite().all() for p in model.parameters())
    return sorted(name for name, p in model.named_parameters() if not torch.equal(p, before[name]))


def test_a_non_finite_gradient_does_not_change_its_parameter_in_backward(ranks):
    (changed,) = ranks(1).run(update_with_one_non_finite_gradient)
    assert "2.weight" not in changed


def update_in_chunks(precision, chunk_values):
    """Return parameters and state after three updates that convert `chunk_values` values at a time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 256), nn.Linear(256, 37, bias=False))
    config = OptimizerConfig(state_dtype=precision)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.optim.adamw._CHUNK_VALUES", chunk_values)
        optimizer = optimizer_of(dict(model.named_parameters()), config, 1)
        for _ in range(3):
            optimizer.start_step(1e-2)
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step(skip=torch.tensor(False))
    return {name: p.detach() for name, p in model.named_parameters()} | optimizer.state()


@pytest.mark.parametrize("precision", ["bf16", "8bit"])
def test_an_update_in_chunks_is_bitwise_identical_to_one_without(ranks, precision):
    ((complete,), (chunked,)) = (ranks(1).run(update_in_chunks, precision, n) for n in (2**23, 2560))
    assert set(complete) == set(chunked) and all(torch.equal(complete[name], chunked[name]) for name in complete)
    assert complete["1.weight/step"] == 3


# ------------------------------------------------------------ cautious decay


def cautious_adamw(p, gradients, lr, decay, betas=(0.9, 0.95), eps=1e-8):
    """Return the values after some steps (Chen et al. 2025, arXiv:2510.12402, algorithm 1 with AdamW's update)."""
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for step, g in enumerate(gradients, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        update = m / (1 - betas[0] ** step) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
        p = p - lr * (update + decay * torch.where(update * p >= 0, p, 0))
    return p


def cautious_steps(placement, dtype):
    """Return values after four steps besides a skipped one, and those that are expected. With clipping, the third moment has
    another sign than its gradient, and than it would have without the clipping; the fourth has another sign than the third."""
    draw = torch.Generator().manual_seed(0)
    start, signs = torch.randn(5, 256, generator=draw), torch.randn(5, 256, generator=draw).sign()
    start[0, :9], signs[1, :9] = 0.0, 0.0
    start = start.to(DTYPES[dtype])
    matrix = torch.nn.Parameter(start.clone())
    config = OptimizerConfig(cautious_decay=True, weight_decay=0.5, **placement)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.optim.adamw._CHUNK_VALUES", 512)
        optimizer = optimizer_of({"matrix": matrix}, config, 1)
        max_norm = None if config.in_backward else 1.2 * signs.norm().item()
        applied = []

        def step(factor, skip=False):
            optimizer.start_step(0.1)
            (matrix * signs.to(matrix) * factor).sum().backward()
            optimizer.clip(max_norm)
            optimizer.step(skip=torch.tensor(skip))
            clipped = factor if max_norm is None else max(-1.2, min(1.2, factor))
            applied.append(signs.double() * clipped)

        step(1.0)
        step(1.0)
        before = [t.detach().clone() for t in (matrix, *optimizer.state().values())]
        step(float("nan") if config.in_backward else -5.0, skip=True)
        applied.pop()
        for a, b in zip(before, (matrix, *optimizer.state().values()), strict=True):
            assert torch.equal(a, b)
        step(-3.0)
        step(-1.0)
    return matrix.detach().double(), cautious_adamw(start.double(), applied, 0.1, 0.5)


PLACEMENTS = [
    {},
    {"state_dtype": "bf16"},
    {"state_dtype": "8bit"},
    {"offload": "state"},
    {"offload": "state_and_gradients"},
    {"in_backward": True},
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_cautious_decay_is_that_of_the_formula_wherever_the_update_runs(ranks, placement, dtype):
    ((actual, expected),) = ranks(1).run(cautious_steps, placement, dtype)
    exact = dtype == "fp32" and "state_dtype" not in placement
    # A decay of a wrong value changes it by 5 %.
    torch.testing.assert_close(actual, expected, rtol=1e-5 if exact else 1.5e-2, atol=1e-6 if exact else 5e-3)


def test_sharded_like_shares_memory_with_the_local_shard(ranks):
    ranks(2).run(check_sharded_like)


def check_sharded_like():
    """The shard may be on another device than the mesh, and writes to the DTensor change it."""
    weight = distribute_tensor(torch.zeros(5, 512), init_device_mesh("cpu", (2,)), [Shard(0)])
    rows = to_local(weight).shape[0]
    codes, scales = torch.zeros(rows, 512, dtype=torch.uint8), torch.empty(rows, 2, device="meta")
    sharded = sharded_like(weight, codes)
    assert (sharded.shape, sharded.dtype) == (weight.shape, torch.uint8)
    sharded.to_local().fill_(7)
    assert (codes == 7).all()
    assert (
        sharded_like(weight, scales).shape == (5, 2) and sharded_like(weight, scales).to_local().device.type == "meta"
    )


def test_bf16_parameters_have_fp32_master_weights_in_host_memory(ranks):
    ((tensors, _),) = ranks(1).run(fifty_steps, "state_and_gradients", ("bf16", "fp32"))
    master = tensors["0.weight/master"]
    assert master.dtype == torch.float32 and tensors["0.weight"].dtype == torch.bfloat16
    assert torch.equal(master.bfloat16(), tensors["0.weight"]) and not torch.equal(master.bfloat16().float(), master)


def test_bf16_moments_are_close_to_fp32_moments(ranks):
    ((exact, _),) = ranks(1).run(fifty_steps, "none")
    for offload in ("none", "state"):
        ((rounded, _),) = ranks(1).run(fifty_steps, offload, ("fp32", "bf16"))
        assert rounded["2.weight/exp_avg"].dtype == torch.bfloat16
        assert rounded["2.weight/step"] == exact["2.weight/step"] == 49
        torch.testing.assert_close(rounded["2.weight"], exact["2.weight"], rtol=0.02, atol=0.002)
        assert not torch.equal(rounded["2.weight"], exact["2.weight"])

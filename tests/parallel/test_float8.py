"""Products in float8: values, gradients, independence of the layout, and what a GPU would reject."""

import math
from contextlib import nullcontext
from shutil import which
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from models import MODELS
from models.components import Gate
from models.llama import LlamaSizes, llama
from models.spec import meta_model
from tests.parallel.tiny_models import build_model, inputs
from tests.training_runs import without_code_generation
from trainer.adapters.apply import apply_lora
from trainer.adapters.select import select_parameters
from trainer.base.config import (
    ActivationCheckpointConfig,
    ConfigError,
    LoraConfig,
    ParallelConfig,
    TrainingConfig,
)
from trainer.objective.cross_entropy import CrossEntropyHead
from trainer.parallel import float8
from trainer.parallel.float8 import E4M3, E5M2, Float8, Float8Product, apply_float8, check_shapes, product, quantize
from trainer.parallel.init_weights import allocate, initialize
from trainer.tools.planner.recorder import Recorder
from trainer.tools.testing.double import round_significand
from trainer.tools.testing.layouts import DEBUG_FAMILIES

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 cannot scale rows on a CPU")
RECIPES = ("tensorwise", "rowwise")
by_recipe = pytest.mark.parametrize("by_row", [False, True], ids=RECIPES)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded(factor, dtype, by_row):
    """Round a factor to float8 and back, with scales computed by logarithms."""
    largest = factor.abs().amax(-1, keepdim=True) if by_row else factor.abs().amax()
    scale = (torch.finfo(dtype).max / largest.double()).log2().floor().exp2()
    return (factor * scale).to(dtype).double() / scale


@by_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_products_and_gradients_are_those_of_the_rounded_factors(by_row, dtype):
    x, w = normal(48, 64, dtype=dtype).requires_grad_(), normal(32, 64, seed=1, dtype=dtype).requires_grad_()
    gradient = 1e-5 * normal(48, 32, seed=2, dtype=dtype)
    out = Float8Product.apply(x, w, by_row)
    out.backward(gradient)
    of_gradient = E4M3 if by_row else E5M2
    a, b = x.detach(), w.detach()
    for result, left, right, left_dtype in (
        (out, a, b, E4M3),
        (x.grad, gradient, b.T, of_gradient),
        (w.grad, gradient.T, a.T, of_gradient),
    ):
        expected = rounded(left, left_dtype, by_row) @ rounded(right, E4M3, by_row).T
        assert result.dtype == dtype
        torch.testing.assert_close(result, expected.to(dtype), rtol=1e-5, atol=1e-6 * expected.abs().max().item())
        exact = left.double() @ right.double().T
        assert 0.01 < (result.double() - exact).norm() / exact.norm() < 0.08


@by_recipe
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_a_scale_is_a_power_of_two_that_uses_the_range(by_row, dtype):
    factor = normal(64, 16) * 10 ** (3 * normal(64, 1, seed=1))
    values, reciprocals = quantize(factor, dtype, by_row)
    assert reciprocals.shape == ((64, 1) if by_row else ())
    assert all(math.frexp(scale)[0] == 0.5 for scale in reciprocals.flatten().tolist())
    largest = values.float().abs().amax(-1) if by_row else values.float().abs().amax()
    limit = torch.finfo(dtype).max
    assert (largest > 0.47 * limit).all() and (largest <= limit).all()  # 0.5, minus the rounding of the largest value


SPLITS = {
    "microbatches": lambda x, w, of: torch.cat([of(part, w) for part in x.chunk(4)]),
    "columns": lambda x, w, of: torch.cat([of(x, part) for part in w.chunk(4)], 1),
    "inner dim": lambda x, w, of: sum(of(*parts) for parts in zip(x.chunk(4, 1), w.chunk(4, 1), strict=True)),
}


@by_recipe
@pytest.mark.parametrize("split", SPLITS)
def test_a_product_of_shards_is_that_of_the_full_factors(by_row, split):
    """Not so with scales that are no powers of two: then shards differ by the rounding error of float8."""
    x, w = normal(64, 128), normal(32, 128, seed=1)

    def deviation():
        def of(a, b):
            return product(a, b, E4M3, by_row)

        full = of(x, w)
        return (SPLITS[split](x, w, of) - full).norm() / full.norm()

    assert deviation() < 1e-6
    with mock.patch.object(float8, "power_of_two", lambda x: x):
        # Rows of factors have scales of their own: only the inner dim is split between them.
        depends_on_scales = not by_row or split == "inner dim"
        assert deviation() > 1e-3 if depends_on_scales else deviation() < 1e-6


def test_shards_differ_only_in_values_that_are_tiny_beside_the_largest():
    factor = normal(4096) * 10 ** (-8 * torch.rand(4096, generator=torch.Generator().manual_seed(1)))
    shard = factor[:, None].abs().clamp(max=1e-4)
    values, scale = quantize(shard, E4M3, by_row=False)
    full = torch.cat([shard, torch.ones(1, 1)])
    of_full, scale_of_full = quantize(full, E4M3, by_row=False)
    difference = (values.float() * scale - (of_full.float() * scale_of_full)[:-1]).abs()
    assert difference[shard >= 7e-5].max() == 0
    assert 1e-6 < difference.max() <= 4.4e-6


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_the_reference_of_parity_rounds_like_float8_where_it_is_normal(dtype):
    values = normal(10_000).double() * 10
    values = values[values.abs() >= torch.finfo(dtype).tiny]
    assert torch.equal(round_significand(values, dtype), values.to(dtype).double())
    assert round_significand(torch.tensor([1.3e-30, 0.0]).double(), dtype).ne(0).tolist() == [True, False]


@pytest.mark.skipif(which("g++") is None, reason="needs a C++ compiler")
def test_the_reference_of_parity_can_be_compiled():
    values = normal(100).double()
    assert torch.equal(torch.compile(round_significand)(values, E4M3), round_significand(values, E4M3))


def test_zeros_stay_zeros_and_what_is_not_finite_stays_visible():
    ones = torch.ones(16, 16)
    for by_row in (False, True):
        assert torch.equal(product(torch.zeros(16, 16), ones, E4M3, by_row), torch.zeros(16, 16))
        for value in (math.inf, -math.inf, math.nan):
            factor = ones.clone()
            factor[3, 5] = value
            rows = product(factor, ones, E4M3, by_row).isnan().all(1)
            assert rows.tolist() == [
                i == 3 or not by_row for i in range(16)
            ]  # one scale spreads it, and must not hide it


@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_and_gradients_are_those_of_torchao(recipe):
    from torchao.float8 import convert_to_float8_training  # here, because it takes seconds
    from torchao.float8.config import Float8LinearConfig, Float8LinearRecipeName

    config = Float8LinearConfig.from_recipe_name(Float8LinearRecipeName(recipe))
    object.__setattr__(config, "round_scales_to_power_of_2", True)
    linear = nn.Linear(64, 32, bias=True).bfloat16()
    own = nn.Linear(64, 32, bias=True).bfloat16()
    own.load_state_dict(linear.state_dict())
    apply_float8(own_model := nn.ModuleDict({"own": own}), Float8(frozenset({"own"}), recipe == "rowwise"))
    other = convert_to_float8_training(nn.Sequential(linear), config=config)
    results = []
    for module in (own_model["own"], other):
        x = normal(2, 24, 64, seed=1, dtype=torch.bfloat16).requires_grad_()
        out = module(x)
        out.backward(1e-4 * normal(2, 24, 32, seed=2, dtype=torch.bfloat16))
        results.append([out, x.grad, *(p.grad for p in module.parameters())])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


def num_products(recorder):
    return recorder.op_counts["_scaled_mm"]


def test_a_frozen_weight_has_no_gradient_and_keeps_no_input():
    x, w = normal(16, 64).requires_grad_(), normal(32, 64, seed=1)
    with Recorder() as recorder:
        out = Float8Product.apply(x, w, False)
        assert [saved is w for saved in out.grad_fn.saved_tensors if saved is not None] == [True]
        out.sum().backward()
    assert num_products(recorder) == 2
    with Recorder() as recorder:
        Float8Product.apply(x.detach(), w.requires_grad_(), False).sum().backward()
    assert num_products(recorder) == 2 and w.grad is not None


# ---------------------------------------------------------------- in a model

SIZES = LlamaSizes(dim=64, n_layers=2, n_heads=8, n_kv_heads=4, hidden_dim=160, vocab_size=64)
LINEARS = [*(f"attention.{name}" for name in ("wq", "wk", "wv", "wo")), *(f"feed_forward.w{i}" for i in (1, 2, 3))]
ALL = frozenset(f"layers.{i}.{name}" for i in range(SIZES.n_layers) for name in LINEARS)


def step(mode, compiled, by_row):
    """Return loss, gradients, number of products and number of graphs of a step on one rank."""
    torch._dynamo.reset()
    counters.clear()
    checkpointing = ActivationCheckpointConfig(mode=mode)
    with without_code_generation():
        settings = {"checkpointing": checkpointing, "compiled": compiled, "dtype": "bf16"}
        model = build_model(SIZES, ParallelConfig(), **settings, float8=Float8(ALL, by_row))
        parameters = dict(model.named_parameters())  # forward replaces them by copies in bf16
        tokens, *others = inputs(SIZES)
        with nullcontext() if compiled else Recorder() as recorder:
            loss = model(tokens, *others, head=CrossEntropyHead(tokens, 1024))
            loss.backward()
    products = 0 if compiled else num_products(recorder)
    gradients = {name: p.grad for name, p in parameters.items()}
    return loss.detach(), gradients, products, counters["stats"]["unique_graphs"]


def steps(by_row):
    modes = ("none", "selective", "full")
    return [step(mode, compiled, by_row) for compiled in (False, True) for mode in modes]


@by_recipe
def test_recomputation_and_compilation_do_not_change_a_step(ranks, by_row):
    """Selective recomputation repeats no product; full recomputation all but the last of a block, whose result is not needed."""
    ((first, *others),) = ranks(1).run(steps, by_row)
    for loss, gradients, *_ in others:
        assert torch.equal(loss, first[0])
        for name, expected in first[1].items():
            torch.testing.assert_close(gradients[name], expected, rtol=1e-5, atol=1e-7)
    assert [products for *_, products, _ in (first, *others[:2])] == [42, 42, 4 * 14 - 2]
    assert [graphs for *_, graphs in others[2:]] == [1, 1, 1]  # all blocks share one


def test_an_adapter_is_added_to_the_product_of_a_frozen_base_in_float8():
    def build(rank):
        with torch.device("meta"):
            model = llama(SIZES)
        structure, lora = model.structure(), LoraConfig(rank=rank)
        trained = select_parameters(meta_model(llama, SIZES), structure, lora)
        apply_float8(model, Float8(ALL, by_row=False))
        apply_lora(model, "layers", trained, lora, seed=0)
        allocate(model, torch.device("cpu"))
        initialize(model, seed=0, lora=lora)
        return model

    base, adapted = build(None), build(4)
    tokens, context = inputs(SIZES)
    with Recorder() as recorder:
        out = adapted(tokens, context)
        out.square().sum().backward()
    assert torch.equal(out, base(tokens, context))  # the second matrix of an adapter starts at zero
    # Nothing before the first three modules is trained, so their inputs have no gradient.
    assert num_products(recorder) == len(ALL) + len(ALL) - 3
    with_gradient = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert with_gradient == {f"{name}.lora_{leaf}" for name in ALL for leaf in "ab"}


# ---------------------------------------------------------------- on a GPU


def products_on_a_fake_gpu(tokens, columns, rows, by_row, multiply=float8.multiply):
    """Compute a product and its gradients. Multiply fake tensors of a GPU, which torch checks like those of a real one."""

    def on_gpu(*args):
        with FakeTensorMode():
            moved = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in args[:4]]
            out = multiply(*moved, *args[4:])
        return torch.zeros(out.shape, dtype=out.dtype)

    x = normal(tokens, columns, dtype=torch.bfloat16).requires_grad_()
    w = normal(rows, columns, dtype=torch.bfloat16).requires_grad_()
    with mock.patch.object(float8, "multiply", on_gpu):
        out = Float8Product.apply(x, w, by_row)
        out.sum().backward()
    return [tuple(t.shape) for t in (out, x.grad, w.grad)]


@by_recipe
def test_a_gpu_accepts_the_products(by_row):
    assert products_on_a_fake_gpu(32, 64, 48, by_row) == [(32, 48), (32, 64), (48, 64)]


@by_recipe
@pytest.mark.parametrize("sizes", [(24, 64, 48), (32, 72, 48), (32, 64, 40)], ids=["tokens", "columns", "rows"])
def test_a_gpu_rejects_what_is_no_multiple_of_16(by_row, sizes):
    with pytest.raises(RuntimeError, match="divisible by 16"):
        products_on_a_fake_gpu(*sizes, by_row)


def row_major(a, b, a_scales, b_scales, dtype, fast_sums):
    return torch._scaled_mm(
        a, torch.empty(b.shape[::-1], dtype=b.dtype, device=b.device), a_scales, b_scales, out_dtype=dtype
    )


def mixed_scales(a, b, a_scales, b_scales, dtype, fast_sums):
    return torch._scaled_mm(a, b.t(), a_scales, torch.empty((), device=a.device), out_dtype=dtype)


@pytest.mark.parametrize(
    ("multiply", "by_row", "error"),
    [(row_major, False, "mat2 must be col_major"), (mixed_scales, True, "scale tensors must be 2D")],
)
def test_the_fake_gpu_checks_layouts_and_scales(multiply, by_row, error):
    with pytest.raises(RuntimeError, match=error):
        products_on_a_fake_gpu(32, 64, 48, by_row, multiply)


# ---------------------------------------------------------------- which modules


def settings(**values):
    return TrainingConfig(**({"float8": "tensorwise", "seq_len": 64} | values))


def resolved(family="llama3", dims=None, sequence_parallel=True, overrides=None, **values):
    spec = MODELS[family]
    sizes = spec.by_size["debug"]
    model = meta_model(spec.model, type(sizes)(**{**vars(sizes), **(overrides or {})}))
    structure, config = model.structure(), settings(**values)
    chosen = float8.resolve_float8(model, structure, config)
    check_shapes(chosen, model, structure, dims or dimensions(), config, sequence_parallel)
    return model, chosen.modules


def dimensions(**degrees):
    degrees = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1} | degrees
    return SimpleNamespace(**degrees)


@pytest.mark.parametrize("family", DEBUG_FAMILIES)
def test_the_linear_modules_of_the_blocks_are_converted(family):
    model, modules = resolved(family)
    linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and not isinstance(m, Gate)}
    assert (
        modules < linears
        and linears - modules == {"output"}
        and not any("router" in n or ".experts" in n for n in modules)
    )
    apply_float8(model, Float8(frozenset(modules), by_row=False))
    assert all(("forward" in vars(m)) == (n in modules) for n, m in model.named_modules())


def test_patterns_exclude_modules():
    _, every = resolved()
    _, some = resolved(float8_exclude=("*.w[kv]", "layers.0.*"))
    assert every - some == {n for n in every if n.endswith((".wk", ".wv")) or n.startswith("layers.0.")} != set()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"float8_exclude": ("layers.0.feed_forward.w4",)},
            "training.float8_exclude: layers.0.feed_forward.w4 matches no linear module of the blocks; did you mean "
            "'layers.0.feed_forward.w3'?",
        ),
        ({"float8_exclude": ("*.wx",)}, "training.float8_exclude: *.wx matches no linear module of the blocks"),
        (
            {"float8_exclude": ("output",)},
            "training.float8_exclude: output matches no linear module of the blocks; output has no products in float8",
        ),
        (
            {"float8_exclude": ("wk",)},
            "training.float8_exclude: wk matches no linear module of the blocks; write *.wk",
        ),
        (
            {"float8_exclude": ("*.k_proj",)},
            "training.float8_exclude: *.k_proj matches no linear module of the blocks; *.k_proj is called *.attention.wk here",
        ),
        (
            {"float8_exclude": ("*",)},
            "training.float8_exclude: excludes all linear modules of the blocks; see [training] float8",
        ),
        (
            {"dims": dimensions(tp=2), "overrides": {"hidden_dim": 272}},
            "training.float8: layers.0.feed_forward.w1 has a matrix of 136 x 128 on each rank with tp 2, but float8 needs "
            "multiples of 16; see [training] float8_exclude",
        ),
        (
            {"dims": dimensions(cp=2), "seq_len": 40},
            "training.float8: layers.0.attention.wq multiplies local_batch_size 1 x seq_len 40 / 2 ranks = 20 tokens, but "
            "float8 needs a multiple of 16",
        ),
        (
            {"family": "deepseek-v3", "dims": dimensions(tp=4), "seq_len": 96},
            "training.float8: layers.0.attention.wq_a multiplies local_batch_size 1 x seq_len 96 / 4 ranks = 24 tokens, but "
            "float8 needs a multiple of 16",
        ),
    ],
)
def test_what_cannot_run_is_one_line(values, message):
    with pytest.raises(ConfigError) as error:
        resolved(**values)
    assert f"{error.value.key}: {error.value.message}" == message


def test_a_cpu_gets_a_scale_for_each_row(monkeypatch):
    """With one scale for each factor, CPUs with AMX take 1,000 times as long."""
    given, scaled_mm = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **options: given.append(args) or scaled_mm(*args, **options))
    x, w = normal(48, 64).requires_grad_(), normal(32, 64, seed=1).requires_grad_()
    Float8Product.apply(x, w, False).sum().backward()
    assert [(a.shape, b.shape) for *_, a, b in given] == [((48, 1), (1, 32)), ((48, 1), (1, 64)), ((32, 1), (1, 64))]


def test_a_smaller_excluded_part_makes_a_layout_legal():
    resolved(dims=dimensions(tp=2), overrides={"hidden_dim": 272}, float8_exclude=("*.feed_forward.*",))

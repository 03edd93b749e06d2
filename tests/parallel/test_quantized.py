"""Products with weights in 4 bits: equal to those with the dequantized weights, of which autograd saves none."""

from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from models import MODELS
from models.context import Context
from models.spec import meta_model
from tests.parallel.tiny_models import CPU, layout_of
from tests.training_runs import full, without_code_generation
from trainer.adapters.apply import apply_lora
from trainer.adapters.nf4 import quantized_weights, round_trip
from trainer.adapters.select import LORA_B, select_parameters, select_quantized
from trainer.base.config import ActivationCheckpointConfig, ConfigError, LoraConfig, ParallelConfig
from trainer.objective.cross_entropy import CrossEntropyHead
from trainer.parallel.attention import CPU_BACKEND
from trainer.parallel.init_weights import allocate, initialize
from trainer.parallel.mesh import Meshes, ParallelDims
from trainer.parallel.parallelize import configure_compiler, parallelize
from trainer.parallel.parameter_storage import ParameterStorage
from trainer.parallel.quantized import quantize_weights
from trainer.parallel.stages import Stage
from trainer.runtime.dtensor import local_region

SIZES = {
    "llama3": {"hidden_dim": 256},
    "gpt-oss": {"hidden_dim": 128, "head_dim": 32},
    "deepseek-v3": {
        **{"hidden_dim": 256, "expert_hidden_dim": 128, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 32},
        "sparse_layers": (False, True),
    },
}
"""Family -> sizes whose rows are multiples of 64, also on two tensor-parallel ranks."""
LORA = LoraConfig(rank=4)


def described(family, base_dtype):
    """Return spec and sizes of a small model, its trained parameters and the names of its quantized weights."""
    spec, lora = MODELS[family], replace(LORA, base_dtype=base_dtype)
    sizes = replace(spec.by_size["debug"], n_layers=2, **SIZES[family])
    meta = meta_model(spec.model, sizes)
    trained = select_parameters(meta, meta.structure(), lora)
    return spec, sizes, trained, select_quantized(meta, meta.structure(), lora)


def models_of(family, base_dtype, dtype):
    """Return a model with adapters whose base is quantized, and the same one with the dequantized values as its base."""
    spec, sizes, trained, names = described(family, base_dtype)
    built, lora = [], LORA
    original = spec.model(sizes)
    initialize(original, seed=0)
    original.to(dtype)
    weights = dict(original.named_parameters())
    for is_quantized in (True, False):
        model = spec.model(sizes).to(dtype)
        if is_quantized:
            quantize_weights(model, names, base_dtype == "nf4_double", "cpu")
        apply_lora(model, "layers", trained, lora, seed=0)
        initialize(model, seed=0, lora=lora)
        for name, weight in quantized_weights(model).items():
            weight.fill(lambda region, name=name: weights[name].detach()[region])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in names:
                    rows = weights[name].flatten(0, -2)
                    parameter.copy_(round_trip(rows, base_dtype == "nf4_double").view_as(parameter))
                elif name in weights:
                    parameter.copy_(weights[name])
                elif name.endswith(LORA_B):
                    nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)
        built.append(model)
    return built


@pytest.mark.parametrize(
    ("family", "base_dtype", "dtype"),
    [
        ("llama3", "nf4", torch.bfloat16),
        ("llama3", "nf4_double", torch.float32),
        ("gpt-oss", "nf4_double", torch.float32),
        ("deepseek-v3", "nf4", torch.float32),
    ],
)
def test_results_and_gradients_are_those_of_a_dequantized_base(family, base_dtype, dtype):
    quantized, dense = models_of(family, base_dtype, dtype)
    assert quantized_weights(quantized).keys() == described(family, base_dtype)[3]
    assert not any(p.requires_grad for p in quantized.parameters() if not p.is_floating_point())
    tokens = torch.randint(2048, (2, 16), generator=torch.Generator().manual_seed(0))
    gradients = []
    for model in (quantized, dense):
        logits = model(tokens, Context.of(tokens))
        logits.float().square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def deviation_of_sharded_gradients(family, base_dtype, compiled):
    """Return the largest deviation of the adapters' gradients with tensor parallelism from those without, relative to the
    gradient's norm."""
    torch._dynamo.reset()
    reference, _ = models_of(family, base_dtype, torch.float32)
    spec, sizes, trained, names = described(family, base_dtype)
    structure, parallel = reference.structure(), ParallelConfig(tp=dist.get_world_size())
    meshes = Meshes(ParallelDims.from_config(parallel, parallel.tp), CPU, has_experts=structure.has_experts)
    storage = ParameterStorage(dtype="fp32", quantized=names, is_double=base_dtype == "nf4_double")
    adapt = partial(apply_lora, blocks=structure.blocks_path, trained=trained, config=LORA, seed=0)
    settings = (parallel, ActivationCheckpointConfig(), compiled, storage, layout_of(meshes), CPU_BACKEND, adapt)
    with without_code_generation():
        (sharded,) = parallelize(
            lambda: spec.model(sizes), structure, [Stage(0, 1, range(2))], meshes, *settings
        ).values()
    allocate(sharded, CPU)
    complete = dict(reference.state_dict())
    with torch.no_grad():
        for name, weight in (*sharded.named_parameters(), *sharded.named_buffers()):
            local, region = local_region(weight)
            local.copy_(complete[name][region])
    tokens = torch.randint(sizes.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    for model in (reference, sharded):
        model(tokens, Context.of(tokens), head=CrossEntropyHead(tokens.roll(-1, 1), 1024)).backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    actual = {name: full(p.grad) for name, p in sharded.named_parameters() if p.requires_grad}
    assert expected.keys() == actual.keys()
    return max(((actual[name] - g).norm() / g.norm()).item() for name, g in expected.items())


def test_sharded_products_are_those_of_one_rank(ranks):
    """Also with biases, of which each rank adds a part, and with modules that compute with local values."""
    for family, base_dtype, compiled in (
        ("llama3", "nf4", True),
        ("gpt-oss", "nf4_double", False),
        ("deepseek-v3", "nf4", False),
    ):
        deviations = ranks(2).run(deviation_of_sharded_gradients, family, base_dtype, compiled)
        assert max(deviations) < 1e-5, family


@pytest.mark.parametrize("compiled", [False, True])
def test_autograd_saves_bytes_and_no_values(compiled):
    """The compiler would save the values, if backward could use those of forward."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.SiLU(), nn.Linear(256, 128, bias=False))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    dense = torch.randn(3, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    x = dense.detach().clone().requires_grad_()
    values = {name: round_trip(weight, is_double=True) for name, weight in weights.items()}
    torch.func.functional_call(model, values, dense).sum().backward()
    quantize_weights(model, weights.keys(), True, "cpu")
    for name, weight in quantized_weights(model).items():
        weight.fill(lambda region, name=name: weights[name][region])
    forward = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True) if compiled else model
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result = forward(x)
    result.sum().backward()
    torch.testing.assert_close(x.grad, dense.grad)
    assert {t.dtype for t in saved if t.numel() > 3 * 256} == {torch.uint8}


def nested(events):
    for event in events:
        yield event
        yield from nested(event.children)


def test_a_compiled_block_has_the_values_of_one_matrix_at_a_time():
    """The compiler would dequantize both matrices together, because they share a table."""
    torch._dynamo.reset()
    model = nn.ModuleList(nn.Linear(128, 256, bias=False) for _ in range(2))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    quantize_weights(model, weights.keys(), True, "cpu")
    for name, weight in quantized_weights(model).items():
        weight.fill(lambda region, name=name: weights[name][region])
    configure_compiler(ActivationCheckpointConfig(), None, quantizes=True)
    try:
        gated = torch.compile(lambda x: nn.functional.silu(model[0](x)) * model[1](x), fullgraph=True)
        x = torch.randn(3, 128, requires_grad=True)
        gated(x).sum().backward()  # compiles
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            gated(x).sum().backward()
    finally:
        configure_compiler(ActivationCheckpointConfig(), None)
    events = sorted(nested(profiler.profiler.kineto_results.experimental_event_tree()), key=lambda e: e.start_time_ns)
    sizes = [event.extra_fields.alloc_size for event in events if event.name == "[memory]"]
    matrix = 128 * 256 * 4
    in_memory = list(accumulate((size > 0) - (size < 0) for size in sizes if abs(size) == matrix))
    assert max(in_memory) == 1 and in_memory[-1] == 0


def test_what_cannot_be_kept_in_4_bits_is_refused():
    sizes = MODELS["llama3"].by_size["debug"]
    model = meta_model(MODELS["llama3"].model, sizes)
    with pytest.raises(ConfigError) as error:
        select_quantized(model, model.structure(), LoraConfig(rank=4, base_dtype="nf4"))
    message = "needs rows of a multiple of 64 values, but those of layers.0.feed_forward.w2.weight have 352"
    assert (error.value.key, error.value.message) == ("lora.base_dtype", message)

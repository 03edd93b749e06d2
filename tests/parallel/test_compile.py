"""Compiled blocks: recomputed gathers, one shared graph, unchanged parameter names."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from models import MODELS
from models.llama import LlamaSizes
from models.moe import MixtureOfExperts
from models.spec import meta_model
from tests.parallel.tiny_models import CPU, build_model, inputs, layout_of, reference
from tests.training_runs import without_code_generation
from trainer.adapters.apply import apply_lora
from trainer.adapters.select import LORA_B, select_parameters
from trainer.base.config import ActivationCheckpointConfig, ExpertsConfig, LoraConfig, ParallelConfig
from trainer.objective.cross_entropy import CrossEntropyHead
from trainer.parallel.attention import CPU_BACKEND
from trainer.parallel.balance import apply_balance
from trainer.parallel.init_weights import allocate, initialize
from trainer.parallel.mesh import Meshes, ParallelDims
from trainer.parallel.parallelize import configure_compiler, parallelize
from trainer.parallel.parameter_storage import ParameterStorage
from trainer.parallel.rotation import rotate_by_complex_product
from trainer.parallel.stages import Stage

SIZES = LlamaSizes(dim=36, n_layers=3, n_heads=6, n_kv_heads=2, hidden_dim=46, vocab_size=61)
"""Not multiples of the vector width. The vocabulary is sharded unevenly."""
MODES = ("none", "selective", "full")
SHAPE = {"batch": 3, "seq": 14}


def gathers(recompute):
    """Return the all-gathers over tp in forward and backward of a compiled model, its gradients, and the number of graphs."""
    counters.clear()
    torch._dynamo.reset()
    model = build_model(
        SIZES,
        ParallelConfig(tp=2),
        checkpointing=ActivationCheckpointConfig(recompute_all_gather=recompute),
        compiled=True,
    )
    batch = inputs(SIZES, **SHAPE)
    counts = []
    for _ in range(2):  # the first step compiles
        model.zero_grad()
        counts = []
        with profile(activities=[ProfilerActivity.CPU]) as forward:
            loss = model(*batch, head=CrossEntropyHead(batch[0], 1024))
        with profile(activities=[ProfilerActivity.CPU]) as backward:
            loss.backward()
        for profiled in (forward, backward):
            name = "_c10d_functional::all_gather_into_tensor"
            counts.append(sum(event.count for event in profiled.key_averages() if event.key.startswith(name)))
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return counts, gradients, counters["stats"]["unique_graphs"]


def gathers_of_both():
    with without_code_generation():
        return gathers(False), gathers(True)


def test_compiled_blocks_share_a_graph_and_recompute_gathers_as_configured(ranks):
    results = ranks(2).run(gathers_of_both)[0]
    (saved, saved_gradients, graphs), (recomputed, recomputed_gradients, recomputed_graphs) = results
    assert graphs == recomputed_graphs == 1
    assert recomputed[0] == saved[0]
    assert recomputed[1] - saved[1] == 2 * SIZES.n_layers
    model = reference(SIZES)
    batch = inputs(SIZES, **SHAPE)
    model(*batch, head=CrossEntropyHead(batch[0], 1024)).backward()
    for name, parameter in model.named_parameters():
        for gradients in (saved_gradients, recomputed_gradients):
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-4)


def model_with_experts(mode, compiled, parallel=ParallelConfig(), lora=LoraConfig()):  # noqa: B008  (frozen)
    """Return a parallelized model with dense blocks and blocks with experts on one rank, its sizes and its meshes."""
    spec = MODELS["deepseek-v3"]
    sizes = spec.by_size["debug"]
    structure = meta_model(spec.model, sizes).structure()
    trained = select_parameters(meta_model(spec.model, sizes), structure, lora)
    meshes = Meshes(ParallelDims.from_config(parallel, 1), CPU, has_experts=True)
    stages = [Stage(0, 1, range(sizes.n_layers))]
    (model,) = parallelize(
        *(lambda: spec.model(sizes), structure, stages, meshes, parallel, ActivationCheckpointConfig(mode=mode)),
        *(
            compiled,
            ParameterStorage(dtype="fp32"),
            layout_of(meshes),
            CPU_BACKEND,
            lambda model: apply_lora(model, "layers", trained, lora, seed=0),
        ),
    ).values()
    return model, sizes, meshes


def step_of_experts(mode, compiled, lora=LoraConfig()):  # noqa: B008  (frozen)
    """Return gradients and statistics of a step, and the number of graphs."""
    torch._dynamo.reset()
    counters.clear()
    with without_code_generation():
        model, sizes, meshes = model_with_experts(mode, compiled, lora=lora)
        allocate(model, CPU)
        initialize(model, seed=0, lora=lora)
        for name, p in model.named_parameters():
            if name.endswith(LORA_B):  # it starts at zero, and then the first matrix would have no gradient
                torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(0))
        apply_balance(model, ExpertsConfig(balance_loss=0.01, z_loss=0.01), meshes, CPU)
        batch = inputs(sizes)
        losses = [model(*batch, head=CrossEntropyHead(batch[0], 1024)) for _ in range(2)]  # as in a pipeline
        for loss in losses:
            loss.backward()
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                module.balance.num_samples.fill_(3)  # another batch size
        model(*batch, head=CrossEntropyHead(batch[0], 1024)).backward()
    totals = [module.balance.totals for module in model.modules() if isinstance(module, MixtureOfExperts)]
    graphs = counters["stats"]["unique_graphs"]
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}, torch.stack(totals), graphs


def steps_of_experts():
    eager, compiled = (step_of_experts("none", False), [step_of_experts(mode, True) for mode in MODES])
    return eager, compiled


def steps_of_adapters():
    lora = LoraConfig(rank=4)
    return step_of_experts("none", False, lora), [step_of_experts(mode, True, lora) for mode in MODES]


@pytest.mark.parametrize("steps", [steps_of_experts, steps_of_adapters])
def test_a_block_with_experts_is_one_graph_whatever_it_recomputes(ranks, steps):
    """A break in a graph raises an exception, except around a checkpoint: torch would run the complete block eagerly."""
    (((gradients, totals, _), compiled),) = ranks(1).run(steps)
    assert totals[:, :-2].sum() == 3 * 2 * 16 * 2 * len(totals)
    for compiled_gradients, compiled_totals, graphs in compiled:
        assert graphs == 2  # of dense blocks, and of those with experts
        torch.testing.assert_close(compiled_totals, totals)
        torch.testing.assert_close(compiled_gradients, gradients, rtol=1e-4, atol=1e-6)


def blocks_with_fast_forwards(mode):
    """Return the names of the blocks with experts, and of those with the forwards of eager mode, in a compiled model whose graphs
    break: FSDP manages its parameters."""
    model, *_ = model_with_experts(mode, True, ParallelConfig(cpu_offload=True))
    sparse = {name for name, b in model.layers.items() if isinstance(b.feed_forward, MixtureOfExperts)}
    dense_layers = {
        name: b.feed_forward.shared if name in sparse else b.feed_forward for name, b in model.layers.items()
    }
    rotated = {name for name, b in model.layers.items() if b.attention.rotate is rotate_by_complex_product}
    gated = {name for name, layer in dense_layers.items() if "forward" in vars(layer)}
    return sparse, rotated, gated


@pytest.mark.parametrize("mode", MODES)
def test_blocks_that_stay_uncompiled_have_the_forwards_of_eager_mode(ranks, mode):
    ((sparse, rotated, gated),) = ranks(1).run(blocks_with_fast_forwards, mode)
    assert sparse and rotated == gated == (sparse if mode == "selective" else set())


@pytest.mark.parametrize(("mode", "budget"), [("budget", 0.25), ("none", 1.0)])
def test_every_run_sets_the_options_of_the_compiler(mode, budget):
    configure_compiler(ActivationCheckpointConfig(), None, quantizes=True)
    configure_compiler(ActivationCheckpointConfig(mode=mode, memory_budget=0.25), None)
    assert torch._inductor.config.score_fusion_memory_threshold == 10
    assert torch._functorch.config.activation_memory_budget == budget
    assert torch._functorch.config.unsafe_allow_optimization_of_collectives == (mode == "budget")
    assert not torch._inductor.config._micro_pipeline_tp
    configure_compiler(ActivationCheckpointConfig(), None)

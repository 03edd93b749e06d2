"""Compiled blocks: recomputed gathers, one shared graph, unchanged parameter names."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from models.llama import LlamaSizes
from tests.parallel.tiny_models import build_model, inputs, reference
from trainer.config import ActivationCheckpointConfig, ParallelConfig
from trainer.objective.cross_entropy import CrossEntropyHead
from trainer.parallel.parallelize import configure_compiler

SIZES = LlamaSizes(dim=36, n_layers=3, n_heads=6, n_kv_heads=2, hidden_dim=46, vocab_size=61)
"""Not multiples of the vector width. The vocabulary is sharded unevenly."""
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


@pytest.mark.parametrize(("mode", "budget"), [("budget", 0.25), ("none", 1.0)])
def test_every_run_sets_the_options_of_the_compiler(mode, budget):
    configure_compiler(ActivationCheckpointConfig(mode=mode, memory_budget=0.25), None)
    assert torch._functorch.config.activation_memory_budget == budget
    assert torch._functorch.config.unsafe_allow_optimization_of_collectives == (mode == "budget")
    assert not torch._inductor.config._micro_pipeline_tp
    configure_compiler(ActivationCheckpointConfig(), None)

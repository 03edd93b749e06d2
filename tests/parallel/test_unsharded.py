"""A rank without FSDP: sums of gradients, cast parameters, recomputation inside compiled blocks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.profiler import ProfilerActivity, profile

from models.llama import LlamaSizes
from tests.parallel.tiny_models import build_model, inputs, reference
from tests.training_runs import without_code_generation
from trainer.base.config import ActivationCheckpointConfig, ParallelConfig
from trainer.objective.cross_entropy import CrossEntropyHead
from trainer.parallel.unsharded import GradientAccumulator

SIZES = LlamaSizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=64)


def accumulate(p, gradients):
    """Run a backward for each gradient and return the parameter's final gradient."""
    accumulator = GradientAccumulator([p], frees_gradients=False)
    for i, gradient in enumerate(gradients):
        accumulator.start_microbatch(i == len(gradients) - 1)
        (p * gradient).sum().backward()
    assert accumulator.sums == {}
    return p.grad


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_bf16_gradients_are_summed_in_fp32_and_rounded_once(count):
    gradients = torch.randn(count, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    total = accumulate(nn.Parameter(torch.zeros(100, dtype=torch.bfloat16)), gradients)
    assert torch.equal(total, gradients.float().sum(0).bfloat16())
    in_bf16 = gradients[0].clone()
    for gradient in gradients[1:]:
        in_bf16 += gradient
    assert torch.equal(total, in_bf16) == (count < 3)


def test_a_frozen_parameter_has_no_sum():
    GradientAccumulator([nn.Parameter(torch.zeros(2, dtype=torch.bfloat16), requires_grad=False)], frees_gradients=True)


def sum_of_partial_gradients():
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Replicate()]))
    accumulator = GradientAccumulator([p], frees_gradients=False)
    for last in (False, True):
        accumulator.start_microbatch(last)
        p.to_local(grad_placements=[Partial()]).sum().backward()
    return p.grad.placements, p.grad.to_local().tolist()


def test_gradients_of_a_replicated_parameter_are_summed_over_the_ranks(ranks):
    assert ranks(2).run(sum_of_partial_gradients) == [((Replicate(),), [4.0] * 3)] * 2


def step(dtype, mode, compiled):
    """Return the gradients of one step and the number of matrix products in its forward and backward."""
    torch._dynamo.reset()
    checkpointing = ActivationCheckpointConfig(mode=mode)
    with without_code_generation():
        model = build_model(SIZES, ParallelConfig(), checkpointing=checkpointing, compiled=compiled, dtype=dtype)
    parameters = dict(model.named_parameters())
    tokens, *others = inputs(SIZES)
    for _ in range(2):  # the first step compiles
        for p in parameters.values():
            p.grad = None
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            model(tokens, *others, head=CrossEntropyHead(tokens, tokens.numel() // 2)).backward()
    matmuls = sum(event.count for event in profiled.key_averages() if event.key in ("aten::mm", "aten::addmm"))
    return {name: p.grad for name, p in parameters.items()}, matmuls


def steps():
    return {
        (dtype, compiled): step(dtype, "full", compiled) for dtype in ("fp32", "bf16") for compiled in (False, True)
    }


def test_compiled_recomputation_and_cast_parameters_give_the_gradients_of_the_plain_model(ranks):
    model = reference(SIZES)
    tokens, *others = inputs(SIZES)
    model(tokens, *others, head=CrossEntropyHead(tokens, 1024)).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    (results,) = ranks(1).run(steps)
    for (dtype, _), (gradients, _) in results.items():
        assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
        deviation = (torch.cat([g.flatten() for g in gradients.values()]) - expected).norm() / expected.norm()
        assert deviation < (1e-5 if dtype == "fp32" else 3e-2)
        assert dtype == "fp32" or deviation > 1e-4
        rounded = {name for name, g in gradients.items() if torch.equal(g, g.bfloat16().float())}
        tables = {"tok_embeddings.weight", "output.weight"}  # not copied to bf16: their gradients are not rounded
        assert rounded == (gradients.keys() - tables if dtype == "bf16" else set())
    # A block has 7 in forward and 14 in backward, which repeats 6 of the 7, because it does not need the result of the last one.
    # The loss has 3 for each chunk.
    for _, matmuls in results.values():
        assert matmuls == 27 * SIZES.n_layers + 2 * 3

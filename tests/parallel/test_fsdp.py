"""FSDP: units, gathered sizes, resharding, prefetching, precision."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.llama import LlamaSizes
from tests.parallel.tiny_models import build_model
from trainer.base.config import ParallelConfig
from trainer.objective.cross_entropy import CrossEntropyHead

VOCAB, DIM = 512, 32
TABLE = VOCAB * DIM


def build(tied=False, dtype="fp32", **settings):
    sizes = LlamaSizes(
        dim=DIM, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=VOCAB, tied_embeddings=tied
    )
    return build_model(sizes, ParallelConfig(**settings), dtype=dtype)


def units(tied, fsdp_units):
    """Return the parameters of each unit, by the names of the modules that FSDP was given."""
    model = build(tied, fsdp_units=fsdp_units)
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for module in model.modules():
        group = isinstance(module, FSDPModule) and module._get_fsdp_state()._fsdp_param_group
        if group:
            unit = tuple(names[id(m)] for m in group.modules)
            found[unit] = sorted(
                f"{names[id(p._module_info.module)]}.{p._module_info.param_name}" for p in group.fsdp_params
            )
    return found


BLOCKS = [("layers.0",), ("layers.1",)]


def test_embedding_and_output_are_separate_units(ranks):
    found = ranks(2).run(units, False, "separate")[0]
    assert set(found) == {*BLOCKS, ("tok_embeddings",), ("norm", "output")}
    assert found["tok_embeddings",] == ["tok_embeddings.weight"]
    assert found["norm", "output"] == ["norm.weight", "output.weight"]
    assert len(found["layers.0",]) == 9


def test_tied_embeddings_are_one_unit_with_the_norm(ranks):
    found = ranks(2).run(units, True, "separate")[0]
    assert set(found) == {*BLOCKS, ("tok_embeddings", "norm", "output")}
    assert found["tok_embeddings", "norm", "output"] == ["norm.weight", "tok_embeddings.weight"]


def test_root_units_contain_embedding_and_output(ranks):
    found = ranks(2).run(units, False, "root")[0]
    assert set(found) == {*BLOCKS, ("",)}
    assert found["",] == ["norm.weight", "output.weight", "tok_embeddings.weight"]


class Gathers(TorchDispatchMode):
    """Number of elements of every all-gather."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allgather" in str(func):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def one_step(settings):
    """Return the sizes of all gathers of a step, the number of gathered elements during the first block, and the block's size."""
    model = build(**settings)
    gathered = []

    def record(*_):
        gathered.append(sum(p.numel() for p in model.parameters() if not isinstance(p, DTensor)))

    model.layers["0"].feed_forward.register_forward_hook(record)
    tokens = torch.arange(16)[None]
    labels = tokens + 1
    with Gathers() as gathers:
        model(tokens, head=CrossEntropyHead(labels, 1024)).backward()
    return gathers.sizes, gathered[0], sum(p.numel() for p in model.layers["0"].parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_the_largest_gather_is_one_table_and_the_final_norm(ranks, tied):
    sizes, gathered, block = ranks(2).run(one_step, {"tied": tied})[0]
    assert max(sizes) == TABLE + DIM
    # Untied tables are freed while the blocks compute. A tied table is used before and after the blocks.
    assert gathered == block + (TABLE + DIM if tied else 0)


def test_root_units_gather_both_tables_at_once_and_keep_them(ranks):
    sizes, gathered, block = ranks(2).run(one_step, {"fsdp_units": "root"})[0]
    assert max(sizes) == 2 * TABLE + DIM
    assert gathered == block + 2 * TABLE + DIM


@pytest.mark.parametrize(
    ("setting", "gathers"),
    # Forward: embedding, two blocks, output. Backward: all freed units, including the embedding, although its gradient needs
    # no values.
    [("default", 7), ("always", 8), ("never", 4), (2, 8)],
)
def test_resharding_determines_the_number_of_gathers(ranks, setting, gathers):
    sizes, _, _ = ranks(4).run(one_step, {"reshard_after_forward": setting})[0]
    assert len(sizes) == gathers


def precision(dtype):
    model = build(dtype=dtype)
    parameters = list(model.parameters())
    dtypes = {}
    model.layers["0"].attention.wq.register_forward_hook(
        lambda m, args, out: dtypes.update(wq=(args[0].dtype, out.dtype))
    )
    rope = []
    model.layers["0"].register_forward_pre_hook(lambda m, args: rope.append(args[1].rope.dtype))
    tokens = torch.arange(16)[None]
    model(tokens, head=CrossEntropyHead(tokens, 1024)).backward()
    return dtypes["wq"], rope[0], {p.dtype for p in parameters}, {p.grad.dtype for p in parameters}


@pytest.mark.parametrize("size", [1, 2])
def test_the_precision_policy_also_holds_on_one_rank(ranks, size):
    computed, rope, parameters, gradients = ranks(size).run(precision, "bf16")[0]
    assert computed == (torch.bfloat16, torch.bfloat16)
    assert rope == torch.float32  # bf16 cannot represent the angles of long positions
    assert parameters == gradients == {torch.float32}


def prefetched(settings, tied):
    """Return the names of the units that each unit prefetches in forward and in backward."""
    model = build(tied=tied, reshard_after_forward="always", **settings)
    names = {module: name for name, module in model.named_modules()}
    ahead = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            lists = state._states_to_forward_prefetch, state._states_to_backward_prefetch
            ahead[name] = tuple([names[s._modules[0]] for s in states] for states in lists)
    return ahead


def test_units_are_prefetched_in_the_order_of_forward_and_of_backward(ranks):
    ahead = ranks(2).run(prefetched, {"fsdp_prefetch": 2}, False)[0]
    assert ahead["tok_embeddings"] == (["layers.0", "layers.1"], [])
    assert ahead["layers.1"] == (["norm"], ["layers.0", "tok_embeddings"])
    assert ahead["norm"] == ([], ["layers.1", "layers.0"])
    tied = ranks(2).run(prefetched, {"fsdp_prefetch": 1}, True)[0]
    assert tied["tok_embeddings"] == (["layers.0"], [])
    assert tied["layers.1"] == ([], ["layers.0"])
    root = ranks(2).run(prefetched, {"fsdp_prefetch": 1, "fsdp_units": "root"}, False)[0]
    assert root[""] == (["layers.0"], [])


def policies():
    model = build(cpu_offload=True)
    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    return {type(group.offload_policy).__name__ for group in groups if group}


def test_cpu_offload_uses_fsdp_policy(ranks):
    assert ranks(2).run(policies)[0] == {"CPUOffloadPolicy"}

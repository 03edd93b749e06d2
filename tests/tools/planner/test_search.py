"""Layouts of a search and their ranking, with block costs that are given instead of simulated."""

from dataclasses import replace

import pytest

from trainer.base.config.load import load_config
from trainer.run.resolve import resolve
from trainer.runtime.accelerators import ACCELERATORS
from trainer.tools.planner.estimate import Hardware
from trainer.tools.planner.roofline import NETWORK_EFFICIENCY
from trainer.tools.planner.search import _BlockCost, _likely_speed, _shallow, candidates

HARDWARE = Hardware(8, replace(ACCELERATORS["NVIDIA H100 80GB HBM3"], gpus_per_node=4))


def layouts(*flags):
    return candidates(load_config(["--config", "train_configs/debug.toml", *flags]), HARDWARE)


def test_a_search_varies_ep_over_the_ranks_that_share_experts():
    found = layouts("--model.name", "mixtral", "--model.overrides.n_experts", "12")
    degrees = {(c.resolved.dims.pp, c.resolved.dims.ep) for c in found}
    assert degrees == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)}
    assert all(("ep" in c.settings["parallel"]) == (c.resolved.dims.ep > 1) for c in found)
    assert {c.resolved.dims.ep for c in layouts()} == {1}
    configured = layouts("--model.name", "mixtral", "--parallel.ep", "2")
    assert {c.settings["parallel"]["ep"] for c in configured} == {1, 2, 4, 8}


def test_the_likely_speed_counts_gathers_of_experts_and_rows_that_leave_a_node():
    bandwidth = HARDWARE.accelerator.inter_node_bandwidth * NETWORK_EFFICIENCY
    traffic = {
        ("efsdp", "all-gather"): 8 * bandwidth,
        ("efsdp", "reduce-scatter"): 4 * bandwidth,
        ("ep", "all-to-all"): bandwidth,
    }
    cost = _BlockCost(0.0, computing_s=1e-3, traffic=traffic, ep=2)
    found = {
        (c.resolved.dims.ep, c.config.training.reduce_every_microbatch): c
        for c in layouts("--model.name", "mixtral", "--training.local_batch_size", "2")
        if c.resolved.dims.tp == c.resolved.dims.pp == 1
    }
    tokens, blocks, microbatches = 32 * 128, 4, 2

    def seconds(ep, reduce_every):
        return tokens / _likely_speed(found[ep, reduce_every], cost, HARDWARE) / blocks

    # ep 2: four ranks, two on each node, gather half of the experts: both ranks of a node send.
    assert seconds(2, False) == pytest.approx((3 / 4) * (8 * microbatches + 4) / 2)
    assert seconds(2, True) == pytest.approx((3 / 4) * (8 + 4) * microbatches / 2)
    # ep 4: two ranks, one on each node, gather a quarter.
    assert seconds(4, False) == pytest.approx((1 / 2) * (8 * microbatches + 4) / 2)
    # ep 8: nothing is gathered, and half of the rows leave the node.
    assert seconds(8, False) == pytest.approx(microbatches * (1e-3 + 1 / 2))


@pytest.mark.parametrize("overrides", [(), ("--model.overrides.sparse_layers", "[false,true]")])
def test_a_shallow_model_has_experts_if_any_block_has(overrides):
    """The first layer of DeepSeek-V3 has none."""
    candidate = layouts("--model.name", "deepseek-v3" if not overrides else "qwen3-moe", *overrides)[-1]
    assert resolve(_shallow(candidate, 1, 8), 8).structure.has_experts

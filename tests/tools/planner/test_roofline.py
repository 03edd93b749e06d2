from types import SimpleNamespace

import pytest

from trainer.base.config import ParallelConfig
from trainer.runtime.accelerators import AcceleratorSpec
from trainer.tools.planner.recorded import Traffic
from trainer.tools.planner.roofline import (
    BANDWIDTH_EFFICIENCY,
    FLOPS_EFFICIENCY,
    NETWORK_EFFICIENCY,
    pipeline_bubble,
    step_time,
    wire_bytes,
)

ACCELERATOR = AcceleratorSpec(
    flops={"fp8": 200e12, "bf16": 100e12, "fp32": 10e12},
    memory_gib=80,
    memory_bandwidth=1e12,
    intra_node_bandwidth=100e9,
    inter_node_bandwidth=10e9,
    gpus_per_node=4,
    host_memory_gib=100,
    host_memory_bandwidth=50e9,
    pcie_bandwidth=20e9,
    source="",
)


def time_of(op_costs=None, traffic=None, groups=None, bubble=0.0, transfers=None, host_compute_bytes=0.0):
    counts = {"op_costs": op_costs or {}, "traffic": traffic or {}, "group_ranks": groups or {}}
    host = {"host_transfer_bytes": transfers or {}, "host_compute_bytes": host_compute_bytes}
    return step_time(SimpleNamespace(**counts, **host), ACCELERATOR, bubble)


def test_an_operator_is_bound_by_its_flops_or_its_bytes():
    time = time_of({("bf16", 100 * 10**12, 1000): 1, ("fp8", 100 * 10**12, 1000): 2, ("fp32", 0, 10**12): 3})
    assert time.matmuls_s == pytest.approx(2 / FLOPS_EFFICIENCY)
    assert time.memory_s == pytest.approx(3 / BANDWIDTH_EFFICIENCY)
    assert time.total_s == pytest.approx(time.matmuls_s + time.memory_s)
    assert time.bound == "memory bandwidth"


def test_bytes_on_the_wire():
    assert wire_bytes("all-gather", 800, 8) == 700
    assert wire_bytes("all-reduce", 800, 8) == 1400
    assert wire_bytes("send", 800, 8) == 800


def test_a_group_that_spans_nodes_shares_their_network():
    """8 ranks on two nodes of 4: 4 x 10 GB/s leave each node; one rank on each node: 10 GB/s."""
    gather = {("fsdp", "all-gather"): Traffic(count=1, num_bytes=8e9)}
    for ranks, bandwidth in ((range(4), 100e9), (range(8), 40e9), (range(0, 32, 4), 10e9)):
        sent = wire_bytes("all-gather", 8e9, len(ranks))
        time = time_of(traffic=gather, groups={"fsdp": list(ranks)})
        assert time.overlapped_comm_s == pytest.approx(sent / (bandwidth * NETWORK_EFFICIENCY))


def test_an_all_to_all_sends_only_the_bytes_for_other_nodes_over_the_network():
    """8 ranks on two nodes of 4: of 8 GB, 4 GB leave the node. On one node of 4: 3 of 4 parts leave the rank."""
    for ranks, seconds in ((range(8), 4e9 / 10e9), (range(4), 6e9 / 100e9), (range(0, 32, 4), 7e9 / 10e9)):
        traffic = {("ep", "all-to-all"): Traffic(count=4, num_bytes=8e9)}
        time = time_of(traffic=traffic, groups={"ep": list(ranks)})
        assert time.exposed_comm_s == pytest.approx(seconds / NETWORK_EFFICIENCY)


def test_overlapped_collectives_count_if_they_take_longer_than_the_computation():
    op_costs = {("bf16", 75 * 10**12, 0): 1}
    for num_bytes, total in ((8e9, 1.0), (8e11, 7 / 8 * 8e11 / (40e9 * NETWORK_EFFICIENCY))):
        time = time_of(
            op_costs, {("fsdp", "all-gather"): Traffic(count=1, num_bytes=num_bytes)}, {"fsdp": list(range(8))}
        )
        assert time.total_s == pytest.approx(total)
    assert time.bound == "collectives over fsdp"
    time = time_of(op_costs, {("tp", "all-gather"): Traffic(count=1, num_bytes=8e9)}, {"tp": [0, 1]})
    assert time.total_s == pytest.approx(1 + 4e9 / (100e9 * NETWORK_EFFICIENCY))


def test_pipeline_bubble():
    """Narayanan et al. 2021, section 2.2: (p - 1) / m of the ideal time, divided by the stages of a rank."""

    def bubble(pp, schedule, microbatches):
        return pipeline_bubble(ParallelConfig(pp=pp, pipeline_schedule=schedule), microbatches)

    assert bubble(4, "1F1B", 8) == pytest.approx((3 / 8) / (1 + 3 / 8))
    assert bubble(4, "Interleaved1F1B", 8) == pytest.approx((3 / 16) / (1 + 3 / 16))
    assert bubble(1, "1F1B", 1) == bubble(4, "ZBVZeroBubble", 8) == 0
    assert time_of({("bf16", 75 * 10**12, 0): 1}, bubble=0.5).total_s == pytest.approx(2)


def test_host_copies_overlap_with_the_step_but_the_host_update_follows_it():
    second = {("bf16", 75 * 10**12, 0): 1}
    assert time_of(second, transfers={False: 8e9}).total_s == pytest.approx(1)
    longer = time_of(second, transfers={False: 32e9})
    assert (longer.total_s, longer.bound) == (pytest.approx(2), "copies to and from host memory")
    after = time_of(second, transfers={True: 32e9}, host_compute_bytes=1e9)
    assert (after.total_s, after.bound) == (pytest.approx(3), "update in host memory")
    computed = time_of(second, transfers={True: 1e9}, host_compute_bytes=50e9 * BANDWIDTH_EFFICIENCY * 4)
    assert computed.total_s == pytest.approx(5)

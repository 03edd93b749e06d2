"""Margins, the description of the peak, and remedies, with simulations that are given instead of run."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from trainer.base.config.load import load_config
from trainer.base.config.schema.condition import Known
from trainer.base.config.schema.facts import FLOAT8_DEVICE, FLOAT8_GPU
from trainer.base.system.units import GIB
from trainer.run.resolve import resolve
from trainer.runtime.accelerators import ACCELERATORS
from trainer.tools.planner.estimate import Hardware, RunEstimate, margin_bytes
from trainer.tools.planner.peak import explain, place, remedies
from trainer.tools.planner.recorded import MEMORY_CATEGORIES, ExecutionPoint
from trainer.tools.planner.simulate import without_compiler

DEVICE = replace(ACCELERATORS["NVIDIA H100 80GB HBM3"], memory_gib=80)
GIVEN = ["--config", "train_configs/debug.toml"]


def estimate_of(flags, sizes_gib, module="output", in_backward=False, world_size=2):
    """Return the estimate of a run whose peak has these sizes in GiB."""
    config = load_config([*GIVEN, *flags])
    by_category = {c: int(sizes_gib.get(c, 0) * GIB) for c in MEMORY_CATEGORIES}
    peak = sum(by_category.values())
    point = ExecutionPoint(module, in_backward)
    costs = {"op_costs": {("bf16", 10**12, 1000): 1}, "traffic": {}, "group_ranks": {}}
    host = {"host_transfer_bytes": {}, "host_compute_bytes": 0.0, "host": 0}
    simulation = SimpleNamespace(rank=0, peak=peak, peak_at=point, by_category=by_category, **costs, **host)
    resolved = resolve(without_compiler(config), world_size)
    return RunEstimate(config, resolved, [simulation], Hardware(world_size, DEVICE, reserved_bytes=2 * GIB))


@pytest.mark.parametrize(
    ("flags", "is_gpu", "expected_gib"),
    [
        (["--activation_checkpoint.mode", "selective"], True, 8),
        (["--activation_checkpoint.mode", "none"], True, 8 + 10),
        (["--activation_checkpoint.mode", "none", "--compile.enabled", "false"], True, 8),
        (["--activation_checkpoint.mode", "none"], False, 8),
        (["--activation_checkpoint.mode", "none", "--compile.enabled", "true"], False, 8 + 10),
        (["--parallel.pp", "2", "--parallel.pipeline_schedule", "ZBVZeroBubble"], True, 8),
    ],
)
def test_the_margin_is_for_fragmentation_and_for_compiled_blocks_without_recomputation(flags, is_gpu, expected_gib):
    hardware = Hardware(2, DEVICE, is_gpu)
    assert margin_bytes(load_config([*GIVEN, *flags]), hardware, 60 * GIB) == pytest.approx(expected_gib * GIB)


@pytest.mark.parametrize(
    ("device", "has_them"),
    [("NVIDIA H100 80GB HBM3", True), ("NVIDIA A100-SXM4-80GB", False), ("AMD Instinct MI300X", False)],
)
def test_a_plan_knows_devices_with_products_in_float8(device, has_them):
    known = Hardware(1, ACCELERATORS[device]).facts()
    assert known[FLOAT8_DEVICE].holds == has_them and known[FLOAT8_DEVICE].detail.startswith(
        "h100, h100-pcie, h100-nvl, "
    )
    assert known[FLOAT8_GPU] == Known(True)


def test_runs_that_leave_the_margin_come_first_then_tight_ones_then_those_that_do_not_fit():
    eager = ["--compile.enabled", "false"]
    large, tight, fitting = (estimate_of(eager, {"activations": size}) for size in (79, 71, 69))
    slow = estimate_of([*eager, "--training.global_batch_size", "16"], {"activations": 69})
    assert [e.is_tight for e in (large, tight, fitting)] == [False, True, False]
    assert sorted([large, tight, slow, fitting], key=lambda e: e.sort_key) == [fitting, slow, tight, large]


def test_rates_are_those_of_the_largest_batch_and_the_duration_counts_samples():
    plain = estimate_of(["--training.global_batch_size", "64", "--training.steps", "40"], {})
    changing = estimate_of(["--training.batch_schedule.10", "64", "--training.steps", "40"], {})
    assert changing.resolved.grad_accum == plain.resolved.grad_accum == 8
    assert changing.tokens_per_second == plain.tokens_per_second
    assert changing.run_s == pytest.approx((10 * 32 / 64 + 30) * changing.slowest.total_s)
    assert changing.seconds_after(20) == plain.seconds_after(20)


@pytest.mark.parametrize(
    ("point", "words"),
    [
        (ExecutionPoint("output", True), "backward of the output with its loss"),
        (ExecutionPoint("layers.13.attention.wq", False), "forward of block 13"),
        (ExecutionPoint("norm", True), "backward of the last norm"),
        (ExecutionPoint("", False), "the update"),
        (ExecutionPoint("", False, in_schedule=True), "the pipeline's schedule, outside blocks"),
        (ExecutionPoint("", True), "the start of backward"),
    ],
)
def test_the_place_of_the_peak_is_named_in_words(point, words):
    assert place(point) == words


REASONS = {
    "the unsharded sum of gradients over 4 microbatches (30.00 GiB) and saved activations (20.00 GiB)": estimate_of(
        [], {"gradients": 30, "activations": 20, "parameters": 2, "temporaries": 1}
    ),
    "gradients (30.00 GiB), saved inputs of blocks (20.00 GiB) and parameters and optimizer state (18.00 GiB)": estimate_of(
        ["--training.reduce_every_microbatch", "true", "--activation_checkpoint.mode", "full"],
        {"gradients": 30, "activations": 20, "parameters": 6, "optimizer": 12},
    ),
    "saved activations of several microbatches (9.00 GiB)": estimate_of(["--parallel.pp", "2"], {"activations": 9}),
    "recomputed activations of the block (9.00 GiB)": estimate_of(
        ["--activation_checkpoint.mode", "full"], {"temporaries": 9}, "layers.3", in_backward=True
    ),
    "logits and other temporary tensors (9.00 GiB)": estimate_of([], {"temporaries": 9}),
    "parameters gathered for use (9.00 GiB)": estimate_of([], {"unsharded parameters": 9}),
    "buffers of collectives (9.00 GiB)": estimate_of([], {"communication": 9}),
}


@pytest.mark.parametrize("reasons", REASONS)
def test_the_peak_is_explained_by_its_large_parts(reasons):
    assert explain(REASONS[reasons]).endswith(f", because of {reasons}")


@pytest.mark.parametrize(
    ("flags", "sizes", "expected"),
    [
        ([], {"gradients": 30}, ["--training.reduce_every_microbatch true"]),
        (["--training.reduce_every_microbatch", "true"], {"gradients": 30}, []),
        (["--parallel.pp", "2"], {"gradients": 30}, []),
        (
            [],  # rows of 128 values cannot have 8-bit moments
            {"activations": 30, "optimizer": 10},
            ["--activation_checkpoint.mode selective", "--training.local_batch_size 2"],
        ),
        (["--model.overrides.dim", "256"], {"optimizer": 10}, ["--optimizer.state_dtype 8bit"]),
        (
            ["--activation_checkpoint.mode", "full", "--training.local_batch_size", "1"],
            {"activations": 30},
            ["--activation_checkpoint.offload_inputs true"],
        ),
        (["--optimizer.offload", "state"], {"optimizer": 30}, []),
    ],
)
def test_remedies_are_settings_with_which_the_run_can_start(flags, sizes, expected):
    assert remedies(estimate_of(flags, sizes)) == expected

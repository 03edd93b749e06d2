"""Simulated memory and traffic against real gloo ranks."""

import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

import trainer.tools.planner.simulate
from models import MODELS
from models.spec import meta_model
from tests.optim.test_offload import IN_BACKWARD
from trainer.base.config import ConfigError
from trainer.base.config.load import load_config
from trainer.objective.cross_entropy import CrossEntropyHead
from trainer.run.resolve import resolve
from trainer.tools.planner.patches import bound_loss_chunks
from trainer.tools.planner.recorder import Recorder
from trainer.tools.planner.roofline import wire_bytes
from trainer.tools.planner.simulate import Simulation, simulate
from trainer.tools.testing.allocations import measure

TWO_BLOCKS = [
    *("--config", "train_configs/debug.toml", "--training.seq_len", "128"),
    *("--training.local_batch_size", "2", "--model.overrides.dim", "256", "--model.overrides.n_layers", "2"),
]
"""A model large enough that scalars and the document masks do not matter."""
FOUR_BLOCKS = [*TWO_BLOCKS[:-1], "4"]

EIGHT = ["--training.global_batch_size", "8"]


def planned(size, *flags, ranks=(0,), on_gpu=False, model=TWO_BLOCKS, imbalance=0.0):
    config = load_config([*model, *flags])
    return simulate([(config, rank) for rank in ranks], size, on_gpu, imbalance)


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (1, ["--activation_checkpoint.mode", "selective"]),
        pytest.param(
            *(2, ["--training.compute_dtype", "bf16", "--training.float8", "tensorwise"]),
            marks=pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 cannot scale rows on a CPU"),
        ),
        (2, ["--training.reduce_every_microbatch", "true", "--activation_checkpoint.mode", "full"]),
        (2, ["--parallel.tp", "2", "--training.compute_dtype", "bf16"]),
        (2, ["--parallel.cp", "2"]),
        (2, ["--optimizer.name", "muon", "--optimizer.ema_decay", "0.9"]),
        (2, ["--parallel.pp", "2", "--data.document_mask", "true"]),
        (2, ["--model.name", "mixtral", "--parallel.ep", "2"]),
        (2, ["--model.name", "qwen3-next", "--parallel.ep", "2", "--parallel.cp", "2", "--data.document_mask", "true"]),
    ],
)
def test_the_simulated_peak_is_that_of_the_allocator(ranks, size, layout):
    argv = [*TWO_BLOCKS, *EIGHT, *layout]
    measured = ranks(size).run(measure, argv, 2)
    for plan in planned(size, *EIGHT, *layout, ranks=range(size)):
        real = measured[plan.rank]
        assert plan.peak == pytest.approx(real.total(), rel=0.03)
        for category, num_bytes in plan.by_category.items():
            limits = {"rel": 0.05, "abs": 0.03 * real.total()}
            assert num_bytes == pytest.approx(real[category], **limits), category


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_products_of_linear_modules_count_at_the_rate_of_float8(compiled):
    flags = [
        "--training.compute_dtype",
        "bf16",
        "--training.float8",
        "rowwise",
        "--compile.enabled",
        str(compiled).lower(),
    ]
    (plan,) = planned(2, *EIGHT, *flags, on_gpu=True)
    resolved = resolve(load_config([*TWO_BLOCKS, *EIGHT]), 2)
    parameters = meta_model(resolved.spec.model, resolved.sizes).named_parameters()
    weights = sum(p.numel() for name, p in parameters if name.startswith("layers.") and p.dim() == 2)
    flops = sum(flops * n for (precision, flops, _), n in plan.op_costs.items() if precision == "fp8")
    assert flops == 3 * 2 * weights * (8 * 128 // 2)  # the product and both gradients


def test_compiled_blocks_dequantize_a_matrix_in_one_kernel():
    """Without the compiler, several operators read and write fp32 values."""
    flags = ["--lora.rank", "4", "--lora.base_dtype", "nf4", "--checkpoint.init_from", ".", *EIGHT]
    flags += ["--training.compute_dtype", "bf16", "--model.overrides.hidden_dim", "384"]
    num_bytes = []
    for compiled in ("true", "false"):
        (plan,) = planned(1, *flags, "--compile.enabled", compiled, on_gpu=True)
        num_bytes.append(sum(count * moved for (_, _, moved), count in plan.op_costs.items()))
    resolved = resolve(load_config([*TWO_BLOCKS, *flags]), 1)
    model = meta_model(resolved.spec.model, resolved.sizes)
    values = sum(model.get_parameter(name).numel() for name in resolved.parameter_storage.quantized)
    fp32_values = 2 * resolved.grad_accum * values * 4  # in forward and in backward
    assert num_bytes[1] - num_bytes[0] > 4 * fp32_values


def test_microbatches_that_are_not_simulated_are_counted():
    three, four, seven = (planned(2, "--training.global_batch_size", str(4 * n))[0] for n in (3, 4, 7))
    assert seven.peak == four.peak

    def sum_of(plan):
        gathers = plan.traffic[("fsdp", "all-gather")]
        return gathers.count, gathers.num_bytes, plan.flops

    for a, b, c in zip(sum_of(three), sum_of(four), sum_of(seven), strict=True):
        assert c == pytest.approx(b + 3 * (b - a))


def recorded_loss(num_tokens, bounded):
    recorder = Recorder()
    bound = bound_loss_chunks(recorder) if bounded else nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True), bound:
        hidden, weight = (torch.empty(*shape, requires_grad=True) for shape in ((1, num_tokens, 8), (50, 8)))
        labels = torch.zeros(1, num_tokens, dtype=torch.int64)
        with recorder:
            CrossEntropyHead(labels, 4)(hidden, weight).backward()
    return recorder


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 12, 13, 40, 42])
def test_a_loss_of_three_simulated_chunks_costs_as_much_as_the_complete_one(num_tokens):
    complete, partial = (recorded_loss(num_tokens, bounded) for bounded in (False, True))
    assert partial.op_costs == complete.op_costs and partial.weight == 1
    peaks = [recorder.timeline(lambda _: True).sum(axis=0).max() for recorder in (complete, partial)]
    three_chunks = recorded_loss(8 + (num_tokens % 4 or 4), False)  # with the same last one
    assert peaks[0] == peaks[1] and partial.num_events <= three_chunks.num_events


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_a_partly_simulated_pipeline_equals_the_complete_one(schedule):
    """Only the tokens themselves differ."""
    flags = ["--parallel.pp", "2", "--parallel.pipeline_schedule", schedule, "--training.global_batch_size", "16"]
    partial = planned(2, *flags, ranks=(0, 1), model=FOUR_BLOCKS)
    # In new processes, as simulate() does it.
    with ProcessPoolExecutor(2, multiprocessing.get_context("forkserver"), max_tasks_per_child=1) as pool:
        complete = list(pool.map(complete_pipeline, 2 * [[*FOUR_BLOCKS, *flags]], (0, 1)))
    for a, b in zip(partial, complete, strict=True):
        # Since torch 2.15, the plan is an upper bound.
        assert b.peak * 0.995 <= a.peak <= b.peak * (1.025 if torch.__version__ >= (2, 15) else 1.005)
        assert a.flops == pytest.approx(b.flops)
        for key, calls in b.traffic.items():
            assert a.traffic[key].num_bytes == pytest.approx(calls.num_bytes, abs=100), key


def complete_pipeline(argv, rank) -> Simulation:
    """Simulate all eight microbatches."""
    with mock.patch.object(trainer.tools.planner.simulate, "_num_simulated", lambda config, resolved: 8):
        return trainer.tools.planner.simulate._simulate((load_config(argv), rank), world_size=2, on_gpu=False)


class EndsItsProcess:
    def __reduce__(self):
        return os._exit, (1,)


def test_a_simulation_whose_process_is_killed_is_one_line():
    with pytest.raises(ConfigError, match=r"^a process that simulates a rank was killed, possibly for lack of memory$"):
        simulate([(EndsItsProcess(), 0)], 2, on_gpu=False)


def test_traffic_is_recorded_by_axis():
    (plan,) = planned(4, *EIGHT, "--parallel.tp", "2")
    parameters = sum(a * b for a, b in ((2048, 256), (2048, 256)))  # embedding and output alone
    gathered = plan.traffic[("fsdp", "all-gather")]
    assert gathered.num_bytes > 2 * 4 * parameters / 2  # two microbatches, half of the rows on this tp rank
    assert {axis for axis, _ in plan.traffic} >= {"fsdp", "tp"}
    assert plan.group_ranks["tp"] == [0, 1] and plan.group_ranks["fsdp"] == [0, 2]


@pytest.mark.parametrize("imbalance", [0.0, 0.5])
def test_products_and_traffic_of_experts_are_those_of_the_formula(imbalance):
    """One layer on four ranks: ep 2, and two ranks shard the experts of each."""
    sizes, tokens, local = MODELS["mixtral"].by_size["debug"], 2 * 128, 4
    flags = ["--model.name", "mixtral", "--parallel.ep", "2", "--model.overrides.n_layers", "1"]
    (plan,) = planned(4, *EIGHT, *flags, model=TWO_BLOCKS[:-2], imbalance=imbalance)
    sent, matrix = tokens * sizes.experts_per_token, 256 * sizes.hidden_dim
    received = sent * (1 + imbalance)
    # Three products forward and six backward of rows, matrices and the number of each expert's rows.
    num_bytes = 4 * (received * (256 + sizes.hidden_dim) + local * matrix) + 8 * local
    assert plan.op_costs[("fp32", 2 * received * matrix, num_bytes)] == 9
    # Rows and results, forward and backward, and once the numbers of rows.
    exchanged = plan.traffic[("ep", "all-to-all")]
    assert exchanged.count == 5
    assert exchanged.num_bytes == 4 * 4 * 256 * received + 8 * sizes.n_experts
    # The experts of an ep rank are gathered for forward and for backward.
    assert plan.traffic[("efsdp", "all-gather")].num_bytes == 2 * local * 3 * matrix * 4
    assert plan.traffic[("efsdp", "reduce-scatter")].num_bytes == local * 3 * matrix * 4
    others = sum(p.numel() for n, p in meta_model(*one_layer()).named_parameters() if ".experts." not in n)
    assert plan.traffic[("fsdp", "reduce-scatter")].num_bytes == 4 * others


def test_a_recurrence_sends_the_same_over_cp_whatever_the_length_of_the_sequence():
    model = ["--model.name", "qwen3.5", "--model.overrides.n_layers", "1", "--parallel.cp", "4"]
    sent = {}
    for length, kind in itertools.product((4096, 1 << 20), ("linear", "full")):
        flags = ["--training.seq_len", str(length), "--model.overrides.layer_types", f'["{kind}"]']
        (plan,) = planned(4, *EIGHT, *flags, model=model)
        sent[length, kind] = {key: calls.num_bytes for key, calls in plan.traffic.items() if key[0] == "cp"}
    assert sent[4096, "linear"] == sent[1 << 20, "linear"] and sum(sent[4096, "linear"].values()) > 0
    assert sum(sent[1 << 20, "full"].values()) > 200 * sum(sent[4096, "full"].values())


def test_muon_sends_every_matrix_to_its_owner_and_back():
    """Two ranks hold half of each matrix and own half of them, so each sends a quarter of all values there, and back."""
    flags = [*EIGHT, "--optimizer.name", "muon"]
    (plan,) = planned(2, *flags)
    config = load_config([*TWO_BLOCKS, *flags])
    groups = resolve(config, 2).optimizer.groups
    values = sum(group.num_values for group in groups if group.rule == "muon")
    exchanged = plan.traffic[("stage", "all-to-all")]
    assert exchanged.count == 2
    assert wire_bytes("all-to-all", exchanged.num_bytes, 2) == 2 * 4 * values / 4


def one_layer():
    spec = MODELS["mixtral"]
    return spec.model, replace(spec.by_size["debug"], dim=256, n_layers=1)


def test_the_busiest_rank_of_ep_needs_memory_for_its_rows():
    flags = [*EIGHT, "--model.name", "mixtral", "--parallel.ep", "2"]
    plans = [planned(2, *flags, imbalance=x)[0] for x in (0.0, 0.5, 2.0)]
    # ep and fsdp have the same ranks.
    sent = [plan.traffic[("ep", "all-to-all")].num_bytes for plan in plans]
    assert sent == sorted(sent) and ("fsdp", "all-to-all") not in plans[0].traffic
    even, busy, all_rows = (max(plan.timeline["activations"]) for plan in plans)
    assert busy - even > 2 * 2 * 128 * 256 * 4  # in each of two blocks, one tensor of 256 more rows
    assert all_rows - even == pytest.approx(2 * (busy - even), rel=0.01)  # one of two ranks gets at most all rows


def test_a_gpu_saves_less_for_backward_of_a_norm():
    bf16 = ["--training.compute_dtype", "bf16"]
    on_cpu, on_gpu = (planned(1, *EIGHT, *bf16, on_gpu=on_gpu)[0] for on_gpu in (False, True))
    assert on_gpu.by_category["activations"] < 0.9 * on_cpu.by_category["activations"]


def test_offloaded_parameters_are_in_host_memory():
    variants = ([], ["--parallel.cpu_offload", "true"])
    plain, offloaded = (planned(2, *EIGHT, *flags, on_gpu=True)[0] for flags in variants)
    assert plain.host == 0
    state = plain.by_category["parameters"] + plain.by_category["optimizer"]
    assert offloaded.by_category["parameters"] == offloaded.by_category["optimizer"] == 0
    assert offloaded.host >= state
    assert offloaded.peak < plain.peak - 0.9 * state


def test_host_transfers_and_host_computation_are_counted():
    """Gradients to the host and parameters back, 4 bytes each; block inputs to the host and back, in each of two microbatches."""
    plain = planned(2, *EIGHT, on_gpu=True)[0]
    assert plain.host_transfer_bytes == {} and plain.host_compute_bytes == 0
    shards = plain.by_category["parameters"]
    late, early, inputs = (
        planned(2, *EIGHT, *flags, on_gpu=True)[0]
        for flags in (
            ["--optimizer.offload", "state"],
            ["--optimizer.offload", "state_and_gradients"],
            ["--activation_checkpoint.mode", "full", "--activation_checkpoint.offload_inputs", "true"],
        )
    )
    near = {"rel": 0.02}  # shards are counted in multiples of 512 bytes
    assert late.host_transfer_bytes == {True: pytest.approx(2 * shards, **near)}
    assert early.host_transfer_bytes == {False: pytest.approx(shards, **near), True: pytest.approx(shards, **near)}
    # The operator reads and writes parameter, gradient and two moments.
    assert late.host_compute_bytes == pytest.approx(8 * shards, **near)
    assert early.host_compute_bytes == pytest.approx(8 * shards, **near)
    hidden = 2 * 128 * 256 * 4
    assert inputs.host_transfer_bytes == {False: 2 * 2 * 2 * hidden}
    assert inputs.host == 2 * hidden
    full = planned(2, *EIGHT, "--activation_checkpoint.mode", "full", on_gpu=True)[0]
    assert max(inputs.timeline["activations"]) <= max(full.timeline["activations"]) - hidden


def test_an_update_in_backward_never_holds_all_gradients():
    common = [*IN_BACKWARD, "--training.global_batch_size", "2", "--activation_checkpoint.mode", "full"]
    common += ["--training.loss_chunk_tokens", "32"]
    after, within = (
        planned(1, *common, *flags, model=FOUR_BLOCKS)[0] for flags in ([], ["--optimizer.in_backward", "true"])
    )
    assert max(after.timeline["gradients"]) == after.by_category["parameters"]
    assert within.peak < after.peak - 0.5 * after.by_category["parameters"]


@pytest.mark.parametrize(
    "offload", [["--optimizer.offload", "state_and_gradients"], ["--parallel.cpu_offload", "true"]]
)
def test_work_that_a_pipeline_does_once_a_step_is_counted_once(offload):
    """Fewer than 24 microbatches are simulated."""
    flags = ["--parallel.pp", "2", *offload]
    short, long = (planned(2, *flags, "--training.global_batch_size", str(n), on_gpu=True)[0] for n in (8, 48))
    assert short.host_compute_bytes == pytest.approx(long.host_compute_bytes)
    assert short.host_transfer_bytes == pytest.approx(long.host_transfer_bytes)


def test_the_timeline_contains_the_peak():
    (plan,) = planned(2, *EIGHT)
    total = [sum(column) for column in zip(*plan.timeline.values(), strict=True)]
    assert max(total) == plan.peak and len(total) == len(plan.timeline_in_backward) <= 2000
    peak = total.index(plan.peak)
    assert {category: row[peak] for category, row in plan.timeline.items()} == plan.by_category
    assert plan.timeline_in_backward[peak] == plan.peak_at.in_backward


def test_the_timeline_has_one_backward_per_simulated_microbatch():
    for microbatches in (1, 2, 4):
        (plan,) = planned(2, "--training.global_batch_size", str(4 * microbatches))
        backward = plan.timeline_in_backward
        assert sum(now and not before for before, now in itertools.pairwise([False, *backward])) == microbatches

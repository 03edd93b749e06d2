"""A plan against the truth: what the allocator of real ranks does, and what they send."""

import pickle
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.optim.test_offload import IN_BACKWARD
from trainer.config.load import load_config
from trainer.planning.simulate import simulate
from trainer.testing.allocations import measure

MODEL = [
    *("--config", "train_configs/debug.toml", "--training.seq_len", "128"),
    *("--training.local_batch_size", "2", "--model.overrides.dim", "256", "--model.overrides.n_layers", "4"),
]
"""Large enough that scalars and the tables of documents do not matter."""


EIGHT = ["--training.global_batch_size", "8"]


def planned(size, *more, ranks=(0,), on_gpu=False):
    config = load_config([*MODEL, *more])
    return simulate([(config, rank) for rank in ranks], size, on_gpu)


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (1, ["--activation_checkpoint.mode", "selective"]),
        (2, ["--training.compute_dtype", "bf16"]),
        (2, ["--training.reduce_every_microbatch", "true", "--activation_checkpoint.mode", "full"]),
        (2, ["--parallel.tp", "2", "--training.compute_dtype", "bf16"]),
        (2, ["--parallel.cp", "2"]),
        (2, ["--parallel.pp", "2", "--data.document_mask", "true"]),
    ],
)
def test_the_peak_is_the_allocators(ranks, size, layout):
    measured = ranks(size).run(measure, [*MODEL, *EIGHT, *layout], 8)
    for plan in planned(size, *EIGHT, *layout, ranks=range(size)):
        real = measured[plan.rank]
        assert plan.peak == pytest.approx(real.peak, rel=0.03)
        for kind, bytes_planned in plan.by_kind.items():
            assert bytes_planned == pytest.approx(real.by_kind.get(kind, 0), rel=0.05, abs=0.03 * real.peak), kind


def test_microbatches_that_are_alike_are_counted_as_often_as_there_are():
    three, four, seven = (planned(2, "--training.global_batch_size", str(4 * n))[0] for n in (3, 4, 7))
    assert seven.peak == four.peak

    def sum_of(plan):
        gathers = plan.traffic[("fsdp", "all-gather")]
        flops = sum(flops * count for (_, flops, _), count in plan.work.items())
        return gathers.count, gathers.size, flops

    for a, b, c in zip(sum_of(three), sum_of(four), sum_of(seven), strict=True):
        assert c == pytest.approx(b + 3 * (b - a))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_a_pipeline_that_is_filled_is_not_run_to_its_end(schedule):
    """It is as the whole of it, but for the tokens themselves."""
    words = ["--parallel.pp", "2", "--parallel.pipeline_schedule", schedule, "--training.global_batch_size", "24"]
    short = planned(2, *words, ranks=(0, 1))
    whole = [whole_pipeline([*MODEL, *words], rank) for rank in (0, 1)]
    for one, other in zip(short, whole, strict=True):
        assert one.peak == pytest.approx(other.peak, rel=5e-3)
        flops = [sum(flops * count for (_, flops, _), count in plan.work.items()) for plan in (one, other)]
        assert flops[0] == pytest.approx(flops[1])
        for key, seen in other.traffic.items():
            assert one.traffic[key].size == pytest.approx(seen.size, abs=100), key


def whole_pipeline(argv, rank):
    program = (
        "import pickle, sys; from trainer import simulate; from trainer.load_config import load_config\n"
        "simulate._shown = lambda config, setup: 12\n"
        "plan = simulate._simulate((load_config(sys.argv[2:]), int(sys.argv[1])), world_size=2, on_gpu=False)\n"
        "sys.stdout.buffer.write(pickle.dumps(plan))"
    )
    command = [sys.executable, "-c", program, str(rank), *argv]
    return pickle.loads(subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout)


def test_collectives_are_told_by_axis():
    (plan,) = planned(4, *EIGHT, "--parallel.tp", "2")
    parameters = sum(a * b for a, b in ((2048, 256), (2048, 256)))  # embedding and output alone
    gathered = plan.traffic[("fsdp", "all-gather")]
    assert gathered.size > 2 * 4 * parameters / 2  # of every microbatch, this tp rank's half
    assert {axis for axis, _ in plan.traffic} >= {"fsdp", "tp"}
    assert plan.group_ranks["tp"] == [0, 1] and plan.group_ranks["fsdp"] == [0, 2]


def test_a_gpu_keeps_less_of_a_norm():
    bf16 = ["--training.compute_dtype", "bf16"]
    on_cpu, on_gpu = (planned(1, *EIGHT, *bf16, on_gpu=on_gpu)[0] for on_gpu in (False, True))
    assert on_gpu.by_kind["activations"] < 0.9 * on_cpu.by_kind["activations"]


def test_offloaded_parameters_are_in_host_memory():
    more = ["--parallel.cpu_offload", "true"]
    kept, offloaded = (planned(2, *EIGHT, *m, on_gpu=True)[0] for m in ([], more))
    assert kept.host == 0
    state = kept.by_kind["parameters"] + kept.by_kind["optimizer"]
    assert offloaded.by_kind["parameters"] == offloaded.by_kind["optimizer"] == 0
    assert offloaded.host >= state
    assert offloaded.peak < kept.peak - 0.9 * state


def test_what_goes_to_host_memory_and_comes_back_is_counted():
    """Gradients there and parameters back, 4 bytes each; inputs of blocks there and back, in each of two microbatches."""
    plain = planned(2, *EIGHT, on_gpu=True)[0]
    assert plain.host_moved == {} and plain.host_work == 0
    shards = plain.by_kind["parameters"]
    late, early, inputs = (
        planned(2, *EIGHT, *more, on_gpu=True)[0]
        for more in (
            ["--optimizer.offload", "state"],
            ["--optimizer.offload", "state_and_gradients"],
            ["--activation_checkpoint.mode", "full", "--activation_checkpoint.offload_inputs", "true"],
        )
    )
    near = {"rel": 0.02}  # shards are counted in multiples of 512 bytes
    assert late.host_moved == {True: pytest.approx(2 * shards, **near)}
    assert early.host_moved == {False: pytest.approx(shards, **near), True: pytest.approx(shards, **near)}
    # Parameter, gradient and two averages are read and, as the operator has it, written; to clip, the gradient once more.
    assert late.host_work == pytest.approx(8 * shards, **near)
    assert early.host_work == pytest.approx(10 * shards, **near)
    hidden = 2 * 128 * 256 * 4
    assert inputs.host_moved == {False: 2 * 4 * 2 * hidden}
    assert inputs.host == 4 * hidden
    kept = planned(2, *EIGHT, "--activation_checkpoint.mode", "full", on_gpu=True)[0]
    assert max(inputs.course["activations"]) <= max(kept.course["activations"]) - 3 * hidden


def test_an_update_in_backward_never_has_all_gradients():
    more = [*IN_BACKWARD, "--training.global_batch_size", "2", "--activation_checkpoint.mode", "full"]
    after, within = (planned(1, *more, *m)[0] for m in ([], ["--optimizer.in_backward", "true"]))
    assert max(after.course["gradients"]) == after.by_kind["parameters"]
    assert within.peak < after.peak - 0.5 * after.by_kind["parameters"]


@pytest.mark.parametrize("more", [["--optimizer.offload", "state_and_gradients"], ["--parallel.cpu_offload", "true"]])
def test_what_a_pipeline_does_once_a_step_is_counted_once(more):
    """Of 24 microbatches fewer are run, and count for all."""
    words = ["--parallel.pp", "2", *more]
    short, long = (planned(2, *words, "--training.global_batch_size", str(n), on_gpu=True)[0] for n in (8, 48))
    assert short.host_work == pytest.approx(long.host_work) and short.host_moved == pytest.approx(long.host_moved)


def test_the_course_of_memory_leads_to_the_peak():
    (plan,) = planned(2, *EIGHT)
    together = [sum(sizes) for sizes in zip(*plan.course.values(), strict=True)]
    assert max(together) == plan.peak and len(together) == len(plan.course_in_backward) <= 2000
    at = together.index(plan.peak)
    assert {kind: sizes[at] for kind, sizes in plan.course.items()} == plan.by_kind
    assert plan.course_in_backward[at] == plan.at.in_backward

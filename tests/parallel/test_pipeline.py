"""Pipeline parallelism: the partition into stages, and the schedules."""

import math
import typing
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from models.llama import LlamaSizes, llama
from tests.parallel.tiny_models import build_model_parts, inputs, reference
from trainer.base.config import ConfigError, ParallelConfig
from trainer.base.config.fields import settings
from trainer.batch import Batch
from trainer.objective.cross_entropy import CrossEntropy, CrossEntropyHead
from trainer.parallel.pipeline import PipelineStep
from trainer.parallel.stages import (
    SCHEDULES,
    _balance_stages,
    check_microbatches,
    partition_blocks,
    peer_of_table,
    share_table,
    stages_of_rank,
)
from trainer.runtime.step_timer import StepTimer

SIZES = LlamaSizes(dim=16, n_layers=8, n_heads=4, n_kv_heads=2, hidden_dim=32, vocab_size=64)


def partition(sizes=SIZES, **config):
    with torch.device("meta"):
        model = llama(sizes)
    return partition_blocks(model, model.structure(), ParallelConfig(**config))


def test_schedules_are_the_values_of_the_setting():
    assert typing.get_args(settings()["parallel.pipeline_schedule"].type) == tuple(SCHEDULES)


def test_stage_balance_counts_embedding_and_output():
    big_tables = LlamaSizes(dim=16, n_layers=8, n_heads=4, n_kv_heads=2, hidden_dim=32, vocab_size=350)
    assert [len(stage.blocks) for stage in partition(pp=4)] == [2, 2, 2, 2]
    assert [len(stage.blocks) for stage in partition(big_tables, pp=4)] == [1, 3, 3, 1]


@pytest.mark.parametrize(
    ("weights", "pre", "post", "count"),
    [([1] * 5, 0, 0, 2), ([1] * 8, 3, 3, 4), ([1] * 8, 100, 0, 3), ([5, 1, 1, 1, 5], 0, 2, 3), ([1] * 4, 0, 0, 4)],
)
def test_no_partition_has_a_lighter_heaviest_stage(weights, pre, post, count):
    def heaviest(starts):
        ends = [*starts[1:], len(weights)]
        sums = [sum(weights[a:b]) for a, b in zip(starts, ends, strict=True)]
        sums[0] += pre
        sums[-1] += post
        return max(sums)

    def all_partitions(start, num_stages):
        if num_stages == 1:
            yield (start,)
            return
        for end in range(start + 1, len(weights) - num_stages + 2):
            yield from ((start, *rest) for rest in all_partitions(end, num_stages - 1))

    starts = _balance_stages([weights[0] + pre, *weights[1:-1], weights[-1] + post], count)
    assert len(starts) == count
    assert heaviest(starts) == min(map(heaviest, all_partitions(0, count)))


def test_stages_start_at_the_split_points():
    config = {"pp": 2, "pipeline_split_points": ("layers.3",)}
    assert [stage.blocks for stage in partition(**config)] == [range(3), range(3, 8)]


ERRORS = {
    ("pp", 16, ()): "parallel.pp: makes 16 stages (16 ranks x 1 per rank), but the model has only 8 blocks",
    (
        "split",
        2,
        ("layers.8",),
    ): "parallel.pipeline_split_points: layers.8 is not a block; expected layers.1 to layers.7",
    ("split", 2, ("layers.1", "layers.2")): ("parallel.pipeline_split_points: 2 stages need 1 split points, not 2"),
    ("split", 3, ("layers.4", "layers.2")): (
        "parallel.pipeline_split_points: must be in ascending order and must not contain the first block, layers.0"
    ),
    (
        "split",
        2,
        ("layers.0",),
    ): "parallel.pipeline_split_points: must be in ascending order and must not contain the first block, layers.0",
}


@pytest.mark.parametrize("case", ERRORS, ids=str)
def test_an_impossible_partition_is_an_error(case):
    _, pp, split = case
    with pytest.raises(ConfigError) as error:
        partition(pp=pp, pipeline_split_points=split)
    assert str(error.value) == ERRORS[case]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_every_stage_is_held_by_one_rank(name, pp):
    config = ParallelConfig(pp=pp, pipeline_schedule=name)
    stages = partition(pp=pp, pipeline_schedule=name)
    by_rank = [stages_of_rank(stages, rank, config) for rank in range(pp)]
    assert sorted(stage.index for rank_stages in by_rank for stage in rank_stages) == list(range(len(stages)))
    if SCHEDULES[name].v_shape:
        assert (by_rank[0][0].index, by_rank[0][1].index) == (0, len(stages) - 1)


def parameter_names(schedule):
    model_parts, _ = build_model_parts(SIZES, ParallelConfig(pp=2, pipeline_schedule=schedule))
    return [[name for name, _ in part.named_parameters()] for part in model_parts.values()]


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_stages_keep_parameter_names_and_hold_each_parameter_once(ranks, schedule):
    names = [name for rank in ranks(2).run(parameter_names, schedule) for part in rank for name in part]
    assert sorted(names) == sorted(name for name, _ in reference(SIZES).named_parameters())


def build_step(name, pp, microbatches):
    """Return a step with torch's schedule for this number of microbatches."""
    model_parts, meshes = build_model_parts(SIZES, ParallelConfig(pp=pp, pipeline_schedule=name))
    return PipelineStep(
        model_parts=model_parts,
        schedule_name=name,
        num_microbatches=microbatches,
        hidden=torch.empty(1, 16, SIZES.dim, requires_grad=True),
        objective=CrossEntropy(64, compiled=False),
        shard_sequence=lambda batch: batch,
        pipeline_group=meshes.model["pp"].get_group(),
        timer=StepTimer(torch.device("cpu")),
        batch_group=meshes.data["batch"].get_group(),
        loss_group=meshes.loss["loss"].get_group(),
    )


def accepted_microbatches(name, pp, maximum):
    """Return the numbers of microbatches that are accepted. Each of them must run with the loss of the full model, also if the
    step before had another number, and in an evaluation between two steps, after which no parameter stays gathered."""
    tokens, context = inputs(SIZES, batch=1)
    batch = Batch(tokens, tokens.roll(-1, 1), context.positions, context.documents, context.samples)
    expected = reference(SIZES)(tokens, context, head=CrossEntropyHead(batch.labels, 64)).item()
    accepted, step = [], build_step(name, pp, maximum - maximum % pp)
    for microbatches in range(maximum, 0, -1):
        try:
            check_microbatches(ParallelConfig(pp=pp, pipeline_schedule=name), microbatches)
        except ConfigError:
            continue
        losses = [step([batch] * microbatches, torch.tensor(16 * microbatches))["loss"] for _ in range(2)]
        evaluated = step.evaluate([batch], step.objective)
        assert all(isinstance(p, DTensor) for part in step.model_parts.values() for p in part.parameters())
        losses.append(step([batch] * microbatches, torch.tensor(16 * microbatches))["loss"])
        torch.testing.assert_close(torch.stack(losses) * 16, torch.full((3,), expected))
        assert (evaluated.sums["loss"].item(), evaluated.num_terms.item()) == (pytest.approx(expected, rel=1e-6), 16)
        accepted.append(microbatches)
    return accepted[::-1]


def rejected_by_torch(name, pp, microbatches):
    try:
        build_step(name, pp, microbatches)
    except ValueError:
        return True
    return False


EXPECTED = {
    "GPipe": [2, 3, 4, 5],
    "1F1B": [2, 3, 4, 5],
    "LoopedBFS": [2, 3, 4, 5],
    "Interleaved1F1B": [2, 3, 4],
    "InterleavedZeroBubble": [2, 3, 4],
    "ZBVZeroBubble": [2, 3, 4, 5],
    "DualPipeV": [4, 5],
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 cannot run some")
def test_accepted_microbatches_run_and_evaluate_between_steps(ranks, name):
    assert ranks(2).run(accepted_microbatches, name, 2, 5)[0] == EXPECTED[name]


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 cannot run some")
@pytest.mark.parametrize(
    ("name", "microbatches"), [("1F1B", 1), ("Interleaved1F1B", 5), ("InterleavedZeroBubble", 5), ("DualPipeV", 3)]
)
def test_torch_also_rejects_the_rejected_microbatches(ranks, name, microbatches):
    assert ranks(2).run(rejected_by_torch, name, 2, microbatches) == [True, True]


TIED = replace(SIZES, tied_embeddings=True)


def tied_tables(schedule, degrees):
    """Run a step. Return this rank's tables, their gradients, and the deviation of the gradient from that of the full model."""
    config = ParallelConfig(**{"dp_shard": 1, "pipeline_schedule": schedule} | degrees)
    model_parts, meshes = build_model_parts(TIED, config)
    structure = reference(TIED).structure()
    share_table(model_parts, structure)
    parameters = {name: p for part in model_parts.values() for name, p in part.named_parameters()}
    peer = peer_of_table(model_parts, config)
    tokens, context = inputs(TIED, batch=1)
    batch = Batch(tokens, tokens.roll(-1, 1), context.positions, context.documents, context.samples)
    step = PipelineStep(
        model_parts=model_parts,
        schedule_name=schedule,
        num_microbatches=4 * config.pp,
        hidden=torch.empty(1, 16 // config.tp, TIED.dim, requires_grad=True),
        objective=CrossEntropy(64, compiled=False),
        shard_sequence=lambda batch: batch,
        pipeline_group=meshes.model["pp"].get_group(),
        table=None if peer is None else parameters["tok_embeddings.weight"],
        peer_of_table=peer,
        timer=StepTimer(torch.device("cpu")),
        batch_group=meshes.data["batch"].get_group(),
        loss_group=meshes.loss["loss"].get_group(),
    )
    step([batch] * 4 * config.pp, torch.tensor(16 * 4 * config.pp * config.dp_shard))
    if (table := parameters.get("tok_embeddings.weight")) is None:
        return None
    full = reference(TIED)
    full(tokens, context, head=CrossEntropyHead(batch.labels, 64)).backward()
    expected = full.tok_embeddings.weight.grad / 16
    gradient = table.grad.full_tensor()
    return table.full_tensor().tolist(), gradient.tolist(), ((gradient - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("degrees", [{"pp": 2}, {"pp": 4}, {"pp": 2, "dp_shard": 2}, {"pp": 2, "tp": 2}], ids=str)
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 cannot run some")
def test_both_stages_of_a_tied_table_get_the_gradient_of_the_full_model(ranks, schedule, degrees):
    size = math.prod(degrees.values())
    tables = [found for found in ranks(size).run(tied_tables, schedule, degrees) if found is not None]
    holders = 1 if SCHEDULES[schedule].v_shape else 2
    assert len(tables) == holders * size // degrees["pp"]
    for table, gradient, deviation in tables:
        assert deviation < 1e-5
        assert (table, gradient) == tables[0][:2]  # equal bits

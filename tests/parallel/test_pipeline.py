"""Where a network is cut into stages, and what the stages keep."""

import typing

import pytest
import torch
from torch.distributed.tensor import DTensor

from models.llama.model import Llama
from models.llama.plan import plan
from models.llama.sizes import LlamaSizes
from tests.parallel.tiny_models import inputs, parts, reference
from trainer.batch import Batch
from trainer.config import ConfigError, ParallelConfig
from trainer.config.fields import settings
from trainer.loss import CrossEntropyHead
from trainer.parallel.pipeline import (
    SCHEDULES,
    PipelineStep,
    _balance_stages,
    check_microbatches,
    partition_blocks,
    stages_of_rank,
)

SIZES = LlamaSizes(dim=16, n_layers=8, n_heads=4, n_kv_heads=2, hidden_dim=32, vocab_size=64)


def cut(sizes=SIZES, **config):
    with torch.device("meta"):
        model = Llama(sizes)
    return partition_blocks(model, plan(sizes), ParallelConfig(**config))


def test_the_settings_name_the_schedules_that_there_are():
    assert typing.get_args(settings()["parallel"]["pipeline_schedule"].type) == tuple(SCHEDULES)


def test_embedding_and_output_count_in_the_balance():
    big_tables = LlamaSizes(dim=16, n_layers=8, n_heads=4, n_kv_heads=2, hidden_dim=32, vocab_size=350)
    assert [len(stage.blocks) for stage in cut(pp=4)] == [2, 2, 2, 2]
    assert [len(stage.blocks) for stage in cut(big_tables, pp=4)] == [1, 3, 3, 1]


@pytest.mark.parametrize(
    ("weights", "before", "after", "count"),
    [([1] * 5, 0, 0, 2), ([1] * 8, 3, 3, 4), ([1] * 8, 100, 0, 3), ([5, 1, 1, 1, 5], 0, 2, 3), ([1] * 4, 0, 0, 4)],
)
def test_no_other_cut_has_a_lighter_heaviest_stage(weights, before, after, count):
    def heaviest(starts):
        ends = [*starts[1:], len(weights)]
        sums = [sum(weights[a:b]) for a, b in zip(starts, ends, strict=True)]
        sums[0] += before
        sums[-1] += after
        return max(sums)

    def all_cuts(first, left):
        if left == 1:
            yield (first,)
            return
        for end in range(first + 1, len(weights) - left + 2):
            yield from ((first, *rest) for rest in all_cuts(end, left - 1))

    chosen = _balance_stages(weights, before, after, count)
    assert len(chosen) == count
    assert heaviest(chosen) == min(map(heaviest, all_cuts(0, count)))


def test_stages_begin_where_the_user_says():
    config = {"pp": 2, "pipeline_split_points": ("layers.3",)}
    assert [stage.blocks for stage in cut(**config)] == [range(3), range(3, 8)]


ERRORS = {
    ("pp", 16, ()): "parallel.pp: makes 16 stages (16 ranks x 1), but the model has 8 blocks",
    ("split", 2, ("layers.8",)): "parallel.pipeline_split_points: layers.8 is no block; expected layers.1 to layers.7",
    ("split", 2, ("layers.1", "layers.2")): (
        "parallel.pipeline_split_points: 2 stages need 1 blocks to begin with behind the first stage, not 2"
    ),
    ("split", 3, ("layers.4", "layers.2")): (
        "parallel.pipeline_split_points: must name blocks behind layers.0, each behind the one before"
    ),
    (
        "split",
        2,
        ("layers.0",),
    ): "parallel.pipeline_split_points: must name blocks behind layers.0, each behind the one before",
}


@pytest.mark.parametrize("case", ERRORS, ids=str)
def test_a_cut_that_cannot_be_made_is_told(case):
    _, pp, split = case
    with pytest.raises(ConfigError) as error:
        cut(pp=pp, pipeline_split_points=split)
    assert str(error.value) == ERRORS[case]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_every_stage_is_held_by_one_rank(name, pp):
    config = ParallelConfig(pp=pp, pipeline_schedule=name)
    whole = cut(pp=pp, pipeline_schedule=name)
    held = [stages_of_rank(whole, rank, config) for rank in range(pp)]
    assert sorted(s.index for stages_ in held for s in stages_) == list(range(len(whole)))
    if SCHEDULES[name].v_shape:
        assert (held[0][0].index, held[0][1].index) == (0, len(whole) - 1)


def held_names(schedule):
    built, _ = parts(SIZES, ParallelConfig(pp=2, pipeline_schedule=schedule))
    return [[name for name, _ in part.named_parameters()] for part in built.values()]


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_parameters_keep_their_names_and_none_is_held_twice(ranks, schedule):
    held = [name for rank in ranks(2).run(held_names, schedule) for part in rank for name in part]
    assert sorted(held) == sorted(name for name, _ in reference(SIZES).named_parameters())


def schedule_object(name, pp, microbatches):
    """torch's own schedule for so many microbatches."""
    built, meshes = parts(SIZES, ParallelConfig(pp=pp, pipeline_schedule=name))
    group = meshes.model["pp"].get_group()
    hidden = torch.empty(1, 16, SIZES.dim, requires_grad=True)
    head = lambda labels: CrossEntropyHead(labels, 64)  # noqa: E731
    return PipelineStep(
        built, name, microbatches, hidden, head, lambda batch: batch, group, meshes.data["batch"].get_group(),
        meshes.loss["loss"].get_group(),
    )  # fmt: skip


def accepted(name, pp, most):
    """Numbers of microbatches that are not refused; each of them runs, and has the loss of the whole network, also in
    evaluation between two steps, after which nothing stays gathered."""
    tokens, positions, documents = inputs(SIZES, batch=1)
    batch = Batch(tokens, tokens.roll(-1, 1), positions, documents)
    expected = reference(SIZES)(tokens, positions, documents, head=CrossEntropyHead(batch.labels, 64)).item()
    result = []
    for microbatches in range(1, most + 1):
        try:
            check_microbatches(ParallelConfig(pp=pp, pipeline_schedule=name), microbatches)
        except ConfigError:
            continue
        step = schedule_object(name, pp, microbatches)
        mean = [step([batch] * microbatches, torch.tensor(16 * microbatches)) for _ in range(2)]
        loss_sum, targets = step.evaluate([batch])
        assert all(isinstance(p, DTensor) for part in step.parts.values() for p in part.parameters())
        mean.append(step([batch] * microbatches, torch.tensor(16 * microbatches)))
        torch.testing.assert_close(torch.stack(mean) * 16, torch.full((3,), expected))
        assert (loss_sum.item(), targets.item()) == (pytest.approx(expected, rel=1e-6), 16)
        result.append(microbatches)
    return result


def refused_by_torch(name, pp, microbatches):
    try:
        schedule_object(name, pp, microbatches)
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
def test_what_is_accepted_runs_and_evaluates_between_steps(ranks, name):
    assert ranks(2).run(accepted, name, 2, 5)[0] == EXPECTED[name]


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 cannot run some")
@pytest.mark.parametrize(
    ("name", "microbatches"), [("1F1B", 1), ("Interleaved1F1B", 5), ("InterleavedZeroBubble", 5), ("DualPipeV", 3)]
)
def test_what_is_refused_torch_refuses_too(ranks, name, microbatches):
    assert ranks(2).run(refused_by_torch, name, 2, microbatches) == [True, True]

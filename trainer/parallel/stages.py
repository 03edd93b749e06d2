"""Stages of a pipeline: torch's schedules and what they need, the partition of the blocks, and the modules of a stage.

The step is in pipeline.py, because torch's schedules load the compiler, which takes a second that commands without a step save.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor, nn

from models.spec import Structure
from trainer.base.config import ConfigError, ParallelConfig


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Requirements and properties of one of torch's schedules."""

    stages_per_rank: int = 2
    """Default number of stages per rank. A schedule whose default is 2 also accepts more stages, unless it has a V shape."""
    v_shape: bool = False
    """Whether stages are assigned to ranks in ascending, then in descending order. The first rank also has the last stage."""
    requires_rounds: bool = False
    """Whether microbatches are processed in rounds of equal size."""
    bounds_memory: bool = True
    """Whether in-flight activations are bounded by the pipeline depth rather than by the number of microbatches."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are computed separately ("zero bubble", Qi et al. 2023, arXiv:2401.10241)."""


SCHEDULES = {
    "GPipe": Schedule(stages_per_rank=1, bounds_memory=False),
    "1F1B": Schedule(stages_per_rank=1),
    "Interleaved1F1B": Schedule(requires_rounds=True),
    "LoopedBFS": Schedule(bounds_memory=False),
    "InterleavedZeroBubble": Schedule(requires_rounds=True, splits_backward=True),
    "ZBVZeroBubble": Schedule(v_shape=True, splits_backward=True),
    "DualPipeV": Schedule(v_shape=True, splits_backward=True),
}
"""Name of a schedule -> its properties. [parallel] pipeline_schedule and torch use the same names."""


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks. The first stage also has the modules before the blocks. The last stage also has those after them."""

    index: int
    count: int
    """Number of stages in the pipeline."""
    blocks: range

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def stages_per_rank(config: ParallelConfig) -> int:
    return config.pipeline_stages_per_rank or SCHEDULES[config.pipeline_schedule].stages_per_rank


def splits_backward(config: ParallelConfig) -> bool:
    """Return whether the run is a pipeline that computes gradients of inputs and weights separately."""
    return config.pp > 1 and SCHEDULES[config.pipeline_schedule].splits_backward


def check_stages_per_rank(config: ParallelConfig) -> None:
    """Raise ConfigError if the pipeline schedule cannot run this number of stages per rank."""
    if config.pp == 1:
        return
    name, schedule = config.pipeline_schedule, SCHEDULES[config.pipeline_schedule]
    stages, default = stages_per_rank(config), schedule.stages_per_rank
    allows_more = default > 1 and not schedule.v_shape
    if stages < default or (stages > default and not allows_more):
        count = f"{default}{' or more' if allows_more else ''}"
        message = f"{name} needs {count} {'stages' if default > 1 else 'stage'} per rank"
        raise ConfigError("parallel.pipeline_stages_per_rank", message)


def partition_blocks(model: nn.Module, structure: Structure, config: ParallelConfig) -> list[Stage]:
    """Return all stages of the pipeline in order. Without a pipeline, the full model is one stage. Raises ConfigError if the
    blocks cannot be partitioned as configured. model: the full model, on the meta device."""
    total = len(model.get_submodule(structure.blocks_path))
    # Layers for multi-token prediction are in the last stage.
    names = [f"{structure.blocks_path}.{i}" for i in range(total - structure.num_predictions)]
    per_rank = stages_per_rank(config)
    count = config.pp * per_rank if config.pp > 1 else 1
    if len(names) < count:
        key = "parallel.pipeline_stages_per_rank" if config.pipeline_stages_per_rank else "parallel.pp"
        message = f"makes {count} stages ({config.pp} ranks x {per_rank} per rank), but the model has only {len(names)} blocks"
        raise ConfigError(key, message)
    if config.pp > 1 and config.pipeline_split_points:
        starts = [0, *_split_points(config.pipeline_split_points, names, count)]
    else:
        starts = _balance_stages(_weights(model, structure), count)
    ends = [*starts[1:], total]
    return [Stage(i, count, range(start, end)) for i, (start, end) in enumerate(zip(starts, ends, strict=True))]


def _split_points(split_points: Sequence[str], names: list[str], count: int) -> list[int]:
    """Return the index of the first block of every stage except the first stage."""
    key = "parallel.pipeline_split_points"
    unknown = next((name for name in split_points if name not in names), None)
    if unknown is not None:
        raise ConfigError(key, f"{unknown} is not a block; expected {names[1]} to {names[-1]}")
    starts = [names.index(name) for name in split_points]
    if starts != sorted(set(starts)) or starts[0] == 0:
        raise ConfigError(key, f"must be in ascending order and must not contain the first block, {names[0]}")
    if len(starts) != count - 1:
        raise ConfigError(key, f"{count} stages need {count - 1} split points, not {len(starts)}")
    return starts


def _weights(model: nn.Module, structure: Structure) -> list[int]:
    """Return the number of parameters of each block. The first block includes the modules before all blocks. The last block
    includes the modules after all blocks, and the layers for multi-token prediction with their table. The embedding table takes
    little time, but its parameters are counted, because the first stage also holds the activations of more microbatches than
    later stages."""

    def parameters(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    weights = [parameters(block) for block in model.get_submodule(structure.blocks_path).children()]
    weights[0] += sum(parameters(model.get_submodule(name)) for name in structure.pre_blocks)
    if structure.num_predictions:
        weights[-structure.num_predictions - 1 :] = [sum(weights[-structure.num_predictions - 1 :])]
    weights[-1] += sum(parameters(model.get_submodule(name)) for name in structure.post_blocks)
    if structure.num_predictions and not structure.tied:  # a tied table is a part of the output
        weights[-1] += parameters(model.get_submodule(structure.table))
    return weights


def _balance_stages(weights: list[int], count: int) -> list[int]:
    """Return the index of the first block of each stage. The partition minimizes the weight of the heaviest stage and leaves
    no stage empty."""

    @cache
    def best(start: int, num_stages: int) -> tuple[int, int, tuple[int, ...]]:
        """Find the best partition of the blocks from `start` on. Return the weight of the heaviest stage, the sum of the squared
        stage weights (it breaks ties) and the index of each stage's first block."""
        if num_stages == 1:
            only = sum(weights[start:])
            return only, only**2, (start,)
        options = []
        for end in range(start + 1, len(weights) - num_stages + 2):
            first = sum(weights[start:end])
            heaviest, squares, starts = best(end, num_stages - 1)
            options.append((max(first, heaviest), first**2 + squares, (start, *starts)))
        return min(options)

    return list(best(0, count)[2])


def stages_of_rank(all_stages: list[Stage], rank: int, config: ParallelConfig) -> list[Stage]:
    """Return the stages that a rank holds. rank: index on the pp axis."""
    ranks = list(range(config.pp))
    if SCHEDULES[config.pipeline_schedule].v_shape:
        ranks += ranks[::-1]
    return [stage for stage in all_stages if ranks[stage.index % len(ranks)] == rank]


class PassThrough(nn.Module):
    """A placeholder for a module of another stage. It returns the hidden state unchanged."""

    def forward(self, hidden: Tensor, *args) -> Tensor:
        return hidden


class TiedTable(PassThrough):
    """A placeholder for an embedding whose table is also the output weight, in the last stage. So the table has the same name in
    both stages: it gets the same initial values, options and updates, and a checkpoint contains it once."""

    def __init__(self, embedding: nn.Module):
        super().__init__()
        self.weight = embedding.weight
        self.WIDTH = getattr(embedding, "WIDTH", "input")


def prune_to_stage(model: nn.Module, structure: Structure, stage: Stage) -> None:
    """Remove the modules of other stages, in place. Remaining parameters keep their names."""
    before = () if stage.is_first else structure.pre_blocks
    after = () if stage.is_last else structure.post_blocks
    for name in before + after:
        is_shared = stage.is_last and name == structure.table
        if is_shared and structure.num_predictions:
            continue  # the last stage uses it as an embedding
        model.set_submodule(name, TiedTable(model.get_submodule(name)) if is_shared else PassThrough())
    blocks = model.get_submodule(structure.blocks_path)
    for name, _ in list(blocks.named_children()):
        if int(name) not in stage.blocks:
            delattr(blocks, name)


def share_table(model_parts: Mapping[Stage, nn.Module], structure: Structure) -> None:
    """Make the first and the last stage use one parameter, in place, if this rank has both and they share a table
    (Structure.table). Each stage may be sharded: both shards are the same. model_parts: this rank's stages, allocated."""
    ends = [part for stage, part in model_parts.items() if stage.is_first or stage.is_last]
    if structure.table and len(ends) == 2:
        first, last = ends
        for name in {structure.table, *structure.tied}:  # FSDP notices that its parameter was replaced
            last.get_submodule(name).register_parameter("weight", first.get_submodule(structure.table).weight)


def peer_of_table(model_parts: Iterable[Stage], config: ParallelConfig) -> int | None:
    """Return the rank on the pp axis whose stage shares a table with one of this rank's, or None if this rank has neither the
    first nor the last stage, or both. model_parts: this rank's stages."""
    has_first, has_last = (any(ends) for ends in zip(*((s.is_first, s.is_last) for s in model_parts), strict=True))
    if has_first == has_last:
        return None
    return config.pp - 1 if has_first else 0


def min_microbatches(config: ParallelConfig) -> int:
    """Return the minimum number of microbatches that each rank must run per step."""
    return config.pp * (2 if config.pp > 1 and config.pipeline_schedule == "DualPipeV" else 1)


def check_microbatches(config: ParallelConfig, microbatches: int) -> None:
    """Raise ConfigError if the schedule cannot run this number of microbatches per step."""
    minimum = min_microbatches(config)
    count = f"the step has {microbatches} microbatch{'es' if microbatches > 1 else ''} of local_batch_size samples"
    if microbatches < minimum:
        raise ConfigError("parallel.pp", f"{count}, but {config.pipeline_schedule} needs at least {minimum}")
    rounds = microbatches // config.pp
    if SCHEDULES[config.pipeline_schedule].requires_rounds and microbatches % rounds:
        message = f"{count}, which cannot be divided into {rounds} rounds of equal size; use a multiple of {config.pp}"
        raise ConfigError("parallel.pipeline_schedule", message)

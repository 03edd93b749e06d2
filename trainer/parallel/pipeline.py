"""Pipeline parallelism: the blocks cut into stages, the microbatches sent through them by torch's schedules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from models.spec import ParallelPlan
from trainer.batch import Batch
from trainer.config import ConfigError, ParallelConfig
from trainer.parallel.step import MakeHead, ShardSequence, count_targets
from trainer.runtime.distributed import sum_over


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What torch's schedule of that name asks for."""

    cls: type
    stages_per_rank: int
    allows_more_stages: bool = False
    """Whether a rank may hold more stages than that."""
    v_shape: bool = False
    """The stages go down the ranks and up again, so that the first rank has the last stage."""
    requires_rounds: bool = False
    """Microbatches go in rounds of equal size."""
    bounds_memory: bool = True
    """Whether a rank holds the activations of so many microbatches at most as the pipeline has room for."""
    splits_backward: bool = False
    """Gradients of inputs and of weights are computed at different times ("zero bubble", Qi et al. 2023, arXiv:2401.10241)."""


SCHEDULES = {
    "GPipe": Schedule(cls=ScheduleGPipe, stages_per_rank=1, bounds_memory=False),
    "1F1B": Schedule(cls=Schedule1F1B, stages_per_rank=1),
    "Interleaved1F1B": Schedule(
        cls=ScheduleInterleaved1F1B, stages_per_rank=2, allows_more_stages=True, requires_rounds=True
    ),
    "LoopedBFS": Schedule(cls=ScheduleLoopedBFS, stages_per_rank=2, allows_more_stages=True, bounds_memory=False),
    "InterleavedZeroBubble": Schedule(
        cls=ScheduleInterleavedZeroBubble,
        stages_per_rank=2,
        allows_more_stages=True,
        requires_rounds=True,
        splits_backward=True,
    ),
    "ZBVZeroBubble": Schedule(cls=ScheduleZBVZeroBubble, stages_per_rank=2, v_shape=True, splits_backward=True),
    "DualPipeV": Schedule(cls=ScheduleDualPipeV, stages_per_rank=2, v_shape=True, splits_backward=True),
}
"""[parallel] pipeline_schedule."""


@dataclass(frozen=True)
class Stage:
    """A run of consecutive blocks, and what comes before or after all blocks where the run is at an end."""

    index: int
    count: int
    """Stages of the whole pipeline."""
    blocks: range

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


# ---------------------------------------------------------------- where to cut


def stages_per_rank(config: ParallelConfig) -> int:
    return config.pipeline_stages_per_rank or SCHEDULES[config.pipeline_schedule].stages_per_rank


def partition_blocks(model: nn.Module, plan: ParallelPlan, config: ParallelConfig) -> list[Stage]:
    """All stages of the pipeline, in order; one without a pipeline. Raises ConfigError for splits that cannot be made.

    model: the whole one, on the meta device.
    """
    names = [name for name, _ in model.get_submodule(plan.blocks).named_children()]
    count = config.pp * stages_per_rank(config) if config.pp > 1 else 1
    if len(names) < count:
        key = "parallel.pipeline_stages_per_rank" if config.pipeline_stages_per_rank else "parallel.pp"
        rule = f"makes {count} stages ({config.pp} ranks x {stages_per_rank(config)}), but the model has {len(names)} blocks"
        raise ConfigError(key, rule)
    if config.pp > 1 and config.pipeline_split_points:
        starts = [0, *_split_points(config.pipeline_split_points, [f"{plan.blocks}.{name}" for name in names], count)]
    else:
        starts = _balance_stages(*_weights(model, plan), count)
    return [
        Stage(number, count, range(first, end))
        for number, (first, end) in enumerate(zip(starts, [*starts[1:], len(names)], strict=True))
    ]


def _split_points(given: Sequence[str], names: list[str], count: int) -> list[int]:
    key = "parallel.pipeline_split_points"
    unknown = next((name for name in given if name not in names), None)
    if unknown is not None:
        raise ConfigError(key, f"{unknown} is no block; expected {names[1]} to {names[-1]}")
    points = [names.index(name) for name in given]
    if points != sorted(set(points)) or points[0] == 0:
        raise ConfigError(key, f"must name blocks behind {names[0]}, each behind the one before")
    if len(points) != count - 1:
        raise ConfigError(
            key, f"{count} stages need {count - 1} blocks to begin with behind the first stage, not {len(points)}"
        )
    return points


def _weights(model: nn.Module, plan: ParallelPlan) -> tuple[list[int], int, int]:
    """Parameters of each block, of what comes before them, and of what comes after.

    The embedding table costs no time to speak of, but memory; and the first stage holds the activations of most microbatches.
    """

    def parameters(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    blocks = [parameters(block) for block in model.get_submodule(plan.blocks).children()]
    before, after = (
        sum(parameters(model.get_submodule(n)) for n in names) for names in (plan.pre_blocks, plan.post_blocks)
    )
    return blocks, before, after


def _balance_stages(weights: list[int], before: int, after: int, count: int) -> list[int]:
    """First blocks of the stages, each with a block at least, so that the heaviest stage is as light as can be."""
    ends = len(weights)

    def weight(first: int, end: int) -> int:
        return sum(weights[first:end]) + before * (first == 0) + after * (end == ends)

    @cache
    def best(first: int, left: int) -> tuple[int, int, tuple[int, ...]]:
        """Heaviest stage, sum of squares to choose among equals, and where the stages begin; for the blocks from first on."""
        if left == 1:
            alone = weight(first, ends)
            return alone, alone**2, (first,)
        options = []
        for end in range(first + 1, ends - left + 2):
            heaviest, squares, starts = best(end, left - 1)
            here = weight(first, end)
            options.append((max(here, heaviest), here**2 + squares, (first, *starts)))
        return min(options)

    return list(best(0, count)[2])


def _ranks_of_stages(count: int, pp: int, schedule: Schedule) -> list[int]:
    """For each stage, the rank of the pp axis that holds it."""
    down = list(range(pp))
    return [*down, *reversed(down)] if schedule.v_shape else down * (count // pp)


def stages_of_rank(all_stages: list[Stage], rank: int, config: ParallelConfig) -> list[Stage]:
    """rank: on the pp axis."""
    ranks = _ranks_of_stages(len(all_stages), config.pp, SCHEDULES[config.pipeline_schedule]) if config.pp > 1 else [0]
    return [stage for stage, holder in zip(all_stages, ranks, strict=True) if holder == rank]


class _PassThrough(nn.Module):
    """In the place of a module that another stage has: passes the hidden state on."""

    def forward(self, hidden: Tensor, *others) -> Tensor:
        return hidden


def prune_to_stage(model: nn.Module, plan: ParallelPlan, stage: Stage) -> None:
    """Leave a stage of the model, in place. What stays keeps its name."""
    absent = plan.pre_blocks * (not stage.is_first) + plan.post_blocks * (not stage.is_last)
    for name in absent:
        model.set_submodule(name, _PassThrough())
    blocks = model.get_submodule(plan.blocks)
    for number, name in enumerate([name for name, _ in blocks.named_children()]):
        if number not in stage.blocks:
            delattr(blocks, name)


# ---------------------------------------------------------------- the step


def min_microbatches(config: ParallelConfig) -> int:
    """Microbatches that a step must have on each rank."""
    return config.pp * (2 if config.pp > 1 and config.pipeline_schedule == "DualPipeV" else 1)


def check_microbatches(config: ParallelConfig, microbatches: int) -> None:
    """Raises ConfigError where a schedule cannot work with so many microbatches a step."""
    least = min_microbatches(config)
    have = f"the step has {microbatches} microbatch{'es' * (microbatches > 1)} of local_batch_size samples"
    if microbatches < least:
        raise ConfigError("parallel.pp", f"{have}, but {config.pipeline_schedule} needs at least {least}")
    rounds = microbatches // config.pp
    if SCHEDULES[config.pipeline_schedule].requires_rounds and microbatches % rounds:
        rule = f"{have}, which must be a multiple of the {rounds} rounds through {config.pp} ranks"
        raise ConfigError("parallel.pipeline_schedule", rule)


class PipelineStep:
    """Every rank runs its stages of the model; the microbatches of a step are the pipeline's."""

    def __init__(
        self,
        parts: Mapping[Stage, nn.Module],
        schedule: str,
        microbatches: int,
        hidden: Tensor,
        make_head: MakeHead,
        shard_sequence: ShardSequence,
        pipeline_group: ProcessGroup,
        batch_group: ProcessGroup,
        loss_group: ProcessGroup,
    ):
        """parts: what this rank holds of the model, by stage. schedule: a key of SCHEDULES. microbatches: of a step. hidden: like
        what passes between stages, on this rank's device. batch_group: the ranks that read different samples; loss_group: those
        of one stage that compute different targets."""
        self.parts = parts
        self.hidden = hidden
        self.make_head = make_head
        self.shard_sequence = shard_sequence
        self.pipeline_group = pipeline_group
        self.batch_group = batch_group
        self.loss_group = loss_group
        self.num_targets = torch.ones((), device=hidden.device)  # of the step that runs, for torch's call of _mean_loss
        for part in parts.values():
            part.register_forward_pre_hook(self._labels_to_head, with_kwargs=True)
        built = [self._torch_stage(part, stage) for stage, part in parts.items()]
        kind = SCHEDULES[schedule].cls
        one = issubclass(kind, PipelineScheduleSingle)
        # The loss is a sum over targets already divided by their number: nothing is left to scale.
        self.schedule = kind(built[0] if one else built, microbatches, loss_fn=self._mean_loss, scale_grads=False)
        count = built[0].num_stages
        self.rank_of_stage = _ranks_of_stages(count, pipeline_group.size(), SCHEDULES[schedule])

    def _torch_stage(self, part: nn.Module, stage: Stage) -> PipelineStage:
        """With the shapes of what it gets and gives, so that torch need not run the model to find them."""
        hidden = self.hidden
        tokens = torch.empty(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        loss = torch.empty((), dtype=torch.float32, device=hidden.device, requires_grad=True)
        return PipelineStage(
            part,
            stage.index,
            stage.count,
            hidden.device,
            input_args=tokens if stage.is_first else hidden,
            output_args=loss if stage.is_last else hidden,
            group=self.pipeline_group,
        )

    def _labels_to_head(self, part: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        labels = kwargs.pop("labels")
        return args, kwargs | {"head": self.make_head(labels)}

    def _mean_loss(self, loss_sum: Tensor, labels: Tensor) -> Tensor:
        return loss_sum / self.num_targets

    def __call__(self, microbatches: Sequence[Batch], num_targets: Tensor) -> Tensor:
        self.num_targets = num_targets.clamp(min=1)  # a batch may be all padding
        cut = [self.shard_sequence(batch) for batch in microbatches]
        tokens, labels, positions, documents = (
            torch.cat([getattr(batch, name) for batch in cut])
            for name in ("tokens", "labels", "positions", "documents")
        )
        first, last = (any(getattr(stage, end) for stage in self.parts) for end in ("is_first", "is_last"))
        losses: list[Tensor] = []
        self.schedule.step(
            *([tokens] if first else []),
            target=labels if last else None,
            losses=losses,
            return_outputs=False,
            labels=labels,
            positions=positions,
            documents=documents,
        )
        return self._sum(losses)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """One microbatch after the other through all stages; torch's schedules do not all run without backward."""
        losses = [self._forward(self.shard_sequence(batch)) for batch in microbatches]
        for module in (m for part in self.parts.values() for m in part.modules() if isinstance(m, FSDPModule)):
            module.reshard()  # no backward comes that would do it
        return self._sum([loss for loss in losses if loss is not None]), count_targets(microbatches, self.batch_group)

    def _forward(self, batch: Batch) -> Tensor | None:
        """The summed loss, on the rank that has the last stage."""
        ranks = self.rank_of_stage
        rank = self.pipeline_group.rank()
        out = None
        for stage, part in self.parts.items():
            if stage.is_first:
                arrived = batch.tokens
            elif ranks[stage.index - 1] == rank:
                arrived = out
            else:
                arrived = torch.empty_like(self.hidden)
                dist.recv(arrived, group=self.pipeline_group, group_src=ranks[stage.index - 1])
            out = part(arrived, positions=batch.positions, documents=batch.documents, labels=batch.labels)
            if stage.is_last:
                return out
            if ranks[stage.index + 1] != rank:
                dist.send(out.contiguous(), group=self.pipeline_group, group_dst=ranks[stage.index + 1])
        return None

    def _sum(self, losses: list[Tensor]) -> Tensor:
        zero = torch.zeros((), dtype=torch.float32, device=self.hidden.device)
        mine = torch.stack(losses).detach().sum() if losses else zero
        return sum_over(sum_over(mine, self.loss_group), self.pipeline_group)

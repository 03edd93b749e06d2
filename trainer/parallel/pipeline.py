"""Pipeline parallelism: the blocks are partitioned into stages, and torch's schedules send microbatches through them."""

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
    """Requirements and properties of one of torch's schedules."""

    cls: type
    stages_per_rank: int
    allows_more_stages: bool = False
    """Whether a rank may hold more than `stages_per_rank` stages."""
    v_shape: bool = False
    """Whether stages are assigned to ascending, then to descending ranks, so that the first rank has the last stage."""
    requires_rounds: bool = False
    """Whether microbatches are processed in rounds of equal size."""
    bounds_memory: bool = True
    """Whether in-flight activations are bounded by the pipeline depth rather than by the number of microbatches."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are computed separately ("zero bubble", Qi et al. 2023, arXiv:2401.10241)."""


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
"""Values of [parallel] pipeline_schedule."""


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks. The first stage also has the modules before all blocks, and the last stage has those after all
    blocks."""

    index: int
    count: int
    """Number of stages of the pipeline."""
    blocks: range

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


# ---------------------------------------------------------------- stages


def stages_per_rank(config: ParallelConfig) -> int:
    return config.pipeline_stages_per_rank or SCHEDULES[config.pipeline_schedule].stages_per_rank


def partition_blocks(model: nn.Module, plan: ParallelPlan, config: ParallelConfig) -> list[Stage]:
    """Return all stages of the pipeline in order, or a single stage without a pipeline. Raises ConfigError if the blocks cannot
    be partitioned as configured. model: the full model, on the meta device."""
    names = [name for name, _ in model.get_submodule(plan.blocks).named_children()]
    count = config.pp * stages_per_rank(config) if config.pp > 1 else 1
    if len(names) < count:
        key = "parallel.pipeline_stages_per_rank" if config.pipeline_stages_per_rank else "parallel.pp"
        message = f"makes {count} stages ({config.pp} ranks x {stages_per_rank(config)}), but the model has {len(names)} blocks"
        raise ConfigError(key, message)
    if config.pp > 1 and config.pipeline_split_points:
        starts = [0, *_split_points(config.pipeline_split_points, [f"{plan.blocks}.{name}" for name in names], count)]
    else:
        starts = _balance_stages(*_weights(model, plan), count)
    ends = [*starts[1:], len(names)]
    return [Stage(i, count, range(start, end)) for i, (start, end) in enumerate(zip(starts, ends, strict=True))]


def _split_points(split_points: Sequence[str], names: list[str], count: int) -> list[int]:
    """Return the index of the first block of every stage except the first stage."""
    key = "parallel.pipeline_split_points"
    unknown = next((name for name in split_points if name not in names), None)
    if unknown is not None:
        raise ConfigError(key, f"{unknown} is not a block; expected {names[1]} to {names[-1]}")
    starts = [names.index(name) for name in split_points]
    if starts != sorted(set(starts)) or starts[0] == 0:
        raise ConfigError(key, f"must name blocks after {names[0]} in ascending order")
    if len(starts) != count - 1:
        raise ConfigError(key, f"{count} stages need {count - 1} split points, not {len(starts)}")
    return starts


def _weights(model: nn.Module, plan: ParallelPlan) -> tuple[list[int], int, int]:
    """Return the number of parameters of each block, of the modules before the blocks, and of those after them. The embedding
    table costs memory, not time. It counts because the first stage also holds the activations of most microbatches."""

    def parameters(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    blocks = [parameters(block) for block in model.get_submodule(plan.blocks).children()]
    pre, post = (
        sum(parameters(model.get_submodule(n)) for n in names) for names in (plan.pre_blocks, plan.post_blocks)
    )
    return blocks, pre, post


def _balance_stages(weights: list[int], pre: int, post: int, count: int) -> list[int]:
    """Return the index of the first block of each stage. The heaviest stage is as light as possible; no stage is empty."""
    num_blocks = len(weights)

    def weight(start: int, end: int) -> int:
        return sum(weights[start:end]) + pre * (start == 0) + post * (end == num_blocks)

    @cache
    def best(start: int, num_stages: int) -> tuple[int, int, tuple[int, ...]]:
        """Partition the blocks from `start` on. Return the weight of the heaviest stage, the sum of squares of the weights as a
        tie-breaker, and the index of each stage's first block."""
        if num_stages == 1:
            only = weight(start, num_blocks)
            return only, only**2, (start,)
        options = []
        for end in range(start + 1, num_blocks - num_stages + 2):
            heaviest, squares, starts = best(end, num_stages - 1)
            first = weight(start, end)
            options.append((max(first, heaviest), first**2 + squares, (start, *starts)))
        return min(options)

    return list(best(0, count)[2])


def _ranks_of_stages(count: int, pp: int, schedule: Schedule) -> list[int]:
    """Return the rank on the pp axis that holds each stage."""
    down = list(range(pp))
    return [*down, *reversed(down)] if schedule.v_shape else down * (count // pp)


def stages_of_rank(all_stages: list[Stage], rank: int, config: ParallelConfig) -> list[Stage]:
    """Return the stages that a rank holds. rank: index on the pp axis."""
    ranks = _ranks_of_stages(len(all_stages), config.pp, SCHEDULES[config.pipeline_schedule]) if config.pp > 1 else [0]
    return [stage for stage, holder in zip(all_stages, ranks, strict=True) if holder == rank]


class _PassThrough(nn.Module):
    """A placeholder for a module of another stage. It returns the hidden state unchanged."""

    def forward(self, hidden: Tensor, *args) -> Tensor:
        return hidden


def prune_to_stage(model: nn.Module, plan: ParallelPlan, stage: Stage) -> None:
    """Remove the modules of other stages, in place. Remaining parameters keep their names."""
    for name in plan.pre_blocks * (not stage.is_first) + plan.post_blocks * (not stage.is_last):
        model.set_submodule(name, _PassThrough())
    blocks = model.get_submodule(plan.blocks)
    for i, name in enumerate([name for name, _ in blocks.named_children()]):
        if i not in stage.blocks:
            delattr(blocks, name)


# ---------------------------------------------------------------- the step


def min_microbatches(config: ParallelConfig) -> int:
    """Return the minimum number of microbatches per step and rank."""
    return config.pp * (2 if config.pp > 1 and config.pipeline_schedule == "DualPipeV" else 1)


def check_microbatches(config: ParallelConfig, microbatches: int) -> None:
    """Raise ConfigError if the schedule cannot run this number of microbatches per step."""
    minimum = min_microbatches(config)
    count = f"the step has {microbatches} microbatch{'es' * (microbatches > 1)} of local_batch_size samples"
    if microbatches < minimum:
        raise ConfigError("parallel.pp", f"{count}, but {config.pipeline_schedule} needs at least {minimum}")
    rounds = microbatches // config.pp
    if SCHEDULES[config.pipeline_schedule].requires_rounds and microbatches % rounds:
        message = f"{count}, which must be a multiple of the {rounds} rounds through {config.pp} ranks"
        raise ConfigError("parallel.pipeline_schedule", message)


class PipelineStep:
    """A step in which every rank runs its stages of the model. The schedule uses the microbatches of the step."""

    def __init__(
        self,
        model_parts: Mapping[Stage, nn.Module],
        schedule: str,
        microbatches: int,
        hidden: Tensor,
        make_head: MakeHead,
        shard_sequence: ShardSequence,
        pipeline_group: ProcessGroup,
        batch_group: ProcessGroup,
        loss_group: ProcessGroup,
    ):
        """model_parts: this rank's stages of the model. schedule: a key of SCHEDULES. microbatches: number of microbatches per
        step. hidden: example of a hidden state between stages, with its shape, dtype and device. batch_group: the ranks that
        read different samples; loss_group: the ranks of one stage that compute the loss of different tokens."""
        self.model_parts = model_parts
        self.hidden = hidden
        self.make_head = make_head
        self.shard_sequence = shard_sequence
        self.pipeline_group = pipeline_group
        self.batch_group = batch_group
        self.loss_group = loss_group
        self.num_targets = torch.ones((), device=hidden.device)  # of the current step; _mean_loss divides by it
        for part in model_parts.values():
            part.register_forward_pre_hook(self._labels_to_head, with_kwargs=True)
        stages = [self._torch_stage(part, stage) for stage, part in model_parts.items()]
        cls = SCHEDULES[schedule].cls
        stage_or_stages = stages[0] if issubclass(cls, PipelineScheduleSingle) else stages
        # No scale_grads: the loss is already divided by the number of target tokens.
        self.schedule = cls(stage_or_stages, microbatches, loss_fn=self._mean_loss, scale_grads=False)
        self.rank_of_stage = _ranks_of_stages(stages[0].num_stages, pipeline_group.size(), SCHEDULES[schedule])

    def _torch_stage(self, part: nn.Module, stage: Stage) -> PipelineStage:
        """Return torch's stage with the shapes of its input and output, so that torch does not run the model to infer them."""
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
        batch = Batch.cat([self.shard_sequence(batch) for batch in microbatches])
        has_first, has_last = (
            any(getattr(stage, end) for stage in self.model_parts) for end in ("is_first", "is_last")
        )
        losses: list[Tensor] = []
        self.schedule.step(
            *([batch.tokens] if has_first else []),
            target=batch.labels if has_last else None,
            losses=losses,
            return_outputs=False,
            labels=batch.labels,
            positions=batch.positions,
            documents=batch.documents,
        )
        return self._sum(losses)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Run the microbatches through all stages one by one. Not all of torch's schedules can run without backward."""
        losses = [self._forward(self.shard_sequence(batch)) for batch in microbatches]
        for module in (m for part in self.model_parts.values() for m in part.modules() if isinstance(m, FSDPModule)):
            module.reshard()  # backward normally does this, but it does not run here
        return self._sum([loss for loss in losses if loss is not None]), count_targets(microbatches, self.batch_group)

    def _forward(self, batch: Batch) -> Tensor | None:
        """Return the summed loss on the rank with the last stage, and None on other ranks."""
        ranks = self.rank_of_stage
        rank = self.pipeline_group.rank()
        out = None
        for stage, part in self.model_parts.items():
            if stage.is_first:
                stage_input = batch.tokens
            elif ranks[stage.index - 1] == rank:
                stage_input = out
            else:
                stage_input = torch.empty_like(self.hidden)
                dist.recv(stage_input, group=self.pipeline_group, group_src=ranks[stage.index - 1])
            out = part(stage_input, positions=batch.positions, documents=batch.documents, labels=batch.labels)
            if stage.is_last:
                return out
            if ranks[stage.index + 1] != rank:
                dist.send(out.contiguous(), group=self.pipeline_group, group_dst=ranks[stage.index + 1])
        return None

    def _sum(self, losses: list[Tensor]) -> Tensor:
        zero = torch.zeros((), dtype=torch.float32, device=self.hidden.device)
        local = torch.stack(losses).detach().sum() if losses else zero
        return sum_over(sum_over(local, self.loss_group), self.pipeline_group)

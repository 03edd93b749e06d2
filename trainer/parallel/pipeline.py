"""Pipeline parallelism: the blocks are partitioned into stages, and torch's schedules send microbatches through them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from models.spec import Structure
from trainer.base.config import ConfigError, ParallelConfig
from trainer.batch import Batch
from trainer.objective.objective import Readout
from trainer.parallel.step import Step, context_of
from trainer.runtime.distributed import sum_over


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


# ---------------------------------------------------------------- stages


def stages_per_rank(config: ParallelConfig) -> int:
    return config.pipeline_stages_per_rank or SCHEDULES[config.pipeline_schedule].stages_per_rank


def partition_blocks(model: nn.Module, structure: Structure, config: ParallelConfig) -> list[Stage]:
    """Return all stages of the pipeline in order. Without a pipeline, the full model is one stage. Raises ConfigError if the
    blocks cannot be partitioned as configured. model: the full model, on the meta device."""
    names = [
        f"{structure.blocks_path}.{name}" for name, _ in model.get_submodule(structure.blocks_path).named_children()
    ]
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
        raise ConfigError(key, f"must be in ascending order and must not contain the first block, {names[0]}")
    if len(starts) != count - 1:
        raise ConfigError(key, f"{count} stages need {count - 1} split points, not {len(starts)}")
    return starts


def _weights(model: nn.Module, structure: Structure) -> list[int]:
    """Return the number of parameters of each block. The first block includes the modules before all blocks, and the last block
    includes the modules after all blocks. The embedding table takes little time, but its parameters are counted, because
    the first stage also holds the activations of more microbatches than later stages."""

    def parameters(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    weights = [parameters(block) for block in model.get_submodule(structure.blocks_path).children()]
    weights[0] += sum(parameters(model.get_submodule(name)) for name in structure.pre_blocks)
    weights[-1] += sum(parameters(model.get_submodule(name)) for name in structure.post_blocks)
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


class _PassThrough(nn.Module):
    """A placeholder for a module of another stage. It returns the hidden state unchanged."""

    def forward(self, hidden: Tensor, *args) -> Tensor:
        return hidden


def prune_to_stage(model: nn.Module, structure: Structure, stage: Stage) -> None:
    """Remove the modules of other stages, in place. Remaining parameters keep their names."""
    before = () if stage.is_first else structure.pre_blocks
    after = () if stage.is_last else structure.post_blocks
    for name in before + after:
        model.set_submodule(name, _PassThrough())
    blocks = model.get_submodule(structure.blocks_path)
    for name, _ in list(blocks.named_children()):
        if int(name) not in stage.blocks:
            delattr(blocks, name)


# ---------------------------------------------------------------- the step


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


@dataclass(kw_only=True, eq=False)
class PipelineStep(Step):
    """A step in which every rank runs its stages of the model. One of torch's schedules orders the microbatches."""

    schedule_name: str
    """Name of the schedule, a key of SCHEDULES."""
    num_microbatches: int
    """Number of microbatches for which torch's schedule is built. A step with another number builds a new one."""
    hidden: Tensor
    """Tensor with the shape, dtype and device of the hidden state that a stage sends to the next stage."""
    pipeline_group: ProcessGroup

    def __post_init__(self) -> None:
        # State of the current step.
        self.num_terms, self.results = torch.ones((), device=self.hidden.device), []
        for part in self.model_parts.values():
            part.register_forward_pre_hook(self._replace_labels_by_head, with_kwargs=True)
        self._build_schedule()

    def _build_schedule(self) -> None:
        # New stages too: torch's stages hold buffers for each microbatch.
        stages = [self._torch_stage(part, stage) for stage, part in self.model_parts.items()]
        cls = get_schedule_class(self.schedule_name)
        self.schedule = cls(
            stages[0] if issubclass(cls, PipelineScheduleSingle) else stages,
            self.num_microbatches,
            loss_fn=self._loss,
            scale_grads=False,  # the loss is already divided by the number of terms
        )
        self.rank_of_stage = stages[0].stage_index_to_group_rank

    def _torch_stage(self, part: nn.Module, stage: Stage) -> PipelineStage:
        """Return torch's object for a stage. It gets example inputs and outputs, so that torch does not run the model."""
        group, device = self.pipeline_group, self.hidden.device
        tokens = torch.empty(self.hidden.shape[:2], dtype=torch.int64, device=device)
        result = torch.empty(self.objective.shape, dtype=torch.float32, device=device, requires_grad=True)
        x = tokens if stage.is_first else self.hidden
        out = result if stage.is_last else self.hidden
        return PipelineStage(part, stage.index, stage.count, device, input_args=x, output_args=out, group=group)

    def _replace_labels_by_head(self, part: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Replace the labels and the reference in a stage's arguments by the head. torch's schedules pass only tensors."""
        if "head" not in kwargs:
            labels, reference = kwargs.pop("labels"), kwargs.pop("reference", None)
            kwargs["head"] = self.objective.head(labels, kwargs["context"].documents, reference)
        return args, kwargs

    def _loss(self, result: Tensor, labels: Tensor) -> Tensor:
        """Return the loss in the head's result, divided by the number of terms."""
        result = result / self.num_terms
        self.results.append(result.detach())
        return result.reshape(-1)[:1].sum()  # not a view: torch's schedules detach it in place

    def _forward_backward(self, microbatches: Sequence[Batch], num_terms: Tensor) -> Sequence[Tensor]:
        if len(microbatches) != self.num_microbatches:
            self.num_microbatches = len(microbatches)
            self._build_schedule()
        self.num_terms, self.results = num_terms, []
        batch = Batch.cat([self.shard_sequence(batch) for batch in microbatches])
        reference = {} if batch.reference is None else {"reference": batch.reference}
        self.timer.start("pipeline")
        self.schedule.step(
            *(batch.tokens for stage in self.model_parts if stage.is_first),
            target=batch.labels if any(stage.is_last for stage in self.model_parts) else None,
            return_outputs=False,
            labels=batch.labels,
            context=context_of(batch),
            **reference,
        )
        return self.results

    def _forward(self, batch: Batch, readout: Readout) -> Tensor | None:
        """Run one microbatch through all stages, without torch's schedule, because some schedules cannot run without backward."""
        head = readout.head(batch.labels, batch.documents, batch.reference)
        ranks, group = self.rank_of_stage, self.pipeline_group
        x = batch.tokens
        for stage, part in self.model_parts.items():
            if not stage.is_first and ranks[stage.index - 1] != group.rank():
                x = torch.empty_like(self.hidden)
                dist.recv(x, group=group, group_src=ranks[stage.index - 1])
            x = part(x, context_of(batch), head=head)
            if stage.is_last:
                return x
            if ranks[stage.index + 1] != group.rank():
                dist.send(x.contiguous(), group=group, group_dst=ranks[stage.index + 1])
        return None

    def _sum(self, results: Sequence[Tensor | None], readout: Readout) -> Tensor:
        return sum_over(super()._sum(results, readout), self.pipeline_group)

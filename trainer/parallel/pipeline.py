"""The step of a pipeline: torch's schedules send microbatches through the stages."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from trainer.batch import Batch
from trainer.objective.objective import Readout
from trainer.objective.prediction import with_future
from trainer.parallel.stages import Stage
from trainer.parallel.step import Step, context_of
from trainer.runtime.distributed import sum_over
from trainer.runtime.dtensor import to_local


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
    table: nn.Parameter | None = None
    """Embedding table of this rank that another rank has too (Structure.table)."""
    peer_of_table: int | None = None
    """The other rank, in pipeline_group."""

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
        batch = Batch.cat([self.shard_sequence(with_future(batch, self.num_predictions)) for batch in microbatches])
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
        self._sum_gradients_of_table()
        return self.results

    @torch.no_grad()
    def _sum_gradients_of_table(self) -> None:
        """Add the other rank's gradient to that of the table. Both ranks get the same bits, because a sum of two
        numbers does not depend on their order."""
        if self.table is None or not self.table.requires_grad:
            return
        own = to_local(self.table.grad)
        sent = own.to(self.hidden.device)
        received = torch.empty_like(sent)
        operations = [
            dist.P2POp(function, tensor, group=self.pipeline_group, group_peer=self.peer_of_table)
            for function, tensor in ((dist.isend, sent), (dist.irecv, received))
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        own.add_(received.to(own.device))

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

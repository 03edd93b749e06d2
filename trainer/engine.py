"""What a rank trains with: its part of the network, the step, the optimizer; and one update of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.batch import Batch
from trainer.config import Config
from trainer.loss import CrossEntropyHead
from trainer.optim.optimizer import Optimizer, require_shard_independent_blocks
from trainer.parallel.attention import AttentionBackend
from trainer.parallel.context import shard_sequence
from trainer.parallel.init_weights import initialize
from trainer.parallel.mesh import Meshes
from trainer.parallel.parallelize import parallelize
from trainer.parallel.pipeline import PipelineStep, Stage, stages_of_rank
from trainer.parallel.step import SpmdStep, Step, count_targets
from trainer.resilience.guard import StabilityGuard
from trainer.run.resolve import ResolvedRun
from trainer.runtime import device as devices
from trainer.runtime.device import DTYPES


@dataclass(frozen=True)
class StepResult:
    """Global values, the same on every rank."""

    loss: Tensor
    grad_norm: Tensor
    num_targets: Tensor
    outcome: Tensor
    """For OutcomeReader."""


def build_model_parts(
    config: Config, resolved: ResolvedRun, meshes: Meshes, kernels: AttentionBackend
) -> dict[Stage, nn.Module]:
    """The stages of the network that this rank holds, parallelised, on the meta device. Raises ConfigError for a layout that
    the optimizer cannot have."""
    parts = parallelize(
        lambda: resolved.spec.model(resolved.sizes).to(DTYPES[config.training.parameter_dtype]),
        resolved.spec.plan(resolved.sizes),
        stages_of_rank(resolved.stages, meshes.model["pp"].get_local_rank(), config.parallel),
        meshes,
        config.parallel,
        config.activation_checkpoint,
        config.compile,
        config.training.compute_dtype,
        config.data.document_mask,
        kernels,
    )
    for part in parts.values():
        require_shard_independent_blocks(dict(part.named_parameters()), config.optimizer)
    return parts


class Engine:
    """Knows of no data, files or records: the Trainer's step is this one, and so is a plan's."""

    def __init__(
        self,
        config: Config,
        resolved: ResolvedRun,
        device: torch.device,
        meshes: Meshes,
        parts: dict[Stage, nn.Module],
        loaded: set[str],
    ):
        """parts: by build_model_parts; they get memory and values here. loaded: parameters that get their values afterwards."""
        self.config = config
        self.device = device
        self.meshes = meshes
        self.parts = parts
        parallel = config.parallel
        for part in parts.values():
            initialize(part, devices.parameter_device(device, parallel.cpu_offload), config.run.seed, loaded)
        self.parameters = {name: p for part in parts.values() for name, p in part.named_parameters()}
        self.optimizer = Optimizer(self.parameters, config.optimizer, dist.group.WORLD, resolved.dims.ranks_per_stage)
        self.guard = StabilityGuard(config.resilience, self.optimizer.device)
        self.batch_group = meshes.data["batch"].get_group()
        self.step = self._make_step(resolved)

    def _make_step(self, resolved: ResolvedRun) -> Step:
        training = self.config.training
        cp = self.meshes.data["cp"]
        common = {
            "make_head": partial(CrossEntropyHead, chunk_tokens=training.loss_chunk_tokens),
            "shard_sequence": partial(shard_sequence, rank=cp.get_local_rank(), ranks=cp.size()),
            "batch_group": self.batch_group,
            "loss_group": self.meshes.loss["loss"].get_group(),
        }
        if resolved.dims.pp == 1:
            (model,) = self.parts.values()
            return SpmdStep(model, reduce_every_microbatch=training.reduce_every_microbatch, **common)
        return PipelineStep(
            self.parts,
            schedule=self.config.parallel.pipeline_schedule,
            microbatches=resolved.grad_accum,
            hidden=torch.empty(
                resolved.hidden_shape, dtype=DTYPES[training.compute_dtype], device=self.device, requires_grad=True
            ),
            pipeline_group=self.meshes.model["pp"].get_group(),
            **common,
        )

    def update(
        self, microbatches: Sequence[Batch], rate: float, stop: bool, before_update: Callable[[], None]
    ) -> StepResult:
        """One optimizer step. rate: learning rate; stop: whether this rank was asked to; before_update: called when
        parameters and the guard's state are about to change."""
        self.optimizer.begin(rate)
        num_targets = count_targets(microbatches, self.batch_group)
        if self.config.optimizer.in_backward:
            before_update()
        loss = self.step(microbatches, num_targets)
        grad_norm, votes = self.optimizer.clip(self.config.training.max_norm, vote=stop)
        before_update()
        skipped, outcome = self.guard.decide(loss, grad_norm, votes)
        self.optimizer.step(skip=skipped)
        return StepResult(loss, grad_norm, num_targets, outcome)

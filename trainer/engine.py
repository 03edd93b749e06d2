"""Engine that holds one rank's model and optimizer, and runs optimizer steps."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from models.spec import is_bias, saved_weights
from trainer.adapters.apply import apply_lora
from trainer.adapters.nf4 import quantized_weights
from trainer.base.config import Config
from trainer.batch import Batch
from trainer.objective.cross_entropy import CrossEntropy
from trainer.objective.objective import Objective, require_complete
from trainer.objective.preference import Preference
from trainer.optim.optimizer import Optimizer, optimizer_class
from trainer.optim.weight_average import WeightAverage
from trainer.parallel.attention import AttentionBackend
from trainer.parallel.balance import ExpertLoad, apply_balance
from trainer.parallel.context_parallel import shard_sequence
from trainer.parallel.fsdp import reshard_all, start_microbatch
from trainer.parallel.init_weights import allocate, initialize
from trainer.parallel.mesh import Meshes
from trainer.parallel.parallelize import parallelize
from trainer.parallel.pipeline import PipelineStep
from trainer.parallel.sample_layout import SampleLayout
from trainer.parallel.stages import Stage, peer_of_table, share_table, stages_of_rank
from trainer.parallel.step import SpmdStep, Step, count_terms
from trainer.parallel.unsharded import GradientAccumulator
from trainer.resilience.guard import StabilityGuard
from trainer.run.resolve import ResolvedRun
from trainer.runtime.device import DTYPES
from trainer.runtime.step_timer import StepTimer


def sample_layout(config: Config, meshes: Meshes) -> SampleLayout:
    return SampleLayout(
        cp=meshes.data["cp"],
        seq_len=config.training.seq_len,
        by_document=config.data.document_mask,
        dtype=DTYPES[config.training.compute_dtype],
    )


def build_model_parts(
    config: Config, resolved: ResolvedRun, meshes: Meshes, attention_backend: AttentionBackend
) -> dict[Stage, nn.Module]:
    """Build this rank's parallelized stages on the meta device."""
    return parallelize(
        make_model=lambda: resolved.spec.model(resolved.sizes).to(DTYPES[config.training.parameter_dtype]),
        structure=resolved.structure,
        stages=stages_of_rank(resolved.stages, meshes.model["pp"].get_local_rank(), config.parallel),
        meshes=meshes,
        parallel=config.parallel,
        checkpointing=config.activation_checkpoint,
        compiled=resolved.compiled,
        storage=resolved.parameter_storage,
        layout=sample_layout(config, meshes),
        attention_backend=attention_backend,
        float8=resolved.float8,
        adapt=partial(
            apply_lora,
            blocks=resolved.structure.blocks_path,
            trained=resolved.trained,
            config=config.lora,
            seed=config.run.seed,
        ),
    )


def build_objective(config: Config, resolved: ResolvedRun, meshes: Meshes, evaluates: bool = False) -> Objective:
    """Return the objective that the settings select. evaluates: for evaluations, which report the cross-entropy only."""
    training = config.training
    if config.preference.enabled:
        cp_group = meshes.data["cp"].get_group()
        return Preference(config.preference, training.seq_len, cp_group, training.loss_chunk_tokens, resolved.compiled)
    others = {} if evaluates else {"z_loss": training.z_loss, "prediction_weight": training.prediction_weight}
    return CrossEntropy(training.loss_chunk_tokens, resolved.compiled, **others)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Values of one optimizer step, on the device and reduced over all ranks."""

    outcome: Tensor
    """Packed outcome for StepMonitor."""
    num_terms: Tensor
    """Number of the objective's terms: target tokens or pairs."""
    means: dict[str, Tensor]
    """Means of the loss and of the objective's metrics over the terms, by name."""
    routing: dict[str, Tensor]
    """Metrics of the routers by name, see ExpertLoad. Empty for a model without experts."""


class Engine:
    """Training on one rank, without data loading, files and logging. Both the Trainer and the planner use this class."""

    def __init__(
        self,
        config: Config,
        resolved: ResolvedRun,
        device: torch.device,
        meshes: Meshes,
        model_parts: dict[Stage, nn.Module],
        objective: Objective,
    ):
        """Allocate the parameters; `initialize` or a checkpoint gives them values.

        Args:
            model_parts: Result of build_model_parts.
            objective: What the run minimizes.

        Raises:
            TypeError: The objective lacks an attribute of Objective.
        """
        require_complete(objective)
        self.config, self.device, self.objective = config, device, objective
        self.width_ratio, self.saved_names = resolved.optimizer.width_ratio, resolved.saved_names
        self.model_parts = model_parts
        self._allocate()
        share_table(model_parts, resolved.structure)
        self.table = f"{table}.weight" if (table := resolved.structure.table) else ""
        """Name of the embedding table, if the first and the last stage of a pipeline both have it, or ""."""
        self.peer_of_table = peer_of_table(model_parts, config.parallel) if table else None
        """The rank of the pipeline that has the table too, or None."""
        self.parameters = {name: p for part in model_parts.values() for name, p in part.named_parameters()}
        self.weights = {name: w for part in model_parts.values() for name, w in saved_weights(part).items()}
        """The parameters and buffers of this rank by name."""
        self.quantized = {name: w for part in model_parts.values() for name, w in quantized_weights(part).items()}
        """Name of a weight that is kept in 4 bits -> this rank's part. Its parts are among the parameters too."""
        start, self.gradient_sums = self._accumulation()
        """Parameter -> sum of earlier microbatches' gradients, if neither FSDP nor p.grad holds it. The planner counts it."""
        self.samples_per_microbatch = config.training.local_batch_size * resolved.dims.batch
        """Number of samples in one microbatch of all ranks."""
        self.expert_load = self._balance(resolved, meshes) if resolved.structure.has_experts else None
        # After _accumulation: the optimizer's hooks of gradients must run after those of the accumulator.
        self.optimizer = self._build_optimizer(resolved, meshes)
        decay = config.optimizer.ema_decay
        self.average = None if decay is None else WeightAverage(self.optimizer, decay)
        self.guard = StabilityGuard(config.resilience, self.optimizer.device)
        self.timer = StepTimer(device)
        self.batch_group = meshes.data["batch"].get_group()
        self.forward_backward = self._build_step(resolved, meshes, start)

    def _allocate(self) -> None:
        parameter_device = torch.device("cpu") if self.config.parallel.cpu_offload else self.device
        for part in self.model_parts.values():
            allocate(part, parameter_device, self.device)

    def _accumulation(self) -> tuple[Callable[[bool], None], Mapping[Tensor, Tensor]]:
        """Return the function that a Step calls at the start of a microbatch, and `gradient_sums`."""
        model = next(iter(self.model_parts.values()))
        if isinstance(model, FSDPModule):
            return partial(start_microbatch, model, self.config.training.reduce_every_microbatch), {}
        accumulator = GradientAccumulator(self.parameters.values(), self.config.optimizer.frees_gradients)
        return accumulator.start_microbatch, accumulator.sums

    def _balance(self, resolved: ResolvedRun, meshes: Meshes) -> ExpertLoad:
        """Make the routers balance their experts, and return what counts their load."""
        for part in self.model_parts.values():
            apply_balance(part, self.config.experts, meshes, self.device)
        blocks = [part.get_submodule(resolved.structure.blocks_path) for part in self.model_parts.values()]
        return ExpertLoad(blocks, resolved.sizes, self.config.experts, self.device)

    def _build_step(self, resolved: ResolvedRun, meshes: Meshes, start_microbatch: Callable[[bool], None]) -> Step:
        """start_microbatch: see _accumulation."""
        cp, dtype = meshes.data["cp"], DTYPES[self.config.training.compute_dtype]
        common = {
            "model_parts": self.model_parts,
            "objective": self.objective,
            "num_predictions": resolved.structure.num_predictions,
            "shard_sequence": partial(shard_sequence, rank=cp.get_local_rank(), ranks=cp.size()),
            "timer": self.timer,
            "batch_group": self.batch_group,
            "loss_group": meshes.loss["loss"].get_group(),
        }
        if resolved.dims.pp == 1:
            return SpmdStep(start_microbatch=start_microbatch, **common)
        return PipelineStep(
            schedule_name=self.config.parallel.pipeline_schedule,
            num_microbatches=resolved.grad_accum,
            hidden=torch.empty(resolved.hidden_shape, dtype=dtype, device=self.device, requires_grad=True),
            pipeline_group=meshes.model["pp"].get_group(),
            table=None if self.peer_of_table is None else self.parameters[self.table],
            peer_of_table=self.peer_of_table,
            **common,
        )

    def _build_optimizer(self, resolved: ResolvedRun, meshes: Meshes) -> Optimizer:
        names = [(part, name) for part in self.model_parts.values() for name, _ in part.named_parameters()]
        biases = {name for part, name in names if is_bias(part, name)}
        config = self.config.optimizer
        if config.muon_dtype == "auto":
            config = replace(config, muon_dtype=self.config.training.compute_dtype)
        groups, ranks = resolved.optimizer.groups, resolved.dims.ranks_per_stage
        copies = {} if self.peer_of_table is None else {self.table: 2}
        return optimizer_class(config)(self.parameters, config, groups, ranks, biases, meshes.stage, copies)

    def initialize(self, loaded: Collection[str]) -> None:
        """Set the initial values of all weights except those in `loaded`, whose values are loaded afterwards."""
        for part in self.model_parts.values():
            initialize(part, self.config.run.seed, loaded, self.config.lora, self.width_ratio)
        self.start_optimizer()

    def start_optimizer(self) -> None:
        """Make the master weights and the averages those of the parameters, after these have got their initial values."""
        self.optimizer.sync_master_weights(state_loaded=False)
        if self.average is not None:
            self.average.start()

    def step(
        self, microbatches: Sequence[Batch], lr: float, stop: bool, on_before_update: Callable[[], None]
    ) -> StepResult:
        """Run one optimizer step.

        Args:
            microbatches: This rank's microbatches, with full sequences.
            lr: Learning rate.
            stop: Whether this rank was asked to stop.
            on_before_update: Called before the first change of the parameters, the optimizer state or the guard's state; with
                in_backward twice, because backward changes the parameters, and `decide` the guard's state.
        """
        self.timer.start("reduction")
        self.optimizer.start_step(lr)
        num_terms = count_terms(microbatches, self.objective, self.batch_group)
        if self.expert_load is not None:
            self.expert_load.start_step(len(microbatches) * self.samples_per_microbatch)
        if self.config.optimizer.in_backward:
            on_before_update()
        means = self.forward_backward(microbatches, num_terms)
        routing = {} if self.expert_load is None else self.expert_load.take()
        self.timer.start("clip")
        grad_norm, votes = self.optimizer.clip(self.config.training.max_norm, vote=stop)
        self.timer.start("optimizer")
        on_before_update()
        skip, outcome = self.guard.decide(means["loss"], grad_norm, votes)
        self.optimizer.step(skip=skip)
        if self.average is not None:
            self.average.update(skip)
        if self.expert_load is not None:
            self.expert_load.correct(skip)
        self.timer.start("other")
        return StepResult(outcome=outcome, num_terms=num_terms, means=means, routing=routing)

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Context manager in which the model has the weights to evaluate: the averages, if [evaluation] averaged says so."""
        return self.average.in_use(self._reshard) if self.config.evaluation.averaged else nullcontext()

    def _reshard(self) -> None:
        for part in self.model_parts.values():
            reshard_all(part)

    @property
    def host_tensors(self) -> list[Tensor]:
        """The tensors that are offloaded to host memory."""
        offloaded = [*self.optimizer.host_tensors]
        return [*offloaded, *self.average.averages.values()] if offloaded and self.average else offloaded

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the state of the optimizer and the averages of the weights, as `tensors` does."""
        averages = {} if self.average is None else self.average.state()
        return {
            f"{group}/{name}": tensor
            for group, state in (("optimizer", self.optimizer.state()), ("average", averages))
            for name, tensor in state.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are saved in checkpoints, by their names in the checkpoint. The tensors are not copied. Frozen
        parameters are not saved."""
        tensors = {f"model/{name}": w.detach() for name, w in self.weights.items() if name in self.saved_names}
        tensors |= self.optimizer_tensors()
        return tensors | {f"stability/{name}": tensor for name, tensor in self.guard.state().items()}

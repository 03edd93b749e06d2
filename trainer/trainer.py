"""The training loop, and the one place where every part of a run meets."""

import json
import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import checkpoint, logging
from trainer import device as devices
from trainer.batch import Batch
from trainer.checkpoint import Saved
from trainer.config import Config, ConfigError
from trainer.data.loader import Cut, SampleOrder, training_batches
from trainer.data.packing import WrappedSamples
from trainer.data.prepare import prepare
from trainer.data.store import open_store
from trainer.distributed import from_rank_0, once_per_machine, require_agreement
from trainer.evaluate import HeldOut
from trainer.loss import CrossEntropyHead
from trainer.metrics import Metrics, duration
from trainer.optimizer import Optimizer
from trainer.parallel.context import cut_sequence
from trainer.parallel.dims import Meshes
from trainer.parallel.fsdp import DTYPES
from trainer.parallel.initialize import initialize
from trainer.parallel.parallelize import parallelize
from trainer.parallel.pipeline import PipelineStep, stages_of_rank
from trainer.parallel.step import SpmdStep, Step, count_targets
from trainer.schedule import learning_rate
from trainer.setup import Setup
from trainer.show_config import to_toml


def run_folder(config: Config) -> Path:
    return Path(config.run.output_folder) / config.run.name


def resume_point(config: Config, setup: Setup) -> Saved | None:
    """The checkpoint that this run goes on from, or None for a new run. Raises ConfigError where it is another's."""
    saved = checkpoint.find(run_folder(config) / "checkpoints")
    if saved is not None:
        checkpoint.require_same(saved, setup.identity)
    return saved


@dataclass(frozen=True)
class StepResult:
    """Global values, the same on every rank."""

    loss: Tensor
    grad_norm: Tensor
    num_targets: Tensor


class NotFinite(Exception):
    """Training has come to a point from which it does not come back: one line for the user, exit code 1."""


class Trainer:
    """One run, from a started process group on."""

    def __init__(self, config: Config, setup: Setup, device: torch.device, saved: Saved | None):
        """saved: what to go on from. Raises ConfigError for all that cannot be trained on or written to."""
        self.config = config
        self.device = device
        training = config.training
        self.folder = run_folder(config)
        self._open_folder()
        devices.set_cpu_threads(training.cpu_threads)
        repeats = devices.set_deterministic(config.run.deterministic, device)
        torch.manual_seed(config.run.seed + dist.get_rank())

        self.meshes = Meshes(setup.dims, device)
        batch_axis = self.meshes.data["batch"]
        self.cut = Cut(
            global_batch_size=training.global_batch_size,
            local_batch_size=training.local_batch_size,
            rank=batch_axis.get_local_rank(),
            ranks=batch_axis.size(),
        )
        self.batch_group = batch_axis.get_group()
        self._open_data(setup)

        plan, parallel = setup.spec.plan(setup.sizes), config.parallel
        stages = stages_of_rank(setup.stages, self.meshes.model["pp"].get_local_rank(), parallel)
        self.parts = parallelize(
            lambda: setup.spec.network(setup.sizes),
            plan,
            stages,
            self.meshes,
            parallel,
            config.activation_checkpoint,
            config.compile,
            training.compute_dtype,
        )
        for part in self.parts.values():
            initialize(part, devices.of_parameters(device, parallel.offload_parameters), config.run.seed)
        self.parameters = {name: p for part in self.parts.values() for name, p in part.named_parameters()}
        self.optimizer = Optimizer(self.parameters, config.optimizer, dist.group.WORLD, setup.dims.ranks_of_stage)
        self.step = self._make_step(setup)

        self.steps_done = self.cursor = self.tokens_seen = 0
        self.identity = setup.identity | {"data": self.data_name}
        if saved is not None:
            self._resume(saved)
        self._write_down()
        self._describe(setup, repeats)
        self.metrics = Metrics(
            config.metrics,
            self.folder if dist.get_rank() == 0 else None,
            device,
            first_step=self.steps_done,
            steps=training.steps,
            ranks=dist.get_world_size(),
            flops_per_token=setup.flops_per_token,
            peak_flops=devices.peak_flops(device, training.compute_dtype),
        )

    def _make_step(self, setup: Setup) -> Step:
        training = self.config.training
        cp = self.meshes.data["cp"]
        common = {
            "make_head": partial(CrossEntropyHead, chunk_tokens=training.loss_chunk_tokens),
            "cut_sequence": partial(cut_sequence, rank=cp.get_local_rank(), ranks=cp.size()),
            "batch_group": self.batch_group,
            "loss_group": self.meshes.loss["loss"].get_group(),
        }
        if setup.dims.pp == 1:
            (model,) = self.parts.values()
            return SpmdStep(model, reduce_every_microbatch=training.reduce_every_microbatch, **common)
        return PipelineStep(
            self.parts,
            schedule=self.config.parallel.pipeline_schedule,
            microbatches=self.cut.grad_accum,
            hidden=torch.empty(
                setup.hidden_shape, dtype=DTYPES[training.compute_dtype], device=self.device, requires_grad=True
            ),
            pipeline_group=self.meshes.model["pp"].get_group(),
            **common,
        )

    def _open_data(self, setup: Setup) -> None:
        config = self.config
        store = Path(once_per_machine(lambda: str(prepare(config.data, config.tokenizer, setup.tokenizer))))
        self.data_name = store.name
        require_agreement({"data": self.data_name})
        self.samples = WrappedSamples(open_store(store, "train"), config.training.seq_len)
        if not len(self.samples):
            tokens = len(self.samples.store.tokens)
            raise ConfigError("training.seq_len", f"the training documents have {tokens} tokens, less than one sample")
        self.order = SampleOrder(len(self.samples), config.run.seed, config.data.shuffle)
        self.held_out = None
        if config.evaluation.interval_steps:
            held_out = WrappedSamples(open_store(store, "held_out"), config.training.seq_len)
            self.held_out = HeldOut(held_out, config.evaluation)

    # ------------------------------------------------------------ the loop

    def train(self) -> None:
        """Train up to training.steps."""
        config = self.config
        steps = config.training.steps
        batches = self._batches()
        self.metrics.start()
        try:
            while self.steps_done < steps:
                rate = learning_rate(config.lr_schedule, config.optimizer.lr, self.steps_done + 1, steps)
                result = self.train_step(batches, rate)
                self._count_step()
                self._after_step(result, rate)
        finally:
            self.metrics.close()
        logging.info(f"done: step {steps}, {duration(self.metrics.run_watch.elapsed())}, {self.folder}")

    def _after_step(self, result: StepResult, rate: float) -> None:
        """Record, evaluate and save where it is due."""
        recorded = self.metrics.due(self.steps_done)
        evaluated = self.held_out is not None and self._due(self.config.evaluation.interval_steps)
        saved = self._due(self.config.checkpoint.interval_steps)
        if recorded:
            training = self.config.training
            self.metrics.record_training(
                self.steps_done,
                loss=result.loss.item(),
                grad_norm=result.grad_norm.item(),
                learning_rate=rate,
                num_targets=int(result.num_targets.item()),
                tokens_seen=self.tokens_seen,
                tokens=training.global_batch_size * training.seq_len,
            )
        if recorded or evaluated or saved:
            self._require_finite(result)
        if evaluated:
            self.evaluate(self.held_out)
        if saved:
            self.save()

    def train_step(self, batches: Iterator[Batch], rate: float) -> StepResult:
        """One optimizer step over grad_accum microbatches. rate: learning rate."""
        self.optimizer.zero_grad()
        with self.metrics.watch.on("data", synchronize=False):
            microbatches = [next(batches) for _ in range(self.cut.grad_accum)]
        num_targets = count_targets(microbatches, self.batch_group)
        loss = self.step(microbatches, num_targets)
        grad_norm = self.optimizer.clip(self.config.training.max_norm)
        self.optimizer.step(rate)
        return StepResult(loss, grad_norm, num_targets)

    def _require_finite(self, result: StepResult) -> None:
        """Looked at where the host waits for the device anyway: at records, and before an evaluation or a checkpoint."""
        if not (math.isfinite(result.loss.item()) and math.isfinite(result.grad_norm.item())):
            raise NotFinite(
                f"step {self.steps_done}: loss {result.loss.item()}, gradient norm {result.grad_norm.item()}; stopped, "
                "and this state is not saved. A lower learning rate or longer warm-up, from the last checkpoint, may help"
            )

    def _batches(self) -> Iterator[Batch]:
        pin_memory = self.device.type != "cpu"
        for batch in training_batches(self.samples, self.order, self.cut, self.cursor, self.config.data, pin_memory):
            yield self._to_device(batch)

    def _to_device(self, batch: Batch) -> Batch:
        return batch.apply(lambda t: t.to(self.device, non_blocking=True))

    def _count_step(self) -> None:
        training = self.config.training
        self.steps_done += 1
        self.cursor += training.global_batch_size
        self.tokens_seen += training.global_batch_size * training.seq_len
        self.metrics.after_step()

    def _due(self, interval: int) -> bool:
        """Every interval steps and after the last one."""
        return self.steps_done == self.config.training.steps or (interval > 0 and self.steps_done % interval == 0)

    def evaluate(self, held_out: HeldOut) -> None:
        with self.metrics.watch.on("evaluation") as lap:
            result = held_out.evaluate(self.step, self.cut, self._to_device)
            entropy = held_out.unigram_entropy
        logging.info(
            f"held-out loss {result.loss:.4f} nats over {result.num_targets} tokens "
            f"(unigram entropy of the same tokens: {entropy:.4f}, {entropy - result.loss:+.4f} above the loss)"
        )
        self.metrics.record_event(
            {
                "kind": "eval",
                "step": self.steps_done,
                "set": "held_out",
                "loss": result.loss,
                "unigram_entropy": entropy,
                "num_targets": result.num_targets,
                "evaluation_time_s": lap.seconds,
            }
        )

    # ------------------------------------------------------------ what outlives the process

    def _tensors(self) -> dict[str, Tensor]:
        """Everything of a run that is a tensor, by its name in a checkpoint."""
        tensors = {f"model/{name}": p.detach() for name, p in self.parameters.items()}
        return tensors | {f"optimizer/{name}": t for name, t in self.optimizer.state().items()}

    def save(self) -> None:
        random = devices.random_state(self.device)
        state = {
            "step": self.steps_done,
            "cursor": self.cursor,
            "tokens_seen": self.tokens_seen,
            "world_size": dist.get_world_size(),
            "identity": self.identity,
            "random": sorted(random),
        }
        tensors = self._tensors() | {f"random/{dist.get_rank()}/{name}": t for name, t in random.items()}
        self.metrics.flush()
        with self.metrics.watch.on("checkpoint") as lap:
            saved = checkpoint.save(self.folder / "checkpoints", self.steps_done, tensors, state, to_toml(self.config))
        logging.info(f"saved {saved} in {lap.seconds:.1f} s")
        self.metrics.record_event({"kind": "checkpoint", "step": self.steps_done, "blocked_s": lap.seconds})

    def _resume(self, saved: Saved) -> None:
        """Take over everything that a checkpoint holds."""
        checkpoint.require_same(saved, self.identity)
        state = saved.state
        # A rank that the saving run did not have keeps its fresh generators.
        names = state["random"] if dist.get_rank() < state["world_size"] else []
        fresh = devices.random_state(self.device)
        random = {name: torch.empty_like(fresh[name]) for name in names if name in fresh}
        prefix = f"random/{dist.get_rank()}/"
        checkpoint.load(saved.path, self._tensors() | {prefix + name: t for name, t in random.items()})
        devices.set_random_state(self.device, random)
        self.steps_done, self.cursor, self.tokens_seen = state["step"], state["cursor"], state["tokens_seen"]
        ranks = state["world_size"]
        logging.info(f"resuming from {saved.path} (step {self.steps_done}, saved by {ranks} rank{'s' * (ranks > 1)})")

    def _open_folder(self) -> None:
        """What cannot be written is told now, not after the work."""

        def work() -> None:
            try:
                for folder in ("checkpoints", "tb"):
                    (self.folder / folder).mkdir(parents=True, exist_ok=True)
                for file in ("metrics.jsonl", "config.toml", "environment.json"):
                    (self.folder / file).open("a").close()
            except OSError as error:
                rule = f"{error.filename} cannot be written ({error.strerror})"
                raise ConfigError("run.output_folder", rule) from None

        from_rank_0(work)

    def _write_down(self) -> None:
        """The configuration and what it runs on, when nothing can be refused any more."""
        if dist.get_rank() == 0:
            (self.folder / "config.toml").write_text(to_toml(self.config))
            environment = {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "platform": platform.platform(),
                "device": devices.name(self.device),
                "world_size": dist.get_world_size(),
            }
            (self.folder / "environment.json").write_text(json.dumps(environment, indent=1))

    def _describe(self, setup: Setup, repeats: bool) -> None:
        """Say what runs on what."""
        config, dims = self.config, setup.dims
        logging.info(
            f"{config.run.name}: {config.model.name}/{config.model.size}, {setup.num_parameters:,} parameters, computing in "
            f"{config.training.compute_dtype} on {dims.world_size} x {devices.name(self.device)} "
            f"({dims}), repeats {'bit by bit' if repeats else 'to rounding'}"
        )
        logging.info(
            f"data {self.data_name}: {len(self.samples)} samples of {config.training.seq_len} tokens, "
            f"{config.training.global_batch_size} a step in {self.cut.grad_accum} microbatches on each rank"
        )
        schedule, steps = config.lr_schedule, config.training.steps
        if schedule.warmup_steps + schedule.decay_steps > steps:
            logging.warning(
                f"warmup_steps {schedule.warmup_steps} + decay_steps {schedule.decay_steps} are more than the {steps} steps "
                "of this run: the learning rate will not go all its way"
            )

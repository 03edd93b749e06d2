"""The training loop, and the one place where every part of a run meets."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.batch import Batch
from trainer.checkpoint import manifest, resume
from trainer.checkpoint.async_save import AsyncCheckpointer, SaveResult, WriterDied
from trainer.checkpoint.commit import SaveFailed, load, step_of
from trainer.checkpoint.export import export_run
from trainer.checkpoint.resume import ResumePoint
from trainer.checkpoint.weights import init_weights_from, names_loaded
from trainer.config import Config
from trainer.config.render import to_toml
from trainer.data.build import open_datasets, prepare_datasets
from trainer.data.sampling.loader import BatchPartition, SampleOrder, training_batches
from trainer.data.sampling.mixture import require_unchanged_phases
from trainer.engine import Engine, StepResult, build_model_parts
from trainer.evaluate import BestTracker, build_eval_sets
from trainer.optim.lr_schedule import learning_rate
from trainer.parallel.attention import CPU_BACKEND, GPU_BACKEND
from trainer.parallel.mesh import Meshes
from trainer.parallel.pipeline import Stage
from trainer.resilience.guard import OutcomeReader, StepOutcome, TrainingDiverged, add_range, should_roll_back
from trainer.resilience.stop_signals import StopRequest
from trainer.resilience.straggler import StragglerDetector
from trainer.resilience.watchdog import Watchdog
from trainer.run.metrics import Metrics, duration
from trainer.run.preflight import check_disk, check_memory, state_bytes
from trainer.run.resolve import ResolvedRun
from trainer.run.run_folder import (
    changed_settings,
    create_run_folder,
    discard_newer_checkpoints,
    log_summary,
    model_files,
    run_folder,
    save_run_info,
    versions,
)
from trainer.runtime import device as devices
from trainer.runtime.distributed import once_per_node, require_agreement, run_on_rank_0
from trainer.system import logging


class Trainer:
    """One run, from a started process group on."""

    def __init__(self, config: Config, resolved: ResolvedRun, device: torch.device, saved: ResumePoint | None):
        """saved: what to go on from. Raises ConfigError for all that cannot be trained on or written to."""
        self.config = config
        self.device = device
        training = config.training
        self.folder = run_folder(config)
        create_run_folder(self.folder)
        devices.set_cpu_threads(training.cpu_threads)
        repeats = devices.set_deterministic(config.run.deterministic, device)
        torch.manual_seed(config.run.seed + dist.get_rank())

        meshes = Meshes(resolved.dims, device)
        self.cut = BatchPartition(
            global_batch_size=training.global_batch_size,
            local_batch_size=training.local_batch_size,
            rank=meshes.data["batch"].get_local_rank(),
            ranks=resolved.dims.batch,
        )
        parts = build_model_parts(config, resolved, meshes, CPU_BACKEND if device.type == "cpu" else GPU_BACKEND)
        self._require_room(resolved, parts, saved)
        self._open_data(resolved)

        names = resolved.parameter_names
        loaded = names_loaded(config.checkpoint, names) if saved is None else set(names)
        self.engine = Engine(config, resolved, device, meshes, parts, loaded)
        self.pace = StragglerDetector(config.resilience.straggler_ratio, device)
        for part in parts.values():
            self.pace.watch(part.get_submodule(resolved.spec.plan(resolved.sizes).blocks))

        self.outcomes = OutcomeReader(late=self.engine.optimizer.device.type != "cpu")

        self.best = BestTracker(config.evaluation, self.data.evaluation_names.get(config.evaluation.keep_best_on, ""))
        self.steps_done = self.cursor = self.tokens_seen = self.rollbacks = 0
        self.save_late = False
        self.fingerprint = resolved.fingerprint | {"data": self.data.name}
        self.stored_names = {f"{kind}/{name}" for kind in ("model", "optimizer") for name in names}
        self.model_files = model_files(config, resolved)
        if saved is not None:
            self._resume(saved)
        elif config.checkpoint.init_from:
            init_weights_from(config.checkpoint, resolved.spec, resolved.sizes, self.engine.parameters, names)
            self.engine.optimizer.after_load(state_too=False)
        self.saver = AsyncCheckpointer(config.checkpoint, self.folder / "checkpoints", device, self._all_tensors())
        self.watchdog = Watchdog(config.resilience.hang_timeout_s)
        save_run_info(config, device)
        log_summary(config, resolved, device, repeats, f"{self.data.name}: {len(self.data.training)}")
        self.open_metrics = partial(
            Metrics,
            config.metrics,
            self.folder if dist.get_rank() == 0 else None,
            device,
            steps=training.steps,
            ranks=dist.get_world_size(),
            flops_per_token=resolved.flops_per_token,
            peak_flops=devices.peak_flops(device, training.compute_dtype),
        )
        self.metrics = self.open_metrics(first_step=self.steps_done)

    def _require_room(self, resolved: ResolvedRun, parts: Mapping[Stage, nn.Module], saved: ResumePoint | None) -> None:
        """parts: on the meta device. Raises ConfigError."""
        config = self.config
        parameters = [p for part in parts.values() for p in part.parameters()]
        check_memory(parameters, config.training, config.optimizer, config.parallel, self.device)
        size = resolved.num_parameters * state_bytes(config.training, config.optimizer)
        done = 0 if saved is None else saved.state["step"]
        check_disk(self.folder / "checkpoints", config.checkpoint, size, done, config.training.steps)

    def _open_data(self, resolved: ResolvedRun) -> None:
        config = self.config
        data, sets, seq_len = config.data, config.evaluation.datasets, config.training.seq_len
        stores = once_per_node(lambda: prepare_datasets(data, sets, config.tokenizer, resolved.tokenizer, seq_len))
        self.data = open_datasets(data, sets, stores, seq_len)
        require_agreement({"data": self.data.name, "evaluation.datasets": self.data.evaluation_names})
        self.order = SampleOrder(self.data.sizes, self.data.phases, config.run.seed, data.shuffle)
        self.held_out = build_eval_sets(self.data.evaluation, config.evaluation, resolved.tokenizer.text_bytes)

    # ------------------------------------------------------------ the loop

    def train(self, stop_request: StopRequest | None = None) -> None:
        """Train up to training.steps, or until some rank is asked to stop. Raises TrainingDiverged and SaveFailed."""
        config = self.config
        steps = config.training.steps
        batches = self._batches()
        stopped = False
        self.metrics.start()
        self.pace.start()
        try:
            while self.steps_done < steps and not stopped:
                rate = learning_rate(config.lr_schedule, config.optimizer.lr, self.steps_done + 1, steps)
                result = self.train_step(batches, rate, stop_request is not None and stop_request.requested)
                self._count_step()
                self.outcomes.put(self.steps_done, self.cursor, result.outcome)
                outcomes = self.outcomes.read(now=self._anything_due())
                if any(outcome.stop for outcome in outcomes):
                    outcomes += self.outcomes.read(now=True)
                    stopped = not outcomes[-1].skipped  # else the next step decides whether the state is good
                bad = [v for v in outcomes if should_roll_back(config.resilience, v, self.rollbacks)]
                if bad:
                    batches, stopped = self._roll_back(bad[0]), False
                else:
                    self._after_step(result, rate, outcomes, stopped)
            with self.watchdog.paused():
                self._record_saves(self.saver.wait(), last=True)
        except TrainingDiverged:
            with self.watchdog.paused():  # what is being written is of a good step
                try:
                    self._settle_saves()
                except SaveFailed as failure:
                    logging.warning(str(failure))
            raise
        finally:
            self.watchdog.close()
            self.saver.close()
            self.metrics.close()
        if self.steps_done < steps:
            logging.info(
                f"stopped as asked at step {self.steps_done}, which is saved; the same command goes on from there"
            )
        else:
            if config.checkpoint.export_huggingface:
                export_run(self.folder)
            logging.info(f"done: step {steps}, {duration(self.metrics.run_watch.elapsed())}, {self.folder}")

    def _after_step(self, result: StepResult, rate: float, outcomes: Sequence[StepOutcome], stopped: bool) -> None:
        """Record, evaluate and save where it is due. verdicts: what is newly known; of this step too, if anything is due."""
        if self.metrics.due(self.steps_done):
            training = self.config.training
            self.metrics.record_training(
                self.steps_done,
                loss=outcomes[-1].loss,
                grad_norm=outcomes[-1].grad_norm,
                learning_rate=rate,
                num_targets=int(result.num_targets.item()),
                tokens_seen=self.tokens_seen,
                tokens=training.global_batch_size * training.seq_len,
                skipped=outcomes[-1].total,
            )
            if slow := self.pace.compare():
                self.metrics.record_event({"kind": "find_straggler", "step": self.steps_done} | slow)
        if self._evaluation_due():
            with self.watchdog.paused():
                self.evaluate()
        last = stopped or self.steps_done == self.config.training.steps
        if last or self._save_due() or self.best.to_save:
            self._save_if_good(outcomes[-1], last)
        else:
            self._record_saves(self.saver.poll())

    def _anything_due(self) -> bool:
        return self.metrics.due(self.steps_done) or self._evaluation_due() or self._save_due()

    def _evaluation_due(self) -> bool:
        return bool(self.held_out) and self._due(self.config.evaluation.interval_steps)

    def _save_due(self) -> bool:
        return self.save_late or self._due(self.config.checkpoint.interval_steps)

    def _save_if_good(self, outcome: StepOutcome, last: bool) -> None:
        """What gave no number may be what the update before has left behind: such a state is not saved, but the next good
        one. At the end there is none; several in a row are no good end."""
        doubtful = outcome.skipped and not outcome.spike
        if doubtful and last and outcome.consecutive_skips > 1:
            raise TrainingDiverged(f"{outcome}; stopped, and this state is not saved")
        self.save_late = doubtful and not last
        if not self.save_late:
            with self.watchdog.paused():
                self.save(last, doubtful)

    def _roll_back(self, outcome: StepOutcome) -> Iterator[Batch]:
        """Go back to the newest checkpoint. Returns the batches from there on, without the samples of the updates that were
        left out."""
        with self.watchdog.paused():
            self._settle_saves()
            saved = resume.find_resume_point(self.saver.folder)
            if saved is None:
                raise TrainingDiverged(f"{outcome}; there is no checkpoint to go back to")
            # What lies before the checkpoint has had its effect, or has none any more.
            size = min(
                outcome.consecutive_skips * self.config.training.global_batch_size,
                outcome.cursor - saved.state["cursor"],
            )
            first, last = self.order.global_index(np.array([outcome.cursor - size, outcome.cursor - 1])).tolist()
            skipped_samples = add_range(self.order.skipped_samples, (first, last + 1))
            logging.warning(
                f"{outcome}; going back to step {saved.state['step']}, and passing over samples {first} to {last}"
            )
            rollbacks, self.save_late = self.rollbacks + 1, False
            self.outcomes.read(now=True)
            self._resume(saved)
            self.rollbacks = rollbacks
            self.order = replace(self.order, skipped_samples=tuple(skipped_samples))
        self.metrics.close()
        self.metrics = self.open_metrics(first_step=self.steps_done)
        self.metrics.start()
        self.pace.start()
        return self._batches()

    def train_step(self, batches: Iterator[Batch], rate: float, stop: bool = False) -> StepResult:
        """One optimizer step. rate: learning rate; stop: whether this rank was asked to."""
        with self.metrics.watch.on("data", synchronize=False) as data:
            microbatches = [next(batches) for _ in range(self.cut.grad_accum)]
        self.pace.after_data(data.seconds)
        return self.engine.update(microbatches, rate, stop, self.saver.before_update)

    def _batches(self) -> Iterator[Batch]:
        pin_memory = self.device.type != "cpu"
        for batch in training_batches(
            self.data.training, self.order, self.cut, self.cursor, self.config.data, pin_memory
        ):
            yield self._to_device(batch)

    def _to_device(self, batch: Batch) -> Batch:
        return batch.apply(lambda t: t.to(self.device, non_blocking=True))

    def _count_step(self) -> None:
        training = self.config.training
        self.steps_done += 1
        self.cursor += training.global_batch_size
        self.tokens_seen += training.global_batch_size * training.seq_len
        self.metrics.after_step()
        self.watchdog.after_step(self.steps_done)

    def _due(self, interval: int) -> bool:
        """Every interval steps and after the last one."""
        return self.steps_done == self.config.training.steps or (interval > 0 and self.steps_done % interval == 0)

    def evaluate(self) -> None:
        """On every set."""
        if self.config.evaluation.keep_best_on:
            self._settle_saves()
        for held_out in self.held_out:
            with self.metrics.watch.on("evaluation") as lap:
                result = held_out.evaluate(self.engine.step, self.cut, self._to_device)
                entropy = held_out.unigram_entropy
            logging.info(
                f"{held_out.name}: loss {result.loss:.4f} nats over {result.num_targets} tokens "
                f"(unigram entropy of the same tokens: {entropy:.4f}, {entropy - result.loss:+.4f} above the loss)"
            )
            record = {"kind": "eval", "step": self.steps_done, "set": held_out.name, "loss": result.loss}
            record |= {"perplexity": result.perplexity, "unigram_entropy": entropy, "num_targets": result.num_targets}
            if result.bits_per_byte is not None:
                record["bits_per_byte"] = result.bits_per_byte
            self.metrics.record_event(record | {"evaluation_time_s": lap.seconds})
            self.best.see(held_out.name, result.loss)

    # ------------------------------------------------------------ what outlives the process

    def _tensors(self) -> dict[str, Tensor]:
        """Everything of a run that is a tensor, by its name in a checkpoint."""
        tensors = {f"model/{name}": p.detach() for name, p in self.engine.parameters.items()}
        tensors |= {f"optimizer/{name}": t for name, t in self.engine.optimizer.state().items()}
        return tensors | {f"stability/{name}": t for name, t in self.engine.guard.state().items()}

    def _all_tensors(self) -> dict[str, Tensor]:
        """The same, and this rank's random state."""
        prefix = f"rng/{dist.get_rank()}/"
        return self._tensors() | {prefix + name: t for name, t in devices.random_state(self.device).items()}

    def save(self, last: bool, doubtful: bool = False) -> None:
        """Begin to save. last: the run ends with it. doubtful: an older checkpoint may be the better one."""
        self._settle_saves()
        self.best.before_save(self.steps_done)
        tensors = self._all_tensors()
        state = {
            "step": self.steps_done,
            "cursor": self.cursor,
            "tokens_seen": self.tokens_seen,
            "world_size": dist.get_world_size(),
            "fingerprint": self.fingerprint,
            "skipped_samples": self.order.skipped_samples,
            "rollbacks": self.rollbacks,
            "mixture": [[phase.start, *phase.quotas] for phase in self.data.phases],
            "best": self.best.state(),
            "rng": sorted(name.rpartition("/")[2] for name in tensors if name.startswith("rng/")),
        }
        files = {
            "train_state.json": json.dumps(state, indent=1).encode(),
            "config.toml": to_toml(self.config).encode(),
            **self.model_files,
        }
        metadata = {key: state[key] for key in ("step", "tokens_seen", "world_size")} | versions()
        metadata["config"] = manifest.digest(files["config.toml"])
        self.metrics.flush()
        devices.synchronize(self.device)
        with self.metrics.watch.on("checkpoint", synchronize=False):  # the copy may go on beside the next step
            self.saver.save(self.steps_done, tensors, files, metadata, self.best.step, keep_all=doubtful)
        self._record_saves(self.saver.poll(), last)

    def _settle_saves(self) -> None:
        """Wait until nothing is being written: how a save has ended decides which checkpoint is the best, for all ranks alike."""
        with self.metrics.watch.on("checkpoint", synchronize=False):
            self._record_saves(self.saver.wait())

    def _record_saves(self, ended: Sequence[SaveResult], last: bool = False) -> None:
        """A save that fails does not end the run, unless it is so set, or the run ends with it (last), or no other would
        succeed either."""
        for save in ended:
            if save.failure is not None:
                self.best.after_failed_save(save.step)
                if (
                    (last and save.step == self.steps_done)
                    or self.config.checkpoint.on_failure == "stop"
                    or isinstance(save.failure, WriterDied)
                ):
                    raise save.failure
                logging.warning(
                    f"{save.failure}; the checkpoints before are whole, and the next is written when it is due"
                )
                continue
            beside = f" + {save.background_s:.1f} s beside training" if save.background_s >= 0.05 else ""
            logging.info(f"saved {save.path} in {save.blocked_s:.1f} s{beside}")
            self.metrics.record_event(
                {
                    "kind": "checkpoint",
                    "step": save.step,
                    "blocked_s": save.blocked_s,
                    "background_s": save.background_s,
                }
            )

    def _resume(self, saved: ResumePoint) -> None:
        """Take over everything that a checkpoint holds."""
        state = saved.state
        resume.require_compatible(saved, self.fingerprint)
        # A rank that the saving run did not have keeps its fresh generators.
        names = state["rng"] if dist.get_rank() < state["world_size"] else []
        fresh = devices.random_state(self.device)
        rng = {name: torch.empty_like(fresh[name]) for name in names if name in fresh}
        prefix = f"rng/{dist.get_rank()}/"
        tensors = self._tensors() | {prefix + name: t for name, t in rng.items()}
        load(saved.path, tensors, self.stored_names | {"stability", "rng"})
        self.engine.optimizer.after_load(state_too=True)
        devices.set_random_state(self.device, rng)
        self.steps_done, self.cursor, self.tokens_seen = state["step"], state["cursor"], state["tokens_seen"]
        self.rollbacks = state["rollbacks"]
        there = run_on_rank_0(lambda: resume.list_checkpoints(saved.path.parent))
        self.best.load_state(state["best"], [step_of(path) for path in there])
        self.order = replace(self.order, skipped_samples=tuple(map(tuple, state["skipped_samples"])))
        begun = int(self.order.global_index(np.array([self.cursor]))[0])
        require_unchanged_phases(state["mixture"], self.data.phases, begun)
        ranks = state["world_size"]
        logging.info(f"resuming from {saved.path} (step {self.steps_done}, saved by {ranks} rank{'s' * (ranks > 1)})")
        for line in changed_settings(saved, self.config):
            logging.info(f"changed since: {line}")
        if saved.rollback:
            run_on_rank_0(lambda: discard_newer_checkpoints(saved))

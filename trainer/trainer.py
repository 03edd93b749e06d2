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
from trainer.checkpoint.async_save import Ended, LostWriter, Saver
from trainer.checkpoint.commit import SaveFailed, load, step_of
from trainer.checkpoint.export import export_run
from trainer.checkpoint.resume import Saved
from trainer.checkpoint.weights import initial_names, load_initial
from trainer.config import Config
from trainer.config.render import to_toml
from trainer.data.build import open_all, prepare_all
from trainer.data.sampling.loader import Cut, SampleOrder, training_batches
from trainer.data.sampling.mixture import require_same_past
from trainer.engine import Engine, StepResult, parts_of_rank
from trainer.evaluate import Best, held_out_sets
from trainer.optim.lr_schedule import learning_rate
from trainer.parallel.attention import ON_CPU, ON_GPU
from trainer.parallel.mesh import Meshes
from trainer.parallel.pipeline import Stage
from trainer.resilience.guard import Stuck, Verdict, Verdicts, add_range, must_go_back
from trainer.resilience.stop_signals import StopRequest
from trainer.resilience.straggler import Pace
from trainer.resilience.watchdog import Watchdog
from trainer.run.metrics import Metrics, duration
from trainer.run.preflight import require_disk, require_memory, state_bytes
from trainer.run.resolve import Setup
from trainer.run.run_folder import (
    changed_settings,
    describe,
    leave_newer,
    model_files,
    open_folder,
    run_folder,
    versions,
    write_down,
)
from trainer.runtime import device as devices
from trainer.runtime.distributed import from_rank_0, once_per_machine, require_agreement
from trainer.system import logging


class Trainer:
    """One run, from a started process group on."""

    def __init__(self, config: Config, setup: Setup, device: torch.device, saved: Saved | None):
        """saved: what to go on from. Raises ConfigError for all that cannot be trained on or written to."""
        self.config = config
        self.device = device
        training = config.training
        self.folder = run_folder(config)
        open_folder(self.folder)
        devices.set_cpu_threads(training.cpu_threads)
        repeats = devices.set_deterministic(config.run.deterministic, device)
        torch.manual_seed(config.run.seed + dist.get_rank())

        meshes = Meshes(setup.dims, device)
        self.cut = Cut(
            global_batch_size=training.global_batch_size,
            local_batch_size=training.local_batch_size,
            rank=meshes.data["batch"].get_local_rank(),
            ranks=setup.dims.batch,
        )
        parts = parts_of_rank(config, setup, meshes, ON_CPU if device.type == "cpu" else ON_GPU)
        self._require_room(setup, parts, saved)
        self._open_data(setup)

        names = setup.parameter_names
        loaded = initial_names(config.checkpoint, names) if saved is None else set(names)
        self.engine = Engine(config, setup, device, meshes, parts, loaded)
        self.pace = Pace(config.resilience.slow_rank_ratio, device)
        for part in parts.values():
            self.pace.watch(part.get_submodule(setup.spec.plan(setup.sizes).blocks))

        self.verdicts = Verdicts(late=self.engine.optimizer.device.type != "cpu")

        self.best = Best(config.evaluation, self.data.held_out_names.get(config.evaluation.best, ""))
        self.steps_done = self.cursor = self.tokens_seen = self.rollbacks = 0
        self.save_late = False
        self.identity = setup.identity | {"data": self.data.name}
        self.stored_names = {f"{kind}/{name}" for kind in ("model", "optimizer") for name in names}
        self.model_files = model_files(config, setup)
        if saved is not None:
            self._resume(saved)
        elif config.checkpoint.initial:
            load_initial(config.checkpoint, setup.spec, setup.sizes, self.engine.parameters, names)
            self.engine.optimizer.after_load(state_too=False)
        self.saver = Saver(config.checkpoint, self.folder / "checkpoints", device, self._all_tensors())
        self.watchdog = Watchdog(config.resilience.hang_timeout_s)
        write_down(config, device)
        describe(config, setup, device, repeats, f"{self.data.name}: {len(self.data.training)}")
        self.open_metrics = partial(
            Metrics,
            config.metrics,
            self.folder if dist.get_rank() == 0 else None,
            device,
            steps=training.steps,
            ranks=dist.get_world_size(),
            flops_per_token=setup.flops_per_token,
            peak_flops=devices.peak_flops(device, training.compute_dtype),
        )
        self.metrics = self.open_metrics(first_step=self.steps_done)

    def _require_room(self, setup: Setup, parts: Mapping[Stage, nn.Module], saved: Saved | None) -> None:
        """parts: on the meta device. Raises ConfigError."""
        config = self.config
        parameters = [p for part in parts.values() for p in part.parameters()]
        require_memory(parameters, config.training, config.optimizer, config.parallel, self.device)
        size = setup.num_parameters * state_bytes(config.training, config.optimizer)
        done = 0 if saved is None else saved.state["step"]
        require_disk(self.folder / "checkpoints", config.checkpoint, size, done, config.training.steps)

    def _open_data(self, setup: Setup) -> None:
        config = self.config
        data, sets, seq_len = config.data, config.evaluation.sets, config.training.seq_len
        stores = once_per_machine(lambda: prepare_all(data, sets, config.tokenizer, setup.tokenizer, seq_len))
        self.data = open_all(data, sets, stores, seq_len)
        require_agreement({"data": self.data.name, "evaluation.sets": self.data.held_out_names})
        self.order = SampleOrder(self.data.sizes, self.data.stages, config.run.seed, data.shuffle)
        self.held_out = held_out_sets(self.data.held_out, config.evaluation, setup.tokenizer.text_bytes)

    # ------------------------------------------------------------ the loop

    def train(self, stop_request: StopRequest | None = None) -> None:
        """Train up to training.steps, or until some rank is asked to stop. Raises Stuck and SaveFailed."""
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
                self.verdicts.put(self.steps_done, self.cursor, result.verdict)
                verdicts = self.verdicts.read(now=self._anything_due())
                if any(verdict.stop for verdict in verdicts):
                    verdicts += self.verdicts.read(now=True)
                    stopped = not verdicts[-1].left_out  # else the next step decides whether the state is good
                bad = [v for v in verdicts if must_go_back(config.resilience, v, self.rollbacks)]
                if bad:
                    batches, stopped = self._roll_back(bad[0]), False
                else:
                    self._after_step(result, rate, verdicts, stopped)
            with self.watchdog.paused():
                self._record_saves(self.saver.wait(), last=True)
        except Stuck:
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

    def _after_step(self, result: StepResult, rate: float, verdicts: Sequence[Verdict], stopped: bool) -> None:
        """Record, evaluate and save where it is due. verdicts: what is newly known; of this step too, if anything is due."""
        if self.metrics.due(self.steps_done):
            training = self.config.training
            self.metrics.record_training(
                self.steps_done,
                loss=verdicts[-1].loss,
                grad_norm=verdicts[-1].grad_norm,
                learning_rate=rate,
                num_targets=int(result.num_targets.item()),
                tokens_seen=self.tokens_seen,
                tokens=training.global_batch_size * training.seq_len,
                left_out=verdicts[-1].total,
            )
            if slow := self.pace.compare():
                self.metrics.record_event({"kind": "slow_rank", "step": self.steps_done} | slow)
        if self._evaluation_due():
            with self.watchdog.paused():
                self.evaluate()
        last = stopped or self.steps_done == self.config.training.steps
        if last or self._save_due() or self.best.to_save:
            self._save_if_good(verdicts[-1], last)
        else:
            self._record_saves(self.saver.ended())

    def _anything_due(self) -> bool:
        return self.metrics.due(self.steps_done) or self._evaluation_due() or self._save_due()

    def _evaluation_due(self) -> bool:
        return bool(self.held_out) and self._due(self.config.evaluation.interval_steps)

    def _save_due(self) -> bool:
        return self.save_late or self._due(self.config.checkpoint.interval_steps)

    def _save_if_good(self, verdict: Verdict, last: bool) -> None:
        """What gave no number may be what the update before has left behind: such a state is not saved, but the next good
        one. At the end there is none; several in a row are no good end."""
        doubtful = verdict.left_out and not verdict.spiked
        if doubtful and last and verdict.in_a_row > 1:
            raise Stuck(f"{verdict}; stopped, and this state is not saved")
        self.save_late = doubtful and not last
        if not self.save_late:
            with self.watchdog.paused():
                self.save(last, doubtful)

    def _roll_back(self, verdict: Verdict) -> Iterator[Batch]:
        """Go back to the newest checkpoint. Returns the batches from there on, without the samples of the updates that were
        left out."""
        with self.watchdog.paused():
            self._settle_saves()
            saved = resume.find(self.saver.folder)
            if saved is None:
                raise Stuck(f"{verdict}; there is no checkpoint to go back to")
            # What lies before the checkpoint has had its effect, or has none any more.
            size = min(
                verdict.in_a_row * self.config.training.global_batch_size, verdict.cursor - saved.state["cursor"]
            )
            first, last = self.order.place(np.array([verdict.cursor - size, verdict.cursor - 1])).tolist()
            passed_over = add_range(self.order.passed_over, (first, last + 1))
            logging.warning(
                f"{verdict}; going back to step {saved.state['step']}, and passing over samples {first} to {last}"
            )
            rollbacks, self.save_late = self.rollbacks + 1, False
            self.verdicts.read(now=True)
            self._resume(saved)
            self.rollbacks = rollbacks
            self.order = replace(self.order, passed_over=tuple(passed_over))
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
        if self.config.evaluation.best:
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
        return tensors | {f"guard/{name}": t for name, t in self.engine.guard.state().items()}

    def _all_tensors(self) -> dict[str, Tensor]:
        """The same, and this rank's random state."""
        prefix = f"random/{dist.get_rank()}/"
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
            "identity": self.identity,
            "passed_over": self.order.passed_over,
            "rollbacks": self.rollbacks,
            "mixture": [[stage.start, *stage.quotas] for stage in self.data.stages],
            "best": self.best.state(),
            "random": sorted(name.rpartition("/")[2] for name in tensors if name.startswith("random/")),
        }
        files = {
            "train_state.json": json.dumps(state, indent=1).encode(),
            "config.toml": to_toml(self.config).encode(),
            **self.model_files,
        }
        about = {key: state[key] for key in ("step", "tokens_seen", "world_size")} | versions()
        about["config"] = manifest.digest(files["config.toml"])
        self.metrics.flush()
        devices.synchronize(self.device)
        with self.metrics.watch.on("checkpoint", synchronize=False):  # the copy may go on beside the next step
            self.saver.save(self.steps_done, tensors, files, about, self.best.step, keep_all=doubtful)
        self._record_saves(self.saver.ended(), last)

    def _settle_saves(self) -> None:
        """Wait until nothing is being written: how a save has ended decides which checkpoint is the best, for all ranks alike."""
        with self.metrics.watch.on("checkpoint", synchronize=False):
            self._record_saves(self.saver.wait())

    def _record_saves(self, ended: Sequence[Ended], last: bool = False) -> None:
        """A save that fails does not end the run, unless it is so set, or the run ends with it (last), or no other would
        succeed either."""
        for save in ended:
            if save.failure is not None:
                self.best.after_failed_save(save.step)
                if (
                    (last and save.step == self.steps_done)
                    or self.config.checkpoint.on_failure == "stop"
                    or isinstance(save.failure, LostWriter)
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

    def _resume(self, saved: Saved) -> None:
        """Take over everything that a checkpoint holds."""
        state = saved.state
        resume.require_same(saved, self.identity)
        # A rank that the saving run did not have keeps its fresh generators.
        names = state["random"] if dist.get_rank() < state["world_size"] else []
        fresh = devices.random_state(self.device)
        random = {name: torch.empty_like(fresh[name]) for name in names if name in fresh}
        prefix = f"random/{dist.get_rank()}/"
        tensors = self._tensors() | {prefix + name: t for name, t in random.items()}
        load(saved.path, tensors, self.stored_names | {"guard", "random"})
        self.engine.optimizer.after_load(state_too=True)
        devices.set_random_state(self.device, random)
        self.steps_done, self.cursor, self.tokens_seen = state["step"], state["cursor"], state["tokens_seen"]
        self.rollbacks = state["rollbacks"]
        there = from_rank_0(lambda: resume.candidates(saved.path.parent))
        self.best.load_state(state["best"], [step_of(path) for path in there])
        self.order = replace(self.order, passed_over=tuple(map(tuple, state["passed_over"])))
        begun = int(self.order.place(np.array([self.cursor]))[0])
        require_same_past(state["mixture"], self.data.stages, begun)
        ranks = state["world_size"]
        logging.info(f"resuming from {saved.path} (step {self.steps_done}, saved by {ranks} rank{'s' * (ranks > 1)})")
        for line in changed_settings(saved, self.config):
            logging.info(f"changed since: {line}")
        if saved.rollback:
            from_rank_0(lambda: leave_newer(saved))

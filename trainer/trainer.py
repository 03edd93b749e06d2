"""The training loop."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from trainer.batch import Batch
from trainer.checkpoint.commit import SaveFailed
from trainer.checkpoint.export import export_run
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume import find_resume_point
from trainer.config import Config
from trainer.engine import Engine, StepResult
from trainer.evaluate import Evaluator
from trainer.optim.lr_schedule import learning_rate
from trainer.resilience.guard import StepMonitor, StepOutcome, TrainingDiverged
from trainer.resilience.stop_signals import StopRequest
from trainer.resilience.straggler import StragglerDetector
from trainer.resilience.watchdog import Watchdog
from trainer.run.metrics import Metrics, duration
from trainer.run.training_data import TrainingData
from trainer.runtime import device as devices
from trainer.state import TrainState
from trainer.system import logging


class Trainer:
    """The training loop of one run. `build_trainer` constructs its components."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        state: TrainState,
        engine: Engine,
        data: TrainingData,
        evaluator: Evaluator,
        checkpoints: CheckpointManager,
        monitor: StepMonitor,
        metrics: Metrics,
        stragglers: StragglerDetector,
        watchdog: Watchdog,
    ):
        self.config = config
        self.folder = folder
        self.steps = config.training.steps
        self.state = state
        self.engine = engine
        self.data = data
        self.evaluator = evaluator
        self.checkpoints = checkpoints
        self.monitor = monitor
        self.metrics = metrics
        self.stragglers = stragglers
        self.watchdog = watchdog

    def train(self, stop: StopRequest | None = None) -> None:
        """Train until training.steps are completed or any rank is asked to stop. Raise TrainingDiverged or SaveFailed."""
        batches = self._start(self.state)
        stopped = False
        try:
            while self.state.step < self.steps and not stopped:
                result = self.train_step(batches, stop is not None and stop.requested)
                seen = self.monitor.observe(self.state, result.outcome, now=self._anything_due())
                if seen.failed:
                    batches = self.roll_back(seen.failed)
                    continue
                stopped = seen.stop
                self._after_step(result, seen.latest, last=stopped or self.state.step == self.steps)
            self._wait_for_saves()
        except TrainingDiverged:
            try:
                self._wait_for_saves()  # the save in flight contains a good step
            except SaveFailed as failure:
                logging.warning(str(failure))
            raise
        finally:
            self.watchdog.close()
            self.checkpoints.close()
            self.metrics.close()
        self._report_end()

    def train_step(self, batches: Iterator[Batch], stop: bool = False) -> StepResult:
        """Run one optimizer step. stop: whether this rank was asked to stop."""
        training = self.config.training
        with self.metrics.timers.section("data", synchronize=False) as section:
            microbatches = list(islice(batches, self.data.partition.grad_accum))
        self.stragglers.after_data(section.seconds)
        result = self.engine.step(microbatches, self._lr(self.state.step + 1), stop, self.checkpoints.before_update)
        self.state.advance(training.global_batch_size, training.seq_len)
        self.metrics.after_step()
        self.watchdog.after_step(self.state.step)
        return result

    def _after_step(self, result: StepResult, outcome: StepOutcome | None, last: bool) -> None:
        """Log, evaluate and save if due after this step. outcome: this step's outcome, or None if nothing is due."""
        step = self.state.step
        if self.metrics.due(step):
            self.metrics.log_step(self.state, outcome, self._lr(step), int(result.num_targets.item()))
            if straggler := self.stragglers.compare():
                self.metrics.log_event({"kind": "straggler", "step": step} | straggler)
        if self.evaluator.due(step):
            self.evaluate()
        if last or self.checkpoints.due(step):
            self.save(outcome, last)
        else:
            self.metrics.log_saves(self.checkpoints.poll())

    def evaluate(self) -> None:
        """Evaluate on every evaluation dataset."""
        if self.checkpoints.best.dataset:
            self._wait_for_saves()
        with self.watchdog.paused():
            for dataset in self.evaluator.datasets:
                with self.metrics.timers.section("evaluation") as section:
                    result = self.evaluator.run(dataset)
                record = {"kind": "eval", "step": self.state.step, "dataset": dataset.name} | result.record()
                self.metrics.log_event(record | {"evaluation_time_s": section.seconds})
                self.checkpoints.best.update(dataset.name, result.loss)

    def save(self, outcome: StepOutcome, last: bool) -> None:
        """Start to save the state. Raise TrainingDiverged if the run ends with several skipped steps."""
        if last:
            self.monitor.require_good_end(outcome)
        self.metrics.flush()
        devices.synchronize(self.engine.device)
        with self.watchdog.paused(), self.metrics.timers.section("checkpoint", synchronize=False):
            saves = self.checkpoints.save(self.state, suspect=outcome.suspect, last=last)
        self.metrics.log_saves(saves)

    def roll_back(self, outcome: StepOutcome) -> Iterator[Batch]:
        """Restore the latest checkpoint and skip the samples of the skipped steps. Return the batches after those."""
        state = self.state
        self._wait_for_saves()
        with self.watchdog.paused():
            point = find_resume_point(self.checkpoints.folder)
            if point is None:
                raise TrainingDiverged(f"{outcome}; there is no checkpoint to roll back to")
            # Samples before the checkpoint's cursor are part of its state or were skipped by an earlier rollback.
            skipped = outcome.consecutive_skips * self.config.training.global_batch_size
            first = max(outcome.cursor - skipped, point.state.cursor)
            start, stop = self.data.sample_range(state, first, outcome.cursor)
            logging.warning(
                f"{outcome}; rolling back to step {point.state.step}, skipping samples {start} to {stop - 1}"
            )
            rollbacks, skipped_samples = state.rollbacks, state.skipped_samples
            self.monitor.reset()
            self.checkpoints.restore(point, state)
            state.rollbacks, state.skipped_samples = rollbacks + 1, skipped_samples
            state.skip(start, stop)
        self.metrics.rewind(state.step)
        return self._start(state)

    def _start(self, state: TrainState) -> Iterator[Batch]:
        self.metrics.start()
        self.stragglers.start()
        return self.data.batches(state)

    def _lr(self, step: int) -> float:
        return learning_rate(self.config.lr_schedule, self.config.optimizer.lr, step, self.steps)

    def _anything_due(self) -> bool:
        return any(component.due(self.state.step) for component in (self.metrics, self.evaluator, self.checkpoints))

    def _wait_for_saves(self) -> None:
        with self.watchdog.paused(), self.metrics.timers.section("checkpoint", synchronize=False):
            saves = self.checkpoints.wait()
        self.metrics.log_saves(saves)

    def _report_end(self) -> None:
        if self.state.step < self.steps:
            logging.info(f"stopped at step {self.state.step} (checkpoint saved); rerun the same command to resume")
            return
        if self.config.checkpoint.export_huggingface:
            export_run(self.folder)
        logging.info(f"done: step {self.steps}, {duration(self.metrics.run_timers.elapsed())}, {self.folder}")

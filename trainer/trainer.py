"""The training loop."""

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TextIO

from trainer.base.config import Config
from trainer.base.system import console
from trainer.base.system.paths import BEST
from trainer.base.system.signals import StopRequest
from trainer.base.system.units import duration
from trainer.batch import Batch
from trainer.checkpoint.commit import SaveFailed
from trainer.checkpoint.formats.export import export_run
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume import find_resume_point
from trainer.engine import Engine, StepResult
from trainer.evaluate import Evaluator, evaluation_line
from trainer.inference.samples import SampleGenerator
from trainer.optim.lr_schedule import lr_factor
from trainer.resilience.early_stopping import EarlyStopping
from trainer.resilience.guard import StepMonitor, StepOutcome, TrainingDiverged
from trainer.resilience.health import problem_at_end
from trainer.resilience.straggler import StragglerDetector
from trainer.resilience.watchdog import Watchdog
from trainer.run.metrics import Metrics
from trainer.run.profiler import Profiler
from trainer.run.run_folder import acquire_lock, already_finished
from trainer.run.sinks.sink import Ending
from trainer.run.training_data import TrainingData
from trainer.runtime import device as devices
from trainer.state import TrainState
from trainer.tasks import TaskEvaluator, task_line


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The training loop of one run. `build_trainer` constructs its components."""

    config: Config
    state: TrainState
    engine: Engine
    data: TrainingData
    evaluator: Evaluator
    tasks: TaskEvaluator
    samples: SampleGenerator
    checkpoints: CheckpointManager
    early_stopping: EarlyStopping
    monitor: StepMonitor
    metrics: Metrics
    stragglers: StragglerDetector
    profiler: Profiler
    watchdog: Watchdog
    stop: StopRequest
    """Whether this rank was asked to stop."""
    lock: TextIO | None
    """Lock of the run folder, on rank 0."""

    def train(self) -> None:
        """Train until training.steps are completed, the evaluations no longer improve, or any rank is asked to stop. Raises
        TrainingDiverged, SaveFailed or LoadingFailed."""
        start_s = time.monotonic()
        with acquire_lock(self.config.run.folder) or nullcontext():  # a run before this one may have released it
            if already_finished(self.config, self.state, self.early_stopping.reason(self.state)):
                self.checkpoints.finish_mirror()
                self.checkpoints.close()
                return
            self._make_steps()
            self._finish(time.monotonic() - start_s)

    def _make_steps(self) -> None:
        state, steps = self.state, self.config.training.steps
        self.watchdog.start()
        batches = self._start()
        end_interrupts = self.stop.receive_interrupts()
        ended, ending = False, Ending.FAILED
        try:
            while state.step < steps and not ended:
                result = self.train_step(batches)
                due = any(part.due(state.step) for part in self._parts)
                verdict = self.monitor.observe(state, result.outcome, now=due)
                if verdict.roll_back:
                    batches = self.roll_back(verdict.roll_back)
                    continue
                ended = self._after_step(verdict.outcome, result, verdict.stop)
            self._wait_for_saves()
            with self.watchdog.paused():
                self.checkpoints.finish_mirror()
            if self.profiler.recording:
                self._profile(self.profiler.stop)
            is_complete = state.step == steps or self.early_stopping.reason(state)
            ending = Ending.FINISHED if is_complete else Ending.STOPPED
        except TrainingDiverged:
            try:
                self._wait_for_saves()  # the save in flight contains a good step
            except SaveFailed as failure:
                console.warning(str(failure))
            raise
        finally:
            batches.close()
            self.watchdog.close()
            self.checkpoints.close()
            self.stop.has_ended = True
            self.metrics.end(state.step, ending, problem_at_end(state))
            end_interrupts()

    def _finish(self, seconds: float) -> None:
        """Log how the run has ended, and export the model of a run that is complete."""
        folder, step = self.config.run.folder, self.state.step
        if step != self.config.training.steps:
            reason = self.early_stopping.reason(self.state)
            if not reason:
                self._log_request_to_stop()
                return
            console.info(f"stopped early: {reason}")
        export_run(folder, self.config.checkpoint)
        best_step = self.checkpoints.best.step
        best = f"; the best checkpoint is {folder}{BEST}, of step {best_step}" if best_step not in (0, step) else ""
        line = f"done: step {step}, {duration(seconds)}, {folder}{best}"
        if problem := problem_at_end(self.state):
            console.warning(f"{line}; {problem}")
        else:
            console.info(line)

    def _log_request_to_stop(self) -> None:
        if self.config.checkpoint.enabled:
            message = "(checkpoint saved); rerun the same command to resume"
        else:
            message = "(no checkpoint saved, because [checkpoint] enabled = false)"
        console.info(f"stopped at step {self.state.step} {message}")

    def train_step(self, batches: Generator[Batch]) -> StepResult:
        """Run one optimizer step."""
        training = self.config.training
        num_samples = training.batch_size(self.state.step + 1)
        if self.profiler.starts_at(self.state.step + 1):
            self._profile(self.profiler.start)
        with self.metrics.section("data") as seconds:
            microbatches = []
            for _ in range(self.data.partition.num_microbatches(num_samples)):
                with self.watchdog.loading():
                    microbatches.append(next(batches))
        self.stragglers.after_data(seconds())
        lr = self._lr(self.state.step + 1)
        result = self.engine.step(microbatches, lr, self.stop.requested, self.checkpoints.before_update)
        self.state.advance(num_samples, training.seq_len)
        for phase in self.data.phases_in(self.state, num_samples):
            self.metrics.log_phase(self.state.step, phase)
        if self.profiler.ends_after(self.state.step):
            self._profile(self.profiler.stop)
        self.watchdog.after_step(self.state.step, training.batch_size(self.state.step + 1) / num_samples)
        return result

    def _after_step(self, outcome: StepOutcome | None, result: StepResult, asked_to_stop: bool) -> bool:
        """Log, evaluate and save, each only if it is due. Return whether the run ends after this step.

        Args:
            outcome: Outcome of the step. None if nothing is due.
            result: Result of the step.
            asked_to_stop: Whether any rank was asked to stop.
        """
        step = self.state.step
        if self.metrics.due(step):
            self._log_step(outcome, result)
            if straggler := self.stragglers.compare():
                self.metrics.log_event({"kind": "straggler", "step": step} | straggler)
        if self.evaluator.due(step) or self.tasks.due(step):
            self.evaluate()
        stops_early = bool(self.early_stopping.reason(self.state))
        if stops_early:  # after the last step, all are used
            self.evaluate(others=True)
        if self.samples.due(step) or (stops_early and self.samples.prompts):
            self.sample()
        last = asked_to_stop or step == self.config.training.steps or stops_early
        if last or self.checkpoints.due(step):
            if not self.metrics.due(step):  # a run that resumes from this checkpoint records only later steps
                self._log_step(outcome, result)
            self.save(outcome, last)
        else:
            self.metrics.log_saves(self.checkpoints.poll())
        return last

    def _log_step(self, outcome: StepOutcome, result: StepResult) -> None:
        objective = self.engine.objective
        values = {objective.unit: int(result.num_terms.item())}
        values |= {name: result.means[name].item() for name in objective.metrics}
        values |= {name: value.item() for name, value in result.routing.items()}
        self.metrics.log_step(self.state, outcome, self._lr(self.state.step), values)

    def evaluate(self, others: bool = False) -> None:
        """Evaluate on the evaluation datasets and on the tasks that are due, or on all others."""
        step, forward = self.state.step, self.engine.forward_backward
        weights = " (averages)" if self.config.evaluation.averaged else ""
        if self.checkpoints.best.criterion.name:
            self._wait_for_saves()
        devices.synchronize(self.engine.device)  # the section must not include the work of the step
        with self.watchdog.evaluating(), self._evaluated_weights():
            for dataset in self.evaluator.datasets if self.evaluator.due(step) != others else ():
                with self.metrics.section("evaluation") as seconds:
                    result = self.evaluator.run(dataset, forward, self.watchdog.loading)
                line = evaluation_line(f"{dataset.name}{weights}", result, self.evaluator.objective)
                self._log_result("eval", "dataset", dataset.name, line, result | {"evaluation_time_s": seconds()})
            for task in self.tasks.due_tasks(step, others):
                with self.metrics.section("tasks") as seconds:
                    result = self.tasks.run(task, forward, self.watchdog.loading, step)
                line = f"{task_line(f'{task.name}{weights}', task, result)} in {seconds():.1f} s"
                values = result | task.chance_level | {"tasks_time_s": seconds()}
                self._log_result("task", "task", task.name, line, values)

    def _log_result(self, kind: str, key: str, name: str, line: str, result: Mapping[str, float]) -> None:
        """Log the result of an evaluation dataset or of a task, and note whether it is the best one so far."""
        self.early_stopping.observe(self.state, name, result)
        best = "; best so far" if self.checkpoints.best.update(name, result) else ""
        console.info(f"step {self.state.step} | {line}{best}")
        self.metrics.log_event({"kind": kind, "step": self.state.step, key: name} | dict(result))

    def sample(self) -> None:
        """Generate a text from each prompt, and record the texts."""
        devices.synchronize(self.engine.device)  # the section must not include the work of the step
        with self.watchdog.evaluating(), self._evaluated_weights(), self.metrics.section("samples") as seconds:
            texts = self.samples.run(self.engine.forward_backward, self.watchdog.loading)
        record = {"kind": "samples", "step": self.state.step, "samples": texts}
        self.metrics.log_event(record | {"samples_time_s": seconds()})

    def _evaluated_weights(self) -> AbstractContextManager[None]:
        """Context manager in which the model has the weights to evaluate."""
        self.checkpoints.before_update()
        return self.engine.evaluated_weights()

    def save(self, outcome: StepOutcome, last: bool) -> None:
        """Start to save the state. Raises TrainingDiverged if the run ends after several non-finite steps in a row."""
        if last:
            self.monitor.require_good_end(outcome)
        devices.synchronize(self.engine.device)
        with self.watchdog.paused(), self.metrics.section("checkpoint"):
            saves = self.checkpoints.save(self.state, suspect=outcome.suspect, last=last)
        self.metrics.log_saves(saves)

    def roll_back(self, outcome: StepOutcome) -> Generator[Batch]:
        """Restore the latest checkpoint. Return the batches that follow it, without the samples of the skipped steps."""
        state = self.state
        self._wait_for_saves()
        with self.watchdog.paused():
            point = find_resume_point(self.checkpoints.folder)
            if point is None:
                raise TrainingDiverged(f"{outcome}; there is no checkpoint to roll back to")
            # Samples before the checkpoint's cursor are part of its state or were skipped by an earlier rollback.
            last_good = outcome.step - outcome.consecutive_skips
            skipped = self.config.training.samples_between(last_good, outcome.step)
            first = max(outcome.cursor - skipped, point.state.cursor)
            start, stop = self.data.sample_range(state, first, outcome.cursor)
            console.warning(
                f"{outcome}; rolling back to step {point.state.step}, skipping samples {start} to {stop - 1}"
            )
            # Restoring sets both to the checkpoint's older values.
            rollbacks, skipped_samples = state.rollbacks, state.skipped_samples
            self.checkpoints.restore(point, state)
            state.rollbacks, state.skipped_samples = rollbacks + 1, skipped_samples
            state.skip(start, stop)
        return self._start()

    @property
    def _parts(self) -> tuple[Metrics, Evaluator, TaskEvaluator, SampleGenerator, CheckpointManager]:
        """What is done after some steps."""
        return self.metrics, self.evaluator, self.tasks, self.samples, self.checkpoints

    def _start(self) -> Generator[Batch]:
        self.metrics.rewind(self.state.step)
        self.stragglers.start()
        return self.data.batches(self.state)

    def _profile(self, work: Callable[[], None]) -> None:
        devices.synchronize(self.engine.device)  # the section must not include the work of the step
        with self.watchdog.paused(), self.metrics.section("profiling"):
            work()

    def _lr(self, step: int) -> float:
        config = self.config
        return config.optimizer.lr * lr_factor(config.lr_schedule, step, config.training.steps)

    def _wait_for_saves(self) -> None:
        with self.watchdog.paused(), self.metrics.section("checkpoint"):
            saves = self.checkpoints.wait()
        self.metrics.log_saves(saves)

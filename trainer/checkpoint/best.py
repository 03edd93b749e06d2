"""The checkpoint with the lowest evaluation loss, or with the best score of a task."""

from collections.abc import Collection, Mapping

from trainer.base.config import EvaluationConfig
from trainer.base.system import console


class BestTracker:
    """Tracker of the checkpoint that is the best one by [evaluation] keep_best_on. This checkpoint is never pruned."""

    def __init__(self, config: EvaluationConfig, data: str):
        """data: name of the dataset's token store, or hash of the task, which change with their content. It is "" if the dataset
        consists of documents held out of the training data."""
        self.criterion = config.criterion
        averaged = "/averaged" if config.averaged else ""
        what = f"{config.keep_best_on}/{config.max_samples}"
        if self.criterion.name in config.tasks:
            what = f"{self.criterion.name}/{self.criterion.metric}"
        self.identity = f"{what}/{data}{averaged}"
        self._saved = self._previous = (0, self.criterion.worst)
        self._pending: float | None = None

    @property
    def step(self) -> int:
        """Step of the best checkpoint, or 0 if there is none."""
        return self._saved[0]

    @property
    def pending(self) -> bool:
        """Whether the loss or the score has improved since the last save."""
        return self._pending is not None

    def update(self, name: str, result: Mapping[str, float]) -> bool:
        """Return whether the result is the best one so far. If so, the next checkpoint is the best one.

        Args:
            name: Evaluation dataset or task.
            result: Its metrics by name.
        """
        criterion = self.criterion
        is_best = name == criterion.name and criterion.is_better(result[criterion.metric], self._saved[1])
        if is_best:
            self._pending = result[criterion.metric]
        return is_best

    def before_save(self, step: int) -> None:
        if self._pending is not None:
            self._previous, self._saved, self._pending = self._saved, (step, self._pending), None

    def after_failed_save(self, step: int) -> None:
        if step == self.step:
            self._saved = self._previous

    def state(self) -> list:
        return [self.identity, *self._saved] if self.step else []

    def load_state(self, state: list, steps: Collection[int]) -> None:
        """Restore the best step, unless the evaluation data changed or the checkpoint of this step no longer exists. steps: steps
        of the existing checkpoints."""
        valid = state[:1] == [self.identity] and state[1] in steps
        if state and self.criterion.name and not valid:
            console.info(
                f"ignoring the previous best step {state[1]}, because the evaluation changed (keep_best_on, its data, the "
                "options of the task or [evaluation] averaged), or that checkpoint is missing"
            )
        self._saved, self._pending = (state[1], state[2]) if valid else (0, self.criterion.worst), None

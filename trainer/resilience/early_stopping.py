"""Early stopping: a run ends when the loss on an evaluation dataset, or the score of a task, no longer improves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.base.config import EvaluationConfig
from trainer.base.system.spelling import counted
from trainer.state import TrainState


@dataclass(frozen=True)
class EarlyStopping:
    """Policy whose memory is `TrainState.early_stopping`, so that a resume or a rollback restores it: the identity of the data,
    the best value (None: no finite one yet), and the number of evaluations since."""

    config: EvaluationConfig
    identity: str
    """Identity of the evaluation data. Other data begin a new count."""

    def observe(self, state: TrainState, name: str, result: Mapping[str, float]) -> None:
        """Count an evaluation. A value that is not better than the best one by more than the minimum does not improve.

        Args:
            state: Holds the memory of this policy.
            name: Evaluation dataset or task.
            result: Its metrics by name.
        """
        criterion = self.config.criterion
        if not self.config.early_stopping_patience or name != criterion.name:
            return
        value, (best, count) = result[criterion.metric], self._memory(state)
        delta = self.config.early_stopping_min_delta
        improves = math.isfinite(value) if best is None else criterion.is_better(value, best, delta)
        state.early_stopping = [self.identity, value, 0] if improves else [self.identity, best, count + 1]

    def reason(self, state: TrainState) -> str:
        """Return why the run ends, or "" if it continues."""
        patience, (best, count) = self.config.early_stopping_patience, self._memory(state)
        if not patience or count < patience:
            return ""
        criterion = self.config.criterion
        beyond = "been finite"
        if best is not None:
            beyond = f"{'fallen below' if criterion.falls else 'risen above'} {best:.4f}"
            if self.config.early_stopping_min_delta:
                beyond += f" by more than {self.config.early_stopping_min_delta:g}"
        return f"{criterion} has not {beyond} in {counted(count, 'evaluation')}"

    def _memory(self, state: TrainState) -> tuple[float | None, int]:
        match state.early_stopping:
            case [self.identity, float() | None as best, int(count)]:
                return best, count
        return None, 0

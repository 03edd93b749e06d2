"""Early stopping: a run ends when the loss on an evaluation dataset no longer falls."""

import math
from dataclasses import dataclass

from trainer.base.config import EvaluationConfig
from trainer.base.system.spelling import counted
from trainer.state import TrainState


@dataclass(frozen=True)
class EarlyStopping:
    """Policy whose memory is `TrainState.early_stopping`, so that a resume or a rollback restores it: the identity of the data,
    the lowest loss (None: no finite loss yet), and the number of evaluations since."""

    config: EvaluationConfig
    identity: str
    """Identity of the evaluation data. Other data begin a new count."""

    def observe(self, state: TrainState, dataset: str, loss: float) -> None:
        """Count an evaluation. A loss that is not lower than the lowest by more than the minimum is none that falls."""
        if not self.config.early_stopping_patience or dataset != self.config.keep_best_on:
            return
        lowest, count = self._memory(state)
        falls = math.isfinite(loss) if lowest is None else loss < lowest - self.config.early_stopping_min_delta
        state.early_stopping = [self.identity, loss, 0] if falls else [self.identity, lowest, count + 1]

    def reason(self, state: TrainState) -> str:
        """Return why the run ends, or "" if it continues."""
        patience, (lowest, count) = self.config.early_stopping_patience, self._memory(state)
        if not patience or count < patience:
            return ""
        below = "been finite" if lowest is None else f"fallen below {lowest:.4f}"
        if lowest is not None and self.config.early_stopping_min_delta:
            below += f" by more than {self.config.early_stopping_min_delta:g}"
        return f"the loss on {self.config.keep_best_on} has not {below} in {counted(count, 'evaluation')}"

    def _memory(self, state: TrainState) -> tuple[float | None, int]:
        match state.early_stopping:
            case [self.identity, float() | None as lowest, int(count)]:
                return lowest, count
        return None, 0

"""Policy for non-finite steps and loss spikes: when an update is skipped, and when a run rolls back or stops."""

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import ResilienceConfig
from trainer.runtime.host_memory import Event, HostTransfer
from trainer.state import TrainState
from trainer.system import logging

WINDOW = 128
"""Number of most recent accepted steps. A spike is detected by comparison with their losses and gradient norms."""
_MIN_HISTORY = 32
"""Minimum number of accepted steps before a step can count as a spike."""


@dataclass(frozen=True)
class StepOutcome:
    """Result of one step, identical on every rank."""

    step: int
    cursor: int
    """Number of samples consumed, including those of this step."""
    stop: bool
    """Whether any rank was asked to stop."""
    consecutive_skips: int
    """Number of skipped steps in a row, up to and including this one."""
    total_skips: int
    """Number of skipped steps since the start of the run."""
    loss: float
    grad_norm: float

    @property
    def skipped(self) -> bool:
        return self.consecutive_skips > 0

    @property
    def suspect(self) -> bool:
        """Whether the loss or the gradient norm was non-finite. If so, the previous update may have corrupted the parameters."""
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))

    @property
    def spike(self) -> bool:
        """Whether a spike was the reason for a skip."""
        return self.skipped and not self.suspect

    def __str__(self) -> str:
        return f"step {self.step}: loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}"


class TrainingDiverged(Exception):
    """Error that ends a run that cannot recover by itself. Its message is one line for the user. The exit code is 1."""


def should_roll_back(config: ResilienceConfig, outcome: StepOutcome, rollbacks: int) -> bool:
    """Return whether to roll back. Raise TrainingDiverged if the run must stop. rollbacks: number of rollbacks so far."""
    if not (outcome.spike and config.on_loss_spike == "rollback"):
        if outcome.consecutive_skips < config.max_consecutive_skips:
            return False
        if config.on_max_skips != "rollback":
            raise TrainingDiverged(
                f"{outcome}; {outcome.consecutive_skips} steps in a row were skipped: training stops, and this state is not "
                "saved. Resume from an earlier checkpoint (--checkpoint.load_step) with a lower learning rate or a longer warm-up"
            )
    if rollbacks == config.max_rollbacks:
        raise TrainingDiverged(
            f"{outcome}; the maximum of {rollbacks} rollbacks is reached: training stops, and this state is not saved"
        )
    return True


class StabilityGuard:
    """Guard that decides on the device whether to skip an update. The host reads the decision later."""

    def __init__(self, config: ResilienceConfig, device: torch.device):
        self.config = config
        # numbers of accepted steps, of skipped steps in a row, and of all skipped steps
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)
        self.history = torch.zeros(2, WINDOW, device=device)  # ring buffer: loss and gradient norm of accepted steps
        self.slots = torch.arange(WINDOW, device=device)
        # what an accepted and a skipped step add to the counts
        self.if_accepted, self.if_skipped = torch.tensor([[1, 0, 0], [0, 1, 1]], device=device)

    @torch.no_grad()
    def decide(self, loss: Tensor, grad_norm: Tensor, votes: Tensor) -> tuple[Tensor, Tensor]:
        """Return a scalar that is true if the update must be skipped, and the outcome tensor for StepMonitor. All arguments are
        scalars. votes: number of ranks that were asked to stop."""
        # With offloaded parameters, loss and gradient norm are on different devices.
        values = torch.stack([value.to(self.counts.device) for value in (loss, grad_norm)])
        accept = (values.abs() < math.inf).all()  # false for NaN, and faster than isfinite
        accepted, consecutive_skips, _ = self.counts.unbind()
        if self.config.on_loss_spike != "off":
            filled = (self.slots < accepted).float()
            mean = (self.history * filled).sum(1) / filled.sum().clamp(min=1)
            variance = ((self.history - mean[:, None]).square() * filled).sum(1) / filled.sum().clamp(min=1)
            high = values > mean + self.config.spike_threshold_sigma * variance.sqrt()
            accept = accept & ~(high.any() & (accepted >= _MIN_HISTORY))
        skipped = ~accept
        # Recorded under every policy, because on_loss_spike may be switched on when the run is resumed.
        slot = self.slots == accepted % WINDOW
        torch.where(slot & accept, values[:, None], self.history, out=self.history)
        self.counts += torch.where(accept, self.if_accepted, self.if_skipped)
        consecutive_skips *= skipped  # a view of self.counts
        return skipped, torch.cat((votes[None], values, self.counts))

    def state(self) -> dict[str, Tensor]:
        """Return the guard's tensors that are saved in checkpoints: the tensors in use, not copies."""
        return {"counts": self.counts, "history": self.history}


class StepMonitor:
    """Monitor that reads step outcomes and applies the policy for skipped steps. On a GPU, it reads each outcome one step late,
    so that the host does not wait for the device."""

    def __init__(self, config: ResilienceConfig, device: torch.device):
        """device: device that holds the outcome tensors."""
        self.config = config
        self.late = device.type != "cpu"
        self.transfer = HostTransfer(device)
        self.unread: deque[tuple[int, int, Tensor, Event | None]] = deque()
        """Step, cursor, tensor in host memory and event of each unread outcome. The event, if any, completes when the tensor is
        filled."""

    def observe(
        self, state: TrainState, outcome: Tensor, now: bool
    ) -> tuple[StepOutcome | None, StepOutcome | None, bool]:
        """Return the newest outcome that was read, the first outcome that requires a rollback, and whether to stop.

        outcome: outcome of the latest step of `state`. now: whether to read this outcome immediately, even if the host must wait.
        A run stops if a rank was asked to stop and the newest step was not skipped. After a skipped step it continues, because
        only the next step shows whether the state is good. Raise TrainingDiverged in the same cases as should_roll_back.
        """
        values, copied = outcome, None
        if outcome.device.type != "cpu":
            values = self.transfer.host_like(outcome, outcome.dtype)
            copied = self.transfer.copy([values], [outcome])
        self.unread.append((state.step, state.cursor, values, copied))
        outcomes = self._read(now)
        stop = any(o.stop for o in outcomes)
        if stop:
            outcomes += self._read(now=True)
        failed = [o for o in outcomes if should_roll_back(self.config, o, state.rollbacks)]
        if failed:
            self._read(now=True)  # the rollback discards these steps
        latest = outcomes[-1] if outcomes else None
        return latest, failed[0] if failed else None, stop and not outcomes[-1].skipped

    def _read(self, now: bool) -> list[StepOutcome]:
        """Return the unread outcomes, oldest first, and log a warning for each skipped step. On a GPU, the newest outcome stays
        unread unless `now` is true."""
        outcomes = []
        while len(self.unread) > (1 if self.late and not now else 0):
            step, cursor, values, copied = self.unread.popleft()
            if copied is not None:
                copied.synchronize()
            votes, loss, grad_norm, _, consecutive, total = values.tolist()
            outcome = StepOutcome(step, cursor, votes > 0, int(consecutive), int(total), loss, grad_norm)
            if outcome.skipped:
                counts = f"{outcome.consecutive_skips} in a row, {outcome.total_skips} in total"
                logging.warning(f"{outcome}; update skipped ({counts})")
            outcomes.append(outcome)
        return outcomes

    def require_good_end(self, outcome: StepOutcome) -> None:
        """Raise TrainingDiverged if the run would end after several non-finite steps in a row."""
        if outcome.suspect and outcome.consecutive_skips > 1:
            raise TrainingDiverged(f"{outcome}: training stops, and this state is not saved")

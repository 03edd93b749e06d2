"""What a run does when it is asked to stop, when an update is no good, and when nothing moves any more."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import ResilienceConfig
from trainer.runtime import device as devices
from trainer.state import TrainState
from trainer.system import logging

WINDOW = 128
"""Accepted steps that a spike is measured against."""
_FIRST_JUDGED = 32
"""Accepted steps before anything counts as a spike."""


# ---------------------------------------------------------------- being asked to stop


# ---------------------------------------------------------------- updates that are not made


@dataclass(frozen=True)
class StepOutcome:
    """On a step, the same on every rank."""

    step: int
    cursor: int
    """Behind the samples of the step."""
    stop: bool
    """Some rank was asked to."""
    skipped: bool
    """The update was not made."""
    spike: bool
    """It was not made for that reason."""
    consecutive_skips: int
    """Updates that were not made, up to this one."""
    total: int
    """Updates that were not made since the start of the run."""
    loss: float
    grad_norm: float

    @property
    def suspect(self) -> bool:
        """Whether the step was non-finite: the previous update may have corrupted the parameters."""
        return self.skipped and not self.spike

    def __str__(self) -> str:
        return f"step {self.step}: loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}"


class TrainingDiverged(Exception):
    """Training has come to a point from which it does not come back: one line for the user, exit code 1."""


class OutcomeReader:
    """What the device has decided, read when it costs nothing: a step late, unless the host waits for the device anyway."""

    def __init__(self, late: bool):
        self.late = late
        self.unread: deque[tuple[int, int, Callable[[], list[float]]]] = deque()

    def put(self, step: int, cursor: int, outcome: Tensor) -> None:
        self.unread.append((step, cursor, devices.async_read(outcome)))

    def read(self, now: bool) -> list[StepOutcome]:
        """Of the steps not read before, in order; with now, up to the last one. What was left out is told."""
        outcomes = []
        while len(self.unread) > (1 if self.late and not now else 0):
            step, cursor, values = self.unread.popleft()
            stop, skipped, spike, consecutive_skips, total, loss, grad_norm = values()
            outcome = StepOutcome(
                step,
                cursor,
                bool(stop),
                bool(skipped),
                bool(spike),
                int(consecutive_skips),
                int(total),
                loss,
                grad_norm,
            )
            if outcome.skipped:
                logging.warning(
                    f"{outcome}; update left out, {outcome.consecutive_skips} in a row, {outcome.total} in all"
                )
            outcomes.append(outcome)
        return outcomes


def should_roll_back(config: ResilienceConfig, outcome: StepOutcome, rollbacks: int) -> bool:
    """Whether it is time to go back to a checkpoint; where it is time to stop, raises TrainingDiverged. rollbacks: so far."""
    if outcome.spike and config.on_loss_spike == "rollback":
        back = True
    elif outcome.consecutive_skips < config.max_consecutive_skips:
        return False
    else:
        back = config.on_max_skips == "rollback"
    if not back:
        raise TrainingDiverged(
            f"{outcome}; {outcome.consecutive_skips} updates in a row were left out: stopped, and this state is not saved. A lower "
            "learning rate or longer warm-up, from an earlier checkpoint (--checkpoint.load_step), may help"
        )
    if rollbacks == config.max_rollbacks:
        raise TrainingDiverged(f"{outcome}, again, after {rollbacks} rollbacks: stopped, and this state is not saved")
    return True


class StabilityGuard:
    """Decides on the device which updates are made; the host reads it when it comes to it."""

    def __init__(self, config: ResilienceConfig, device: torch.device):
        self.config = config
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)  # accepted, left out in a row, left out in all
        self.history = torch.zeros(2, WINDOW, device=device)  # loss and gradient norm of accepted steps, a ring

    def decide(self, loss: Tensor, grad_norm: Tensor, votes: Tensor) -> tuple[Tensor, Tensor]:
        """All scalars. Returns whether to leave the update out, and the outcome for OutcomeReader."""
        # With offloaded parameters the loss is on another device than the gradients.
        now = torch.stack([value.detach().float().to(self.counts.device) for value in (loss, grad_norm)])
        finite = now.isfinite().all()
        spike = torch.zeros_like(finite)
        accepted, consecutive_skips, total = self.counts.unbind()
        if self.config.on_loss_spike != "off":
            known = (torch.arange(WINDOW, device=now.device) < accepted).float()
            mean = (self.history * known).sum(1) / known.sum().clamp(min=1)
            variance = ((self.history - mean[:, None]).square() * known).sum(1) / known.sum().clamp(min=1)
            high = now > mean + self.config.spike_threshold_sigma * variance.sqrt()
            spike = high.any() & finite & (accepted >= _FIRST_JUDGED)
        accept = finite & ~spike
        # Always: the policy may be switched on when the run goes on.
        slot = torch.arange(WINDOW, device=now.device) == accepted % WINDOW
        self.history.copy_(torch.where(slot & accept, now[:, None], self.history))
        skipped = ~accept
        self.counts.copy_(torch.stack([accepted + accept, (consecutive_skips + 1) * skipped, total + skipped]))
        outcome = torch.cat([torch.stack([votes > 0, skipped, spike]).double(), self.counts[1:], now.double()])
        return skipped, outcome

    def state(self) -> dict[str, Tensor]:
        """The live state, for a checkpoint."""
        return {"counts": self.counts, "history": self.history}


@dataclass(frozen=True)
class Observation:
    """What StepMonitor read after a step."""

    latest: StepOutcome | None
    """Newest outcome that was read, None if none was."""
    failed: StepOutcome | None
    """First outcome that requires a rollback."""
    stop: bool
    """Whether a rank was asked to stop and the newest step was applied; otherwise the next step decides whether the state is
    good."""


class StepMonitor:
    """Outcomes of steps, and the policy for skipped ones."""

    def __init__(self, config: ResilienceConfig, late: bool):
        """late: read outcomes one step late, without a host synchronization."""
        self.config = config
        self.reader = OutcomeReader(late)

    def observe(self, state: TrainState, outcome: Tensor, now: bool) -> Observation:
        """outcome: of the step that the state has just counted. now: read this outcome too, even if the host must wait.

        Raise TrainingDiverged if the policy says stop."""
        self.reader.put(state.step, state.cursor, outcome)
        outcomes = self.reader.read(now)
        stop = any(o.stop for o in outcomes)
        if stop:
            outcomes += self.reader.read(now=True)
        failed = [o for o in outcomes if should_roll_back(self.config, o, state.rollbacks)]
        latest = outcomes[-1] if outcomes else None
        return Observation(latest, failed[0] if failed else None, stop and not outcomes[-1].skipped)

    def require_good_end(self, outcome: StepOutcome) -> None:
        """Raise TrainingDiverged if the run would end after several non-finite steps in a row."""
        if outcome.suspect and outcome.consecutive_skips > 1:
            raise TrainingDiverged(f"{outcome}; stopped, and this state is not saved")

    def reset(self) -> None:
        """Discard unread outcomes."""
        self.reader.read(now=True)

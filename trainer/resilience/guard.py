"""Policy for non-finite steps and loss spikes: when an update is skipped, and when a run rolls back or stops."""

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.base.config import ResilienceConfig
from trainer.base.system import console
from trainer.resilience import health
from trainer.runtime.host_memory import Event, HostTransfer
from trainer.state import TrainState

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

    @staticmethod
    def pack(votes: Tensor, consecutive_skips: Tensor, total_skips: Tensor, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return the fields that the device computes as one vector. votes: number of ranks that were asked to stop."""
        return torch.stack([x.to(loss) for x in (votes, consecutive_skips, total_skips, loss, grad_norm)])

    @classmethod
    def unpack(cls, step: int, cursor: int, packed: Tensor) -> "StepOutcome":
        """Return the outcome whose other fields `pack` has packed. packed: vector in host memory."""
        votes, consecutive_skips, total_skips, loss, grad_norm = packed.tolist()
        return cls(step, cursor, votes > 0, int(consecutive_skips), int(total_skips), loss, grad_norm)


@dataclass(frozen=True)
class Verdict:
    """Consequences of the outcomes that were read after a step."""

    outcome: StepOutcome | None
    """The newest outcome. None if none was read."""
    roll_back: StepOutcome | None
    """The first outcome that requires a rollback."""
    stop: bool
    """Whether the run must end, because a rank was asked to stop."""


class TrainingDiverged(Exception):
    """Error that ends a run that cannot recover by itself. Its message is one line for the user. The exit code is 1."""


def should_roll_back(config: ResilienceConfig, outcome: StepOutcome, rollbacks: int) -> bool:
    """Return whether to roll back. Raises TrainingDiverged if the run must stop. rollbacks: number of rollbacks so far."""
    spike = outcome.spike and config.on_loss_spike == "rollback"
    too_many_skips = outcome.consecutive_skips >= config.max_consecutive_skips
    if not (spike or too_many_skips):
        return False
    if not spike and config.on_max_skips != "rollback":
        number = outcome.consecutive_skips
        skipped = f"{number} steps in a row were" if number > 1 else "this step was"
        raise TrainingDiverged(
            f"{outcome}; {skipped} skipped: training stops, and this state is not "
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
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)
        # Views, so that a checkpoint has one tensor of counts. Skips are counted in a row, and in total.
        self.num_accepted, self.consecutive_skips, self.total_skips = self.counts.unbind()
        self.history = torch.zeros(2, WINDOW, device=device)  # ring buffer: loss and gradient norm of accepted steps
        self.slots = torch.arange(WINDOW, device=device)

    @torch.no_grad()
    def decide(self, loss: Tensor, grad_norm: Tensor, votes: Tensor) -> tuple[Tensor, Tensor]:
        """Decide whether an update must be skipped. All arguments are scalars.

        Args:
            loss: Mean over the terms of the step.
            grad_norm: Norm before clipping.
            votes: Number of ranks that were asked to stop.

        Returns:
            A scalar that is true if the update must be skipped, and the packed StepOutcome for StepMonitor.
        """
        # With offloaded parameters, loss and gradient norm are on different devices.
        values = torch.stack([value.to(self.counts.device) for value in (loss, grad_norm)])
        accept = values.isfinite().all()
        if self.config.on_loss_spike != "off":
            accept = accept & ~self._is_spike(values)
        # Recorded under every policy, because on_loss_spike may be switched on when the run is resumed.
        slot = self.slots == self.num_accepted % WINDOW
        self.history.copy_(torch.where(slot & accept, values[:, None], self.history))
        self.num_accepted += accept
        self.consecutive_skips.add_(1).mul_(~accept)
        self.total_skips += ~accept
        return ~accept, StepOutcome.pack(votes, self.consecutive_skips, self.total_skips, *values)

    def _is_spike(self, values: Tensor) -> Tensor:
        """Return whether the loss or the gradient norm is far above its mean over the history. values: both, (2,)."""
        filled = (self.slots < self.num_accepted).float()
        mean = (self.history * filled).sum(1) / filled.sum().clamp(min=1)
        variance = ((self.history - mean[:, None]).square() * filled).sum(1) / filled.sum().clamp(min=1)
        high = values > mean + self.config.spike_threshold_sigma * variance.sqrt()
        return high.any() & (self.num_accepted >= _MIN_HISTORY)

    def state(self) -> dict[str, Tensor]:
        """Return the guard's tensors that are saved in checkpoints: the tensors in use, not copies."""
        return {"counts": self.counts, "history": self.history}


@dataclass(frozen=True)
class _Unread:
    """An outcome that the host has not read yet."""

    step: int
    cursor: int
    packed: Tensor
    """The packed outcome, in host memory."""
    copied: Event | None
    """It completes when `packed` is filled. None: `packed` is filled."""


class StepMonitor:
    """Monitor that reads step outcomes and applies the policy for skipped steps. On a GPU, it reads each outcome one step late,
    so that the host does not wait for the device."""

    def __init__(self, config: ResilienceConfig, device: torch.device):
        """device: device that holds the outcome tensors."""
        self.config = config
        self.late = device.type != "cpu"
        self.transfer = HostTransfer(device)
        self.unread: deque[_Unread] = deque()

    def observe(self, state: TrainState, outcome: Tensor, now: bool) -> Verdict:
        """Read outcomes, log skipped steps and apply the policy.

        A run stops if a rank was asked to stop and the newest step was not skipped. After a skipped step it continues, because
        only the next step shows whether the state is good.

        Args:
            state: State after the latest step.
            outcome: Packed outcome of this step.
            now: Whether to read this outcome immediately, even if the host must wait.

        Raises:
            TrainingDiverged: In the same cases as in should_roll_back.
        """
        packed, copied = outcome, None
        if outcome.device.type != "cpu":
            packed = self.transfer.host_like(outcome, outcome.dtype)
            copied = self.transfer.copy([packed], [outcome])
        self.unread.append(_Unread(state.step, state.cursor, packed, copied))
        outcomes = self._read(state, now)
        stop = any(o.stop for o in outcomes)
        if stop:
            outcomes += self._read(state, now=True)
        failed = [o for o in outcomes if should_roll_back(self.config, o, state.rollbacks)]
        if failed:
            self._read(state, now=True)  # the rollback discards these steps
        return Verdict(
            outcome=outcomes[-1] if outcomes else None,
            roll_back=failed[0] if failed else None,
            stop=stop and not outcomes[-1].skipped,
        )

    def _read(self, state: TrainState, now: bool) -> list[StepOutcome]:
        """Return the unread outcomes, oldest first, count them in the run's health, and log a warning for each skipped step. On a
        GPU, the newest outcome stays unread unless `now` is true."""
        outcomes = []
        left = 1 if self.late and not now else 0
        while len(self.unread) > left:
            unread = self.unread.popleft()
            if unread.copied is not None:
                unread.copied.synchronize()
            outcome = StepOutcome.unpack(unread.step, unread.cursor, unread.packed)
            if outcome.skipped:
                counts = f"{outcome.consecutive_skips} in a row, {outcome.total_skips} in total"
                console.warning(f"{outcome}; update skipped ({counts})")
            health.observe(state, outcome.step, outcome.loss, outcome.grad_norm)
            outcomes.append(outcome)
        return outcomes

    def require_good_end(self, outcome: StepOutcome) -> None:
        """Raise TrainingDiverged if the run would end after several non-finite steps in a row."""
        if outcome.suspect and outcome.consecutive_skips > 1:
            raise TrainingDiverged(f"{outcome}: training stops, and this state is not saved")

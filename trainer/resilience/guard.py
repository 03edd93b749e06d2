"""What a run does when it is asked to stop, when an update is no good, and when nothing moves any more."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import ResilienceConfig
from trainer.runtime import device as devices
from trainer.system import logging

WINDOW = 128
"""Accepted steps that a spike is measured against."""
_FIRST_JUDGED = 32
"""Accepted steps before anything counts as a spike."""


# ---------------------------------------------------------------- being asked to stop


# ---------------------------------------------------------------- updates that are not made


@dataclass(frozen=True)
class Verdict:
    """On a step, the same on every rank."""

    step: int
    cursor: int
    """Behind the samples of the step."""
    stop: bool
    """Some rank was asked to."""
    left_out: bool
    """The update was not made."""
    spiked: bool
    """It was not made for that reason."""
    in_a_row: int
    """Updates that were not made, up to this one."""
    total: int
    """Updates that were not made since the start of the run."""
    loss: float
    grad_norm: float

    def __str__(self) -> str:
        return f"step {self.step}: loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}"


class Stuck(Exception):
    """Training has come to a point from which it does not come back: one line for the user, exit code 1."""


class Verdicts:
    """What the device has decided, read when it costs nothing: a step late, unless the host waits for the device anyway."""

    def __init__(self, late: bool):
        self.late = late
        self.unread: deque[tuple[int, int, Callable[[], list[float]]]] = deque()

    def put(self, step: int, cursor: int, verdict: Tensor) -> None:
        self.unread.append((step, cursor, devices.read_later(verdict)))

    def read(self, now: bool) -> list[Verdict]:
        """Of the steps not read before, in order; with now, up to the last one. What was left out is told."""
        verdicts = []
        while len(self.unread) > (1 if self.late and not now else 0):
            step, cursor, values = self.unread.popleft()
            stop, left_out, spiked, in_a_row, total, loss, grad_norm = values()
            verdict = Verdict(
                step, cursor, bool(stop), bool(left_out), bool(spiked), int(in_a_row), int(total), loss, grad_norm
            )
            if verdict.left_out:
                logging.warning(f"{verdict}; update left out, {verdict.in_a_row} in a row, {verdict.total} in all")
            verdicts.append(verdict)
        return verdicts


def must_go_back(config: ResilienceConfig, verdict: Verdict, rollbacks: int) -> bool:
    """Whether it is time to go back to a checkpoint; where it is time to stop, raises Stuck. rollbacks: so far."""
    if verdict.spiked and config.loss_spike == "rollback":
        back = True
    elif verdict.in_a_row < config.max_left_out:
        return False
    else:
        back = config.after_left_out == "rollback"
    if not back:
        raise Stuck(
            f"{verdict}; {verdict.in_a_row} updates in a row were left out: stopped, and this state is not saved. A lower "
            "learning rate or longer warm-up, from an earlier checkpoint (--checkpoint.load_step), may help"
        )
    if rollbacks == config.max_rollbacks:
        raise Stuck(f"{verdict}, again, after {rollbacks} rollbacks: stopped, and this state is not saved")
    return True


class Guard:
    """Decides on the device which updates are made; the host reads it when it comes to it."""

    def __init__(self, config: ResilienceConfig, device: torch.device):
        self.config = config
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)  # accepted, left out in a row, left out in all
        self.history = torch.zeros(2, WINDOW, device=device)  # loss and gradient norm of accepted steps, a ring

    def judge(self, loss: Tensor, grad_norm: Tensor, votes: Tensor) -> tuple[Tensor, Tensor]:
        """All scalars. Returns whether to leave the update out, and the verdict for Verdicts."""
        # With offloaded parameters the loss is on another device than the gradients.
        now = torch.stack([value.detach().float().to(self.counts.device) for value in (loss, grad_norm)])
        finite = now.isfinite().all()
        spiked = torch.zeros_like(finite)
        accepted, in_a_row, total = self.counts.unbind()
        if self.config.loss_spike != "off":
            known = (torch.arange(WINDOW, device=now.device) < accepted).float()
            mean = (self.history * known).sum(1) / known.sum().clamp(min=1)
            variance = ((self.history - mean[:, None]).square() * known).sum(1) / known.sum().clamp(min=1)
            high = now > mean + self.config.spike_deviations * variance.sqrt()
            spiked = high.any() & finite & (accepted >= _FIRST_JUDGED)
        accept = finite & ~spiked
        # Always: the policy may be switched on when the run goes on.
        slot = torch.arange(WINDOW, device=now.device) == accepted % WINDOW
        self.history.copy_(torch.where(slot & accept, now[:, None], self.history))
        left_out = ~accept
        self.counts.copy_(torch.stack([accepted + accept, (in_a_row + 1) * left_out, total + left_out]))
        verdict = torch.cat([torch.stack([votes > 0, left_out, spiked]).double(), self.counts[1:], now.double()])
        return left_out, verdict

    def state(self) -> dict[str, Tensor]:
        """The live state, for a checkpoint."""
        return {"counts": self.counts, "history": self.history}


def add_range(ranges: Sequence[tuple[int, int]], new: tuple[int, int]) -> list[tuple[int, int]]:
    """Half-open ranges in order, with another one in them; those that touch become one."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted([*ranges, new]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


# ---------------------------------------------------------------- nothing moves

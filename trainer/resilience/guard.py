"""What a run does when it is asked to stop, when an update is no good, and when nothing moves any more."""

import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import device as devices
from trainer import logging
from trainer.config import ResilienceConfig
from trainer.distributed import last_collectives, side_store

_SAME_REQUEST_S = 1.0
"""Schedulers signal a process and its launcher, which passes the signal on: within this time it is one request."""
WINDOW = 128
"""Accepted steps that a spike is measured against."""
_FIRST_JUDGED = 32
"""Accepted steps before anything counts as a spike."""
_LONGEST_STEPS = 5
"""A hang is also longer than so many of the longest step so far."""
_SILENT_S = 15.0
"""A process under load may give no sign of life for seconds."""


# ---------------------------------------------------------------- being asked to stop


class StopRequest:
    """SIGTERM and SIGINT ask for an end after the step; a second one ends at once, whatever the process is doing.

    The signals are read by a thread: the main one may be inside a collective, where Python runs no handler.
    """

    def __init__(self) -> None:
        self.requested = False
        read, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self.pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._read, args=(read,), daemon=True).start()

    def _read(self, pipe: int) -> None:
        first = math.inf
        while True:
            (number,) = os.read(pipe, 1)
            if number not in (signal.SIGTERM, signal.SIGINT):
                continue  # others have handlers too: torch's data loader for SIGCHLD
            now = time.monotonic()
            if now > first + _SAME_REQUEST_S:
                print(f"ended at once by a second {signal.Signals(number).name}", file=sys.stderr, flush=True)
                os._exit(128 + number)
            first = min(first, now)
            self.requested = True


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


class Watchdog:
    """Ends the process when no step has ended for too long, with every thread's stack and what is known of the others.

    The first step (which may compile) and what is done beside steps, up to the end of the process, are not timed: then it looks
    for ranks that give no sign of life, for which the others would wait.
    """

    def __init__(self, timeout_s: float):
        """timeout_s: 0 for none."""
        self.timeout_s = timeout_s
        self.beat_s = min(5.0, timeout_s / 4)
        self.step = 0
        self.longest_s = 0.0
        self.since: float | None = None
        """When the step that is timed began; None: nothing is timed."""
        self.store = side_store() if timeout_s and dist.get_world_size() > 1 else None
        self.closed = False
        self._tell_life("0 0")
        if timeout_s:
            threading.Thread(target=self._watch, daemon=True).start()
        if self.store is not None:
            threading.Thread(target=self._watch_neighbour, daemon=True).start()

    def after_step(self, step: int) -> None:
        now = time.monotonic()
        if self.since is not None:
            self.longest_s = max(self.longest_s, now - self.since)
        self.since, self.step = now, step

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self.since = self.since, None
        try:
            yield
        finally:
            self.since = None if before is None else time.monotonic()

    def close(self) -> None:
        """No step is timed any more."""
        self.since = None
        self.closed = True

    def overdue_s(self) -> float:
        """How long the step that is timed has taken, if that is too long; else 0."""
        since = self.since
        waited_s = 0.0 if since is None else time.monotonic() - since
        return waited_s if waited_s > max(self.timeout_s, _LONGEST_STEPS * self.longest_s) else 0.0

    def _watch(self) -> None:
        beats = 0
        while not self.closed or self.store is not None:
            time.sleep(self.beat_s)
            beats += 1
            self._tell_life(f"{self.step} {beats}")
            if waited_s := self.overdue_s():
                self._end(waited_s)

    def _watch_neighbour(self) -> None:
        """In a thread of its own: where the store stands still, so does who asks it. Each rank looks at one other, so that
        thousands do not ask for everybody."""
        store, me = side_store(), dist.get_rank()
        other = (me + 1) % dist.get_world_size()
        life, changed = b"", time.monotonic()
        while True:
            time.sleep(self.beat_s)
            try:
                now = store.get(f"life/{other}") if self.since is None else b""
            except RuntimeError:
                return  # whoever held it has gone
            if now != life or self.since is not None:
                life, changed = now, time.monotonic()
            elif time.monotonic() - changed > max(self.timeout_s, _SILENT_S):
                told = f"[rank {me}] no sign of life from rank {other} for {time.monotonic() - changed:.0f} s"
                print(told, file=sys.stderr, flush=True)
                os._exit(1)

    def _tell_life(self, text: str) -> None:
        if self.store is not None:
            try:
                self.store.set(f"life/{dist.get_rank()}", text)
            except RuntimeError:
                self.store = None  # whoever held it has gone

    def _end(self, waited_s: float) -> None:
        rank = dist.get_rank()
        lines = [f"[rank {rank}] no step has ended for {waited_s:.0f} s, since step {self.step}"]
        lines += [line for dump in last_collectives() for line in parse_collectives(dump)]
        print("\n".join(lines), file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        # Last: the store may be on the machine that hangs.
        print("".join(f"{line}\n" for line in self._missing()), end="", file=sys.stderr, flush=True)
        os._exit(1)

    def _missing(self) -> list[str]:
        """Who gives no sign of life, or is behind."""
        before = self._lives()
        time.sleep(3 * self.beat_s)
        after = self._lives()
        steps = {rank: int(life.split()[0]) for rank, life in after.items()}
        lines = [
            f"rank {rank} gives no sign of life; it was last seen at step {steps[rank]}"
            for rank in after
            if before.get(rank) == after[rank] and rank != dist.get_rank()
        ]
        behind = [f"{rank} (step {step})" for rank, step in steps.items() if step < max(steps.values())]
        return lines + ([f"behind: rank {', '.join(behind[:8])}"] if behind else [])

    def _lives(self) -> dict[int, str]:
        if self.store is None:
            return {}
        try:
            lives = self.store.multi_get([f"life/{rank}" for rank in range(dist.get_world_size())])
        except RuntimeError:
            return {}
        return {rank: life.decode() for rank, life in enumerate(lives)}


def parse_collectives(dump: str) -> list[str]:
    """Lines about the collectives of a flight recorder's dump that have begun and not ended."""
    try:
        trace = json.loads(dump)
        status = trace["pg_status"]
        lines = []
        for group, state in status.items():
            begun = int(state["last_enqueued_collective"])
            if begun > int(state["last_completed_collective"]):
                entries = [e for e in trace["entries"] if str(e["pg_id"]) == group and e["collective_seq_id"] == begun]
                name = entries[-1]["profiling_name"] if entries else "a collective"
                lines.append(f"waiting in {name}, number {begun} of process group {group}")
        return lines
    except (ValueError, KeyError, TypeError):
        return []

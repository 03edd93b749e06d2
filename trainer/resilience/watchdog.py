"""Detection of hangs and of ranks without a heartbeat."""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from trainer.runtime.distributed import clone_store, flight_recorder_dumps

_LONGEST_STEPS = 5
"""A hang is also longer than so many of the longest step so far."""
_SILENT_S = 15.0
"""A process under load may give no sign of life for seconds."""


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
        self.store = clone_store() if timeout_s and dist.get_world_size() > 1 else None
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
        store, me = clone_store(), dist.get_rank()
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
        lines += [line for dump in flight_recorder_dumps() for line in parse_collectives(dump)]
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

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
"""Factor: a hang lasts longer than this many times the longest step so far, and longer than the timeout."""
_MIN_SILENCE_S = 15.0
"""Minimum limit, in seconds, on the time without a heartbeat. A process under load may send none for several seconds."""


class Watchdog:
    """Ends the process when no step completes in time, after printing every thread's stack and the state of the other ranks.

    The first step (which may compile), everything under `paused` and the end of the process are not timed. In these phases the
    watchdog checks the heartbeat of another rank, because this rank would wait forever for a rank that ended.
    """

    def __init__(self, timeout_s: float):
        """timeout_s: seconds without a completed step after which the process ends; 0 disables the watchdog."""
        self.timeout_s = timeout_s
        self.beat_s = min(5.0, timeout_s / 4)
        self.step = 0
        self.longest_s = 0.0
        self.since: float | None = None
        """Start of the timed step; None while nothing is timed."""
        self.store = clone_store() if timeout_s and dist.get_world_size() > 1 else None
        self.closed = False
        self._heartbeat("0 0")
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
        """Stop timing steps. Heartbeats continue until the process ends."""
        self.since = None
        self.closed = True

    def overdue_s(self) -> float:
        """Return the seconds since the timed step began if they exceed the limit, else 0."""
        since = self.since
        waited_s = 0.0 if since is None else time.monotonic() - since
        return waited_s if waited_s > max(self.timeout_s, _LONGEST_STEPS * self.longest_s) else 0.0

    def _watch(self) -> None:
        beats = 0
        while not self.closed or self.store is not None:
            time.sleep(self.beat_s)
            beats += 1
            self._heartbeat(f"{self.step} {beats}")
            if waited_s := self.overdue_s():
                self._end(waited_s)

    def _watch_neighbour(self) -> None:
        """Check the heartbeat of the next rank only, so that the load on the store grows linearly with the number of ranks.

        This needs a separate thread: when the store hangs, a request to it hangs too.
        """
        store, rank = clone_store(), dist.get_rank()
        neighbour = (rank + 1) % dist.get_world_size()
        last, changed = b"", time.monotonic()
        while True:
            time.sleep(self.beat_s)
            try:
                current = store.get(f"heartbeat/{neighbour}") if self.since is None else b""
            except RuntimeError:
                return  # the process that hosts the store has ended
            if current != last or self.since is not None:
                last, changed = current, time.monotonic()
            elif (silent_s := time.monotonic() - changed) > max(self.timeout_s, _MIN_SILENCE_S):
                message = f"[rank {rank}] no heartbeat from rank {neighbour} for {silent_s:.0f} s"
                print(message, file=sys.stderr, flush=True)
                os._exit(1)

    def _heartbeat(self, text: str) -> None:
        if self.store is not None:
            try:
                self.store.set(f"heartbeat/{dist.get_rank()}", text)
            except RuntimeError:
                self.store = None  # the process that hosts the store has ended

    def _end(self, waited_s: float) -> None:
        rank = dist.get_rank()
        lines = [f"[rank {rank}] no step has completed for {waited_s:.0f} s, since step {self.step}"]
        lines += [line for dump in flight_recorder_dumps() for line in parse_collectives(dump)]
        print("\n".join(lines), file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        # Query the store last, because it may be on the node that hangs.
        print("".join(f"{line}\n" for line in self._stalled_ranks()), end="", file=sys.stderr, flush=True)
        os._exit(1)

    def _stalled_ranks(self) -> list[str]:
        """Return one line for each rank without a heartbeat, and one line that lists the ranks at an earlier step than others."""
        before = self._heartbeats()
        time.sleep(3 * self.beat_s)
        after = self._heartbeats()
        steps = {rank: int(beat.split()[0]) for rank, beat in after.items()}
        lines = [
            f"rank {rank} sends no heartbeat; its last one was at step {steps[rank]}"
            for rank in after
            if before.get(rank) == after[rank] and rank != dist.get_rank()
        ]
        behind = [f"{rank} (step {step})" for rank, step in steps.items() if step < max(steps.values())]
        return lines + ([f"behind: rank {', '.join(behind[:8])}"] if behind else [])

    def _heartbeats(self) -> dict[int, str]:
        if self.store is None:
            return {}
        try:
            beats = self.store.multi_get([f"heartbeat/{rank}" for rank in range(dist.get_world_size())])
        except RuntimeError:
            return {}
        return {rank: beat.decode() for rank, beat in enumerate(beats)}


def parse_collectives(dump: str) -> list[str]:
    """Return a line for each collective in a flight recorder's JSON dump that has started but not completed."""
    try:
        trace = json.loads(dump)
        lines = []
        for group, state in trace["pg_status"].items():
            started = int(state["last_enqueued_collective"])
            if started > int(state["last_completed_collective"]):
                entries = [
                    e for e in trace["entries"] if str(e["pg_id"]) == group and e["collective_seq_id"] == started
                ]
                name = entries[-1]["profiling_name"] if entries else "a collective"
                lines.append(f"waiting in {name}, collective {started} of process group {group}")
        return lines
    except (ValueError, KeyError, TypeError):
        return []

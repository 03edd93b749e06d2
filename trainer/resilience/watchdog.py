"""Detection of hangs and of ranks without a heartbeat."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch.distributed as dist

from trainer.base.system.clock import RunningClock
from trainer.base.system.signals import StopRequest
from trainer.base.system.streams import print_error
from trainer.runtime.collectives import waiting_collectives
from trainer.runtime.distributed import clone_store

_LONGEST = 5
"""Minimum ratio of a hang's duration to that of the longest step, or of the longest wait for a microbatch, so far."""
_COMPILING = 12
"""Ratio of the limit of a step that may compile to the timeout."""
_MIN_COMPILING_S = 3600.0
"""Minimum limit of a step that may compile."""
_STOP_S = 20.0
"""Seconds that a rank waits for one microbatch after a stop request, unless earlier ones took almost as long. Schedulers kill
processes about 30 s after SIGTERM."""
_BEAT_S = 5.0
"""Maximum time between two heartbeats."""
_MIN_SILENCE_S = 15.0
"""Minimum heartbeat timeout in seconds. A process under load may send no heartbeat for several seconds."""

_STORE_TIMEOUT_S = 10.0
"""Seconds that the store may take to answer, in addition to the heartbeats that the query waits for."""


class Watchdog:
    """Detector of hangs. If no step completes in time, it prints every thread's stack and the state of the other ranks, and
    ends the process.

    The first step and evaluations may compile, so their limit is longer. The code under `paused` and the end of the run are not
    timed. In all of these phases, the watchdog checks the heartbeat of the next rank, because this rank would wait for a rank
    that has ended. Time in which this process was suspended does not count.

    It also ends a process that was asked to stop, but waits for data that do not arrive.
    """

    def __init__(self, timeout_s: float, stop: StopRequest):
        """Call `start` before the first step.

        Args:
            timeout_s: the watchdog ends the process after this many seconds without a completed step; 0: never.
            stop: whether this rank was asked to stop.
        """
        self.timeout_s = timeout_s
        self.stop = stop
        self.beat_s = min(_BEAT_S, timeout_s / 4) if timeout_s else _BEAT_S
        self.clock = RunningClock(self.beat_s)
        self.step = 0
        self.longest_s = 0.0
        """Duration of the longest step that did not compile. It grows with the batch."""
        self.num_loaded, self.longest_load_s = 0, 0.0
        """Number of microbatches that were awaited, and the longest wait for one of them."""
        self.since: float | None = None
        """The clock's reading at the start of the current step, or None while no step is timed."""
        self.may_compile = True
        """Whether the current step may compile."""
        self.is_loading = False
        """Whether this rank waits for data."""
        self._awaited: int | None = None
        self._awaited_since = 0.0
        """Microbatch that is awaited after a stop request, and the clock's reading at the first check of it."""
        self.store: dist.Store | None = None
        self.closed = False

    def start(self) -> None:
        """Start to send heartbeats, and to check this rank and the next one."""
        if self.timeout_s and dist.get_world_size() > 1:
            self.store = clone_store()
            self.store.set(f"heartbeat/{dist.get_rank()}", "0 0")  # other ranks may ask for it before the thread runs
            threading.Thread(target=self._watch_neighbour, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def after_step(self, step: int, growth: float = 1.0) -> None:
        """Begin a new step.

        Args:
            step: Number of the step that is complete.
            growth: Size of the next batch, relative to that of this one.
        """
        now = self.clock.now()
        if self.since is not None and not self.may_compile:
            self.longest_s = max(self.longest_s, now - self.since)
        self.longest_s *= max(1.0, growth)
        self.since, self.step, self.may_compile = now, step, False

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context manager for the wait for one microbatch. If the step may compile, the wait is a step of its own that cannot. If
        this rank was asked to stop, a wait that exceeds _STOP_S ends the process."""
        start, may_compile = self.clock.now(), self.may_compile
        if may_compile:
            self.since, self.may_compile = start, False
        self.is_loading = True
        try:
            yield
        finally:
            now, self.is_loading = self.clock.now(), False
            self.num_loaded, self.longest_load_s = self.num_loaded + 1, max(self.longest_load_s, now - start)
            if may_compile:
                self.since, self.may_compile = now, True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager for an evaluation, in which a new step begins after each `loading`."""
        before, may_compile = self.since, self.may_compile
        self.since, self.may_compile = self.clock.now(), True
        try:
            yield
        finally:
            self.since, self.may_compile = None if before is None else self.clock.now(), may_compile

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self.since = self.since, None
        try:
            yield
        finally:
            self.since = None if before is None else self.clock.now()

    def close(self) -> None:
        """Stop timing steps. Heartbeats continue until the process ends."""
        self.since = None
        self.closed = True

    def overdue_s(self) -> float:
        """Return the seconds since the current step began if this time exceeds the limit, otherwise 0."""
        may_compile = self.may_compile  # read first: the end of a step that compiled sets both
        since, now = self.since, self.clock.now()
        waited_s = 0.0 if since is None else now - since
        limit_s = max(self.timeout_s, _LONGEST * self.longest_s)
        if may_compile:
            limit_s = max(_COMPILING * self.timeout_s, _MIN_COMPILING_S)
        return waited_s if self.timeout_s and waited_s > limit_s else 0.0

    def late_data_s(self) -> float:
        """Return the seconds for which this rank has waited for one microbatch since it was asked to stop, if the time exceeds
        the limit, otherwise 0. It begins with the first call."""
        awaited = self.num_loaded if self.is_loading and self.stop.requested else None
        if awaited is None or awaited != self._awaited:
            self._awaited, self._awaited_since = awaited, self.clock.now()
        waited_s = self.clock.now() - self._awaited_since
        return waited_s if waited_s > max(_STOP_S, _LONGEST * self.longest_load_s) else 0.0

    def _watch(self) -> None:
        beats = 0
        while not self.closed or self.store is not None:
            if self.store is not None:
                try:
                    state = "loading" if self.is_loading else ""
                    self.store.set(f"heartbeat/{dist.get_rank()}", f"{self.step} {beats} {state}")
                except RuntimeError:
                    self.store = None  # the process that hosts the store has ended
            if waited_s := self.overdue_s():
                self._end(waited_s)
            if waited_s := self.late_data_s():
                self._end_without_data(waited_s)
            time.sleep(self.beat_s)
            beats += 1

    def _watch_neighbour(self) -> None:
        """Check the heartbeat of the next rank only, so that the load on the store grows linearly with the number of ranks.

        The check needs a separate thread, because its request blocks the thread while the store hangs.
        """
        store, rank = clone_store(), dist.get_rank()
        neighbour = (rank + 1) % dist.get_world_size()
        last, changed = b"", self.clock.now()
        while True:
            time.sleep(self.beat_s)
            try:
                is_timed = self.since is not None and not self.may_compile
                current = b"" if is_timed else store.get(f"heartbeat/{neighbour}")
            except RuntimeError:
                return  # the process that hosts the store has ended
            if current != last or is_timed:
                last, changed = current, self.clock.now()
            elif (silent_s := self.clock.now() - changed) > max(self.timeout_s, _MIN_SILENCE_S):
                print_error(f"[rank {rank}] rank {neighbour} has sent no heartbeat for {silent_s:.0f} s")
                os._exit(1)

    def _end(self, waited_s: float) -> None:
        lines = [f"[rank {dist.get_rank()}] no step has completed for {waited_s:.0f} s, since step {self.step}"]
        if self.is_loading:
            lines.append("this rank waits for training data: the disk or file system of the token store hangs")
        lines += waiting_collectives()
        if waits_for_stage(sys._current_frames().get(threading.main_thread().ident)):
            lines.append("waiting for another stage of the pipeline")
        print_error("\n".join(lines))
        with suppress(OSError, ValueError, AttributeError):  # stderr is closed or has been replaced
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        # Query the store last and in another thread, because it may be on a node that hangs or cannot be reached.
        stalled: list[list[str]] = []
        query = threading.Thread(target=lambda: stalled.append(self._stalled_ranks()), daemon=True)
        query.start()
        query.join(3 * self.beat_s + _STORE_TIMEOUT_S)
        lines = stalled[0] if stalled else ["the node of rank 0 does not answer; the state of other ranks is unknown"]
        for line in lines:
            print_error(line)
        os._exit(1)

    def _end_without_data(self, waited_s: float) -> None:
        text = f"no data have arrived for {waited_s:.0f} s since the stop request, at step {self.step}"
        advice = "the run ends without saving; rerun the same command to resume from the latest checkpoint, if any"
        print_error(f"[rank {dist.get_rank()}] {text}: {advice}")
        os._exit(1)

    def _stalled_ranks(self) -> list[str]:
        """Return one line for each other rank that has no heartbeat or waits for training data, and one line that lists the ranks
        behind the latest step."""
        if self.store is None:
            return []
        ranks = range(dist.get_world_size())
        keys = [f"heartbeat/{rank}" for rank in ranks]
        try:
            before = self.store.multi_get(keys)
            time.sleep(3 * self.beat_s)
            after = self.store.multi_get(keys)
        except RuntimeError:
            return []
        steps = [int(beat.split()[0]) for beat in after]
        lines = [
            f"rank {rank} sends no heartbeat; its last one was at step {steps[rank]}"
            for rank in ranks
            if before[rank] == after[rank] and rank != dist.get_rank()
        ]
        lines += [f"rank {r} waits for training data" for r in ranks if b"loading" in after[r] and r != dist.get_rank()]
        behind = [f"{rank} (step {step})" for rank, step in enumerate(steps) if step < max(steps)]
        return lines + ([f"ranks behind step {max(steps)}: {', '.join(behind[:8])}"] if behind else [])


def waits_for_stage(frame: FrameType | None) -> bool:
    """Return whether a thread waits in a pipeline schedule. The flight recorder of gloo does not list sends and receives. frame:
    the innermost frame of the thread."""
    return frame is not None and frame.f_code.co_name == "_wait_batch_p2p"

"""Durations of the phases of training steps."""

from collections import Counter
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import record_function

from trainer.runtime import device as devices

_MAX_PENDING = 4096


class StepTimer:
    """Timer of phases that follow each other without a gap. The host does not wait for the device when a phase starts.

    Durations are those on the device. On a GPU, a phase lasts from the end of the work that was queued before the phase started
    to the end of the work that was queued before the next phase started.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._starts: list[tuple[str, Any]] = []
        """Name and start of each phase that `_seconds` does not include yet."""
        self._seconds: Counter[str] = Counter()
        self._span: record_function | None = None

    def start(self, name: str) -> None:
        """Start a phase, which ends the current one. If torch's profiler is active, its trace shows the phase."""
        if self._span is not None:
            self._span.__exit__(None, None, None)
        self._span = record_function(f"phase: {name}").__enter__() if torch.autograd._profiler_enabled() else None
        self._starts.append((name, devices.timestamp(self.device)))
        if len(self._starts) > _MAX_PENDING:
            self._add(_MAX_PENDING // 2)  # these are so old that the device has completed them

    def take_seconds(self) -> dict[str, float]:
        """Return phase -> total seconds since the last call, without the current phase. Wait until the device has completed the
        other phases."""
        self._add(max(0, len(self._starts) - 1))
        seconds, self._seconds = dict(self._seconds), Counter()
        return seconds

    def clear(self) -> None:
        """Forget all phases."""
        self._starts.clear()
        self._seconds.clear()

    def _add(self, count: int) -> None:
        """Add the durations of the first `count` phases to `_seconds`."""
        for (name, start), (_, end) in pairwise(self._starts[: count + 1]):
            self._seconds[name] += devices.seconds_between(start, end)
        del self._starts[:count]

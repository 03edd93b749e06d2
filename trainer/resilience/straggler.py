"""Straggler detection."""

import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.base.system import console
from trainer.runtime import device as devices

_MIN_STEPS = 5
"""Minimum number of steps before ranks are compared. With fewer steps, the shortest time is too noisy to compare."""
_MAX_FORWARDS = 1024


class StragglerDetector:
    """Detector that compares two durations between ranks: the time to load data, and the time of one block's forward. The forward
    is the same work on every rank.

    The duration of a step cannot identify a straggler. It is the same on all ranks, because every collective waits for the
    slowest rank. The timing of a block's forward begins after its parameters are gathered. It includes the collectives of
    tensor and context parallelism, so the ranks of one TP or CP group have similar times.
    """

    def __init__(self, ratio: float | None, device: torch.device):
        """ratio: minimum ratio of a straggler's time to the median rank's time; None disables the detection."""
        self.ratio = ratio if dist.get_world_size() > 1 else None
        self.device = device
        self.last_reported: int | None = None
        """Straggler's rank in the last comparison, or None."""
        self.start()

    def start(self) -> None:
        """Start a new window of steps."""
        self.steps, self.data_s, self.since = 0, 0.0, time.perf_counter()
        self.forwards: deque[tuple[Any, Any]] = deque(maxlen=_MAX_FORWARDS)
        """Start and end timestamps of the last forwards of the timed block."""

    def time_blocks_of(self, blocks: nn.Module) -> None:
        """Time the forward of the first block, if `blocks` has any. Call this after compilation, sharding and FSDP wrapping."""
        block = next(blocks.children(), None)
        if block is None or self.ratio is None:
            return
        forward = block.forward

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = devices.timestamp(self.device)
            output = forward(*args, **kwargs)
            self.forwards.append((start, devices.timestamp(self.device)))
            return output

        block.forward = timed

    def after_data(self, data_s: float) -> None:
        self.steps += 1
        self.data_s += data_s

    def compare(self) -> dict[str, Any] | None:
        """Return a straggler's rank and the reason, or None. Log a warning unless the last comparison found the same rank.

        All ranks must call this, after the device has completed its work.
        """
        if self.ratio is None or self.steps < _MIN_STEPS:
            return None
        shortest_s = min((devices.seconds_between(start, end) for start, end in self.forwards), default=0.0)
        local = torch.tensor([self.data_s, shortest_s], dtype=torch.float64, device=self.device)
        elapsed_s = time.perf_counter() - self.since
        all_ranks = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(all_ranks, local)
        straggler = find_straggler(torch.stack(all_ranks).cpu(), elapsed_s, self.ratio)
        self.start()
        if straggler is not None and straggler["rank"] != self.last_reported:
            console.warning(f"rank {straggler['rank']} is a straggler: {straggler['reason']}")
        self.last_reported = straggler and straggler["rank"]
        return straggler


def find_straggler(times: torch.Tensor, elapsed_s: float, ratio: float) -> dict[str, Any] | None:
    """Return a straggler's rank and the reason, or None.

    Args:
        times: (ranks, 2). Seconds to load the data of all steps, and seconds of one block's forward.
        elapsed_s: Total duration of these steps.
        ratio: Factor above the median rank at which a rank is a straggler.
    """
    medians = times.quantile(0.5, dim=0, interpolation="lower")
    data_late_s = (times[:, 0] - medians[0]).max().item()
    if data_late_s > (ratio - 1) * (elapsed_s - data_late_s):
        reason = f"other ranks wait {100 * data_late_s / elapsed_s:.0f} % of the time for its data"
        return {"rank": times[:, 0].argmax().item(), "reason": reason}
    slowest_s, median_s = times[:, 1].max().item(), medians[1].item()
    if slowest_s > ratio * median_s > 0:
        reason = f"a block's forward takes {slowest_s * 1e3:.3g} ms, against {median_s * 1e3:.3g} ms on the median rank"
        return {"rank": times[:, 1].argmax().item(), "reason": reason}
    return None

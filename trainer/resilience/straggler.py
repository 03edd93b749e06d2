"""Which rank the others wait for."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.runtime import device as devices
from trainer.system import logging

_FEWEST_STEPS = 5
"""Of fewer, the mean says little."""


class StragglerDetector:
    """Compares the ranks' own times: of a block's forward, which does the same work on every rank, and of fetching data.

    A step takes as long on all ranks, for they wait for each other in every collective; only what lies between tells who is
    slow. The forward of a block lies behind the gathering of its parameters, but collectives of tensor and context parallelism
    are in it: ranks of one such group look alike.
    """

    def __init__(self, ratio: float | None, device: torch.device):
        """ratio: to the median rank, from which on a rank is slow; None: nothing is compared."""
        self.ratio = ratio if dist.get_world_size() > 1 else None
        self.device = device
        self.block = devices.IntervalTimer(device)
        self.named: int | None = None
        """The rank that was told of last."""
        self.start()

    def start(self) -> None:
        """Steps are counted from now on."""
        self.steps, self.data_s, self.since = 0, 0.0, time.perf_counter()
        self.block.shortest_s()

    def watch(self, blocks: nn.Module) -> None:
        """Time the first of them, if there is one. It must be whole: compiled and cut, its parameters under FSDP."""
        for block in list(blocks.children())[:1]:
            block.forward = self._timed(block.forward)

    def _timed(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.block.lap():
                return compute(*args, **kwargs)

        return compute if self.ratio is None else timed

    def after_data(self, data_s: float) -> None:
        self.steps += 1
        self.data_s += data_s

    def compare(self) -> dict[str, Any] | None:
        """A collective of all ranks, when the device has done its work. Warns of a slow rank; returns what is known of it,
        None if there is none."""
        if self.ratio is None or self.steps < _FEWEST_STEPS:
            return None
        mine = torch.tensor([self.data_s, self.block.shortest_s()], dtype=torch.float64, device=self.device)
        elapsed_s = time.perf_counter() - self.since
        all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(all_ranks, mine)
        found = find_straggler(torch.stack(all_ranks).cpu(), elapsed_s, self.ratio)
        self.start()
        if found is not None and found["rank"] != self.named:
            logging.warning(f"rank {found['rank']} is slow: {found['why']}")
        self.named = found and found["rank"]
        return found


def find_straggler(times: torch.Tensor, elapsed_s: float, ratio: float) -> dict[str, Any] | None:
    """times: (ranks, 2), seconds of data in all steps, and of a block. elapsed_s: of all steps."""
    medians = times.quantile(0.5, dim=0, interpolation="lower")
    data_late_s = (times[:, 0] - medians[0]).max().item()
    if data_late_s > (ratio - 1) * (elapsed_s - data_late_s):
        share = 100 * data_late_s / elapsed_s
        rank = times[:, 0].argmax().item()
        return {"rank": rank, "why": f"the others wait {share:.0f} % of the time for its data"}
    slowest_s = times[:, 1].max().item()
    if slowest_s > ratio * medians[1].item() > 0:
        rank = times[:, 1].argmax().item()
        why = f"a block's forward takes {slowest_s * 1e3:.3g} ms there, {medians[1].item() * 1e3:.3g} ms on the median rank"
        return {"rank": rank, "why": why}
    return None

import itertools
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer.resilience import straggler
from trainer.resilience.straggler import StragglerDetector, find_straggler
from trainer.runtime import device as devices
from trainer.system import logging


@pytest.mark.parametrize(
    ("data", "block", "found"),
    [
        ([0.1, 0.1, 0.2, 0.1], [1.0, 1.1, 1.2, 1.4], None),
        (
            [0.1, 0.1, 0.1, 0.1],
            [1.0, 1.0, 1.6, 1.0],
            (2, "a block's forward takes 1.6e+03 ms there, 1e+03 ms on the median"),
        ),
        ([0.1, 4.1, 0.1, 0.1], [1.0, 1.0, 1.6, 1.0], (1, "the others wait 40 % of the time for its data")),
        ([0.1, 3.0], [1.0, 1.0], None),  # 2.9 of 10 seconds: the step takes 1.41 times as long
        ([0.0, 0.0], [1.0, 2.0], (1, "a block's forward takes 2e+03 ms there, 1e+03 ms on the median")),
        ([0.0, 0.0], [0.0, 2.0], None),  # a stage without blocks has no time to compare with
    ],
)
def test_a_rank_is_slow_by_its_blocks_or_its_data(data, block, found):
    times = torch.tensor([data, block], dtype=torch.float64).T
    mine = find_straggler(times, elapsed_s=10.0, ratio=1.5)
    if found is None:
        assert mine is None
    else:
        assert mine["rank"] == found[0]
        assert mine["why"].startswith(found[1])


class Ticking(nn.Module):
    """A block that takes so many seconds of a clock of its own."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, x):
        self.clock[0] += next(self.seconds)
        return x


def compared(ratio):
    """What each comparison of a run finds, and what is told; rank 1 becomes slow, and quick again."""
    clock, told = [0.0], []
    devices.time = straggler.time = SimpleNamespace(perf_counter=lambda: clock[0])
    warning, logging.warning = logging.warning, told.append
    try:
        # The fifth of the ten laps is the quickest: a rank that others disturb now and then is not slow.
        quick, slow = [3, 3, 3, 3, 1, 3, 3, 3, 3, 3], [3, 3, 3, 3, 2, 3, 3, 3, 3, 3]
        mine = quick if dist.get_rank() != 1 else slow
        block = Ticking(clock, itertools.chain(quick, mine, mine, quick))
        watched = StragglerDetector(ratio, torch.device("cpu"))
        watched.watch(nn.ModuleList([block]))
        found = []
        for _ in range(4):
            for _ in range(5):
                watched.after_data(0.0)
                block(torch.zeros(1))
                block(torch.zeros(1))
            found.append(watched.compare())
        watched.after_data(0.0)
        found.append(watched.compare())
        return [f and f["rank"] for f in found], told
    finally:
        devices.time = straggler.time = time
        logging.warning = warning


def test_a_slow_rank_is_told_once_as_long_as_it_stays_slow(ranks):
    told = "rank 1 is slow: a block's forward takes 2e+03 ms there, 1e+03 ms on the median rank"
    # Four windows of five steps, and one that is too short.
    assert ranks(4).run(compared, 1.5) == [([None, 1, 1, None, None], [told])] * 4
    assert ranks(2).run(compared, None) == [([None] * 5, [])] * 2
    assert ranks(1).run(compared, 1.5) == [([None] * 5, [])]

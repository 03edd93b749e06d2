"""Straggler detection."""

import itertools
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer.base.system import console
from trainer.resilience import straggler
from trainer.resilience.straggler import StragglerDetector, find_straggler
from trainer.runtime import device as devices


@pytest.mark.parametrize(
    ("data", "block", "expected"),
    [
        ([0.1, 0.1, 0.2, 0.1], [1.0, 1.1, 1.2, 1.4], None),
        (
            [0.1, 0.1, 0.1, 0.1],
            [1.0, 1.0, 1.6, 1.0],
            (2, "a block's forward takes 1.6e+03 ms, against 1e+03 ms on the median rank"),
        ),
        ([0.1, 4.1, 0.1, 0.1], [1.0, 1.0, 1.6, 1.0], (1, "other ranks wait 40 % of the time for its data")),
        ([0.1, 3.0], [1.0, 1.0], None),  # 2.9 of 10 seconds: the steps take 1.41 times as long
        ([0.0, 0.0], [1.0, 2.0], (1, "a block's forward takes 2e+03 ms, against 1e+03 ms on the median rank")),
        ([0.0, 0.0], [0.0, 2.0], None),  # the median rank's stage has no blocks, so there is no time to compare with
    ],
)
def test_a_rank_is_a_straggler_by_its_blocks_or_its_data(data, block, expected):
    times = torch.tensor([data, block], dtype=torch.float64).T
    straggler = find_straggler(times, elapsed_s=10.0, ratio=1.5)
    assert straggler == (expected and {"rank": expected[0], "reason": expected[1]})


class Ticking(nn.Module):
    """A block that advances a simulated clock."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, x):
        self.clock[0] += next(self.seconds)
        return x


def compare_several_times(ratio):
    """Return the straggler of each comparison, and the warnings. Rank 1 becomes slow, then fast again."""
    clock, warnings = [0.0], []
    devices.time = straggler.time = SimpleNamespace(perf_counter=lambda: clock[0])
    warning, console.warning = console.warning, warnings.append
    try:
        # The fifth of the ten laps is the shortest: a rank that is disturbed now and then is not a straggler.
        fast, slow = [3, 3, 3, 3, 1, 3, 3, 3, 3, 3], [3, 3, 3, 3, 2, 3, 3, 3, 3, 3]
        local = fast if dist.get_rank() != 1 else slow
        block = Ticking(clock, itertools.chain(fast, local, local, fast))
        detector = StragglerDetector(ratio, torch.device("cpu"))
        detector.time_blocks_of(nn.ModuleList([block]))
        found = []
        for _ in range(4):
            for _ in range(5):
                detector.after_data(0.0)
                block(torch.zeros(1))
                block(torch.zeros(1))
            found.append(detector.compare())
        detector.after_data(0.0)
        found.append(detector.compare())
        return [straggler and straggler["rank"] for straggler in found], warnings
    finally:
        devices.time = straggler.time = time
        console.warning = warning


def test_a_straggler_is_reported_once_while_it_stays_slow(ranks):
    warning = "rank 1 is a straggler: a block's forward takes 2e+03 ms, against 1e+03 ms on the median rank"
    # Four windows of five steps, and one that is too short.
    assert ranks(4).run(compare_several_times, 1.5) == [([None, 1, 1, None, None], [warning])] * 4
    assert ranks(2).run(compare_several_times, None) == [([None] * 5, [])] * 2
    assert ranks(1).run(compare_several_times, 1.5) == [([None] * 5, [])]


def test_the_timestamps_of_a_long_window_are_limited(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    detector, block = StragglerDetector(1.5, torch.device("cpu")), nn.Identity()
    detector.time_blocks_of(nn.ModuleList([block]))
    for _ in range(1500):
        block(torch.zeros(1))
    assert len(detector.forwards) == 1024

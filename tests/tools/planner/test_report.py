from types import SimpleNamespace

import pytest

from trainer.base.system.units import GIB
from trainer.tools.planner.report import ranking


@pytest.mark.parametrize(
    ("settings", "is_complete", "first", "chosen"),
    [
        ({}, True, "1 of 7 layouts simulated", "the configured layout is the best"),
        (
            {},
            False,
            "the search was interrupted: 1 of 7 layouts simulated",
            "the configured layout is the best of the 1 simulated before the interrupt",
        ),
        (
            {"parallel": {"tp": 2}},
            False,
            "the search was interrupted: 1 of 7 layouts simulated",
            "the best layout of the 1 simulated before the interrupt:",
        ),
    ],
)
def test_an_interrupted_search_does_not_claim_the_best_layout(settings, is_complete, first, chosen):
    training = SimpleNamespace(epochs=2.0)
    estimate = SimpleNamespace(
        tokens_per_second=10.0,
        hardware=SimpleNamespace(world_size=1, is_gpu=True),
        mfu=0.5,
        largest=SimpleNamespace(peak=GIB),
        fits=True,
        is_tight=False,
        slowest=SimpleNamespace(bound="matmuls"),
        run_s=None,
        resolved=SimpleNamespace(dims=SimpleNamespace(ep=2)),
        expert_imbalance=0.5,
        config=SimpleNamespace(training=training),
    )
    config = SimpleNamespace(run=SimpleNamespace(name="run"))
    candidate = SimpleNamespace(settings=settings, toml=lambda: "tp = 2", flags=dict, config=config)
    lines = ranking(7, [(candidate, estimate)], {}, None, is_complete).splitlines()
    assert lines[0] == first and chosen in lines
    rows = "the busiest rank gets 1.5 times the mean rows (--expert-imbalance 0.5)"
    assert f"assumed of the experts of an ep group: {rows}" in lines

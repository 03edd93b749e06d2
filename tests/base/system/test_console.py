import io
import sys
import time
from types import SimpleNamespace

import pytest

from trainer.base.system import console


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    simulated = SimpleNamespace(monotonic=lambda: now.s, strftime=time.strftime)
    monkeypatch.setattr(console, "time", simulated)
    return now


@pytest.mark.parametrize(
    ("total", "unit", "each", "shown"),
    [
        (
            26,
            " simulations",
            1,
            [
                "simulating: 5 of 26 simulations, 0m05s, about 0m21s left",
                "simulating: 10 of 26 simulations, 0m10s, about 0m16s left",
            ],
        ),
        (None, "B", 10**9, ["simulating: 5.00G B, 0m05s", "simulating: 10.0G B, 0m10s"]),
    ],
)
def test_progress_without_a_terminal_is_a_line_each_few_seconds(clock, capsys, total, unit, each, shown):
    with console.progress(total, unit, "simulating") as bar:
        for _ in range(12):
            clock.s += 1
            bar.update(each)
    out, err = capsys.readouterr()
    assert out == "" and "\r" not in err
    assert [line.partition(" ")[2] for line in err.splitlines()] == shown


def test_the_remaining_time_decreases_between_two_units_and_follows_a_new_total(clock, capsys):
    with console.progress(None, " blocks", "measuring") as bar:
        bar.total = 10
        for seconds, n in ((6, 0), (4, 2), (6, 0), (6, 0), (60, 0)):
            clock.s += seconds
            bar.update(n)
        bar.total = 4
        bar.set_description("simulating")
        bar.update(1)
        clock.s += 6
        bar.update(0)
    assert [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "measuring: 0 of 10 blocks, 0m06s",
        "measuring: 2 of 10 blocks, 0m16s, about 0m34s left",
        "measuring: 2 of 10 blocks, 0m22s, about 0m28s left",
        "measuring: 2 of 10 blocks, 1m22s, about 0m00s left",
        "simulating: 3 of 4 blocks, 1m28s, about 0m21s left",
    ]


def test_the_remaining_time_of_a_task_that_may_end_early_is_a_bound(clock, capsys):
    with console.progress(10, " blocks", "simulating", is_bound=True) as bar:
        clock.s += 6
        bar.update(5)
    assert capsys.readouterr().err.endswith("simulating: 5 of 10 blocks, 0m06s, at most 0m06s left\n")


def test_a_task_that_takes_less_has_no_line(clock, capsys):
    with console.progress(2, " simulations", "simulating") as bar:
        clock.s += 4
        bar.update()
    assert capsys.readouterr() == ("", "")


def test_ranks_that_do_not_log_show_no_progress(clock, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with console.progress(2, " simulations", "simulating") as bar:
        clock.s += 60
        bar.update()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_a_bar(monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    with console.progress(2, " simulations", "simulating") as bar:
        bar.update(1)
    assert "\rsimulating:   0%|" in stream.getvalue()


def test_lines_of_progress_survive_a_closed_terminal(clock, monkeypatch):
    def write(*_):
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=write))
    with console.progress(2, " simulations", "simulating") as bar:
        clock.s += 60
        bar.update()
    assert bar.n == 1

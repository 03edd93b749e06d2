import io
import sys
import time
from types import SimpleNamespace

import pytest

from trainer.system import console


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    simulated = SimpleNamespace(monotonic=lambda: now.s, strftime=time.strftime)
    monkeypatch.setattr(console, "time", simulated)
    return now


@pytest.mark.parametrize(
    ("total", "unit", "each", "shown"),
    [
        (26, " simulations", 1, ["simulating: 5 of 26 simulations, 0m05s", "simulating: 10 of 26 simulations, 0m10s"]),
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
    assert bar.done == 1

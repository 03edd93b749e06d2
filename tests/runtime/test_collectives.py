"""The time limit of collectives."""

import json
import time

import pytest

from trainer.runtime import collectives
from trainer.runtime.collectives import parse_collectives

YEAR_MS = 365 * 24 * 3600 * 1000


def trace(entries=True, **counts):
    """A dump of the flight recorder. counts: for each group, the numbers of its enqueued and completed collectives."""
    status = {
        group[1:]: {"last_enqueued_collective": str(enqueued), "last_completed_collective": str(completed)}
        for group, (enqueued, completed) in counts.items()
    }
    limits = {"0": YEAR_MS, "1": 4 * 3600 * 1000}  # the writers of checkpoints have a limit of their own
    found = [
        {
            "pg_id": int(group[1:]),
            "collective_seq_id": n,
            "profiling_name": "gloo:all_reduce",
            "timeout_ms": limits[group[1:]],
        }
        for group, (n, _) in counts.items()
    ]
    return json.dumps({"pg_status": status, "entries": found} if entries else {"pg_status": status}).encode()


def test_a_collective_that_has_not_completed_is_reported():
    assert parse_collectives(trace(g0=(7, 6), g1=(3, 3))) == [
        "waiting in gloo:all_reduce, collective 7 of process group 0"
    ]
    assert parse_collectives("") == []


@pytest.fixture
def watch(monkeypatch, capsys):
    """watch(seconds, dumps): run the thread of a limit of 10 s. seconds: the system's clock when the thread starts, and at each
    of its readings. Return its exit code and line, or None after the last dump."""

    class Exited(Exception):
        pass

    def run(seconds, dumps):
        states = iter(dumps)
        current = []

        def dump(with_entries, _):
            if not with_entries:
                current[:] = [next(states)]
            return trace(with_entries, **current[0])

        def exit_with(code):
            raise Exited(code)

        clock = iter(seconds)
        monkeypatch.setattr(collectives, "_recorders", lambda: [dump])
        monkeypatch.setattr(time, "sleep", lambda _: None)
        monkeypatch.setattr(time, "monotonic", lambda: next(clock))
        monkeypatch.setattr(collectives.dist, "get_rank", lambda: 3)
        monkeypatch.setattr(collectives.os, "_exit", exit_with)
        try:
            collectives._watch(10.0)
        except Exited as exited:
            return exited.args[0], capsys.readouterr().err
        except StopIteration:
            return None

    return run


WAITING = {"g0": (7, 6)}


def test_a_collective_that_takes_too_long_ends_the_process_with_a_line(watch):
    line = (
        "[rank 3] gloo:all_reduce, collective 7 of process group 0, has waited for 12 s; [distributed] timeout_s = 10\n"
    )
    assert watch([97.0, 100.0, 104.0, 108.0, 112.0], 4 * [WAITING]) == (1, line)


def test_time_in_which_the_process_was_suspended_does_not_count(watch):
    """Of the hour between two readings, twice the thread's interval counts, which is 5 s."""
    assert watch([97.0, 100.0, 3700.0, 3704.0], 3 * [WAITING]) is None
    code, line = watch([97.0, 100.0, 3700.0, 3704.0, 3708.0], 4 * [WAITING])
    assert code == 1 and "has waited for 13 s" in line


@pytest.mark.parametrize(
    "dumps",
    [
        [WAITING, {"g0": (8, 7)}, {"g0": (9, 8)}],  # each of them completes in time
        3 * [{"g0": (7, 7)}],
        3 * [{"g0": (7, 7), "g1": (2, 1)}],  # another group
    ],
)
def test_other_collectives_do_not_end_the_process(watch, dumps):
    assert watch([97.0, 100.0, 105.0, 110.0, 115.0], [*dumps, *dumps[-1:]]) is None

"""Delivery of metrics.jsonl to a service, which here is a list in memory that may be away."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from tests.run.sinks.runs import Process, logged_run, opened, record, wait_for
from trainer.run.metrics import Metrics
from trainer.run.sinks import build_sinks
from trainer.runtime.phases import PhaseTimer


class Memory:
    """A service that cannot remove single records. Its histories outlive the process."""

    histories: list[list[int]]

    def __init__(self, run):
        self.state, self.can_continue, self.is_away = {}, True, False

    def write(self, record):
        if self.is_away:
            raise ConnectionError("no route to host\nand a traceback")
        if not self.state:
            self.state["id"] = len(self.histories)
            self.histories.append([])
        self.histories[self.state["id"]].append(record["step"])

    def rewind(self, step):
        self.state.clear()

    def close(self):
        pass


@pytest.fixture
def service():
    return type("Memory", (Memory,), {"histories": []})


def test_a_stopped_run_continues_its_history(tmp_path, service):
    for first_step in (0, 3):
        with opened(logged_run(tmp_path), service, first_step) as process:
            process.write(range(first_step + 1, first_step + 4), 1.0)
    assert service.histories == [[1, 2, 3, 4, 5, 6]]


def test_a_rollback_replaces_a_history_with_later_steps(tmp_path, service):
    with opened(logged_run(tmp_path), service) as process:
        process.write([1, 2, 3], 1.0)
        process.delivered().rewind(1)
        process.write([2, 3], 2.0)
    assert service.histories == [[1, 2, 3], [1, 2, 3]]


def test_a_rollback_keeps_a_history_without_later_steps(tmp_path, service):
    with opened(logged_run(tmp_path), service) as process:
        process.write([1, 2, 3], 1.0)
        process.delivered().rewind(3)
        process.write([4], 2.0)
    assert service.histories == [[1, 2, 3, 4]]


def test_a_killed_process_leaves_unknown_what_is_stored_so_the_history_is_replaced(tmp_path, service):
    process = Process(logged_run(tmp_path), service)  # never closed
    process.write([1, 2, 3], 1.0)
    process.delivered()
    with opened(logged_run(tmp_path), service, 3) as process:
        process.write([4], 2.0)
    assert service.histories == [[1, 2, 3], [1, 2, 3, 4]]


def test_a_history_is_replaced_if_the_run_continued_without_the_service(tmp_path, service):
    """Not the number of bytes counts, but the content."""
    with opened(logged_run(tmp_path), service) as process:
        process.write([1, 2, 3], 1.0)
    with opened(logged_run(tmp_path), type("Other", (service,), {"histories": []}), 1) as process:
        process.write([2, 3, 4], 2.0)
    with opened(logged_run(tmp_path), service, 4) as process:
        process.write([5], 3.0)
    assert service.histories == [[1, 2, 3], [1, 2, 3, 4, 5]]


def test_a_service_that_is_away_causes_one_warning_and_gets_its_records_later(tmp_path, service, capsys):
    with opened(logged_run(tmp_path), service) as process:
        process.write([1], 1.0)
        process.delivered().delivery.service.is_away = True
        process.write([2, 3], 1.0)
        wait_for(lambda: process.delivery.has_warned)
        process.delivery.service.is_away = False
    assert service.histories == [[1, 2, 3]]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("warning: Memory cannot be written (no route to host); the run continues and tries again")


def test_the_next_process_delivers_what_this_one_could_not(tmp_path, service, capsys):
    process = Process(logged_run(tmp_path), service)
    process.write([1], 1.0)
    process.delivered().delivery.service.is_away = True
    process.write([2, 3], 1.0)
    wait_for(lambda: process.delivery.has_warned)
    process.close(limit_s=0)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("warning: Memory has not taken all records in 0 s; it gets them if the run is resumed")
    with opened(logged_run(tmp_path), service, 3) as process:
        process.write([4], 1.0)
    assert service.histories[-1] == [1, 2, 3, 4]


def test_lines_that_are_not_complete_yet_are_delivered_once(tmp_path, service):
    with opened(logged_run(tmp_path), service) as process:
        process.write([1], 1.0)
        process.delivered()
        line = json.dumps(record(2, 1.0)) + "\n"
        for part in (line[:10], line[10:]):
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write(part)
            process.delivery.work.set()
        process.write([3], 1.0)
    assert service.histories == [[1, 2, 3]]


@pytest.mark.parametrize("state", ["", "[]", '{"service": {}, "bytes": 5, "digest": "0"}'])
def test_an_unusable_state_file_begins_a_new_history(tmp_path, service, state):
    (tmp_path / "sinks").mkdir()
    (tmp_path / "sinks" / "memory.json").write_text(state)
    with opened(logged_run(tmp_path), service) as process:
        process.write([1, 2], 1.0)
    assert service.histories == [[1, 2]]


def test_only_the_writer_has_more_sinks_than_the_console(tmp_path):
    names = ["tensorboard", "jsonl", "console"]
    types = {w: [type(s).__name__ for s in build_sinks(names, logged_run(tmp_path), w)] for w in (True, False)}
    assert types == {True: ["Console", "JsonLines", "Delivery"], False: ["Console"]}
    assert sorted(os.listdir(tmp_path)) == ["config.toml", "environment.json"], "building has no side effect"


def test_a_sink_of_ones_own_is_a_small_class(tmp_path):
    class Lines:
        """Keeps lines in memory."""

        def __init__(self):
            self.lines = []

        def write(self, record):
            self.lines.append(f"{record['kind']} {record['step']}: {record['loss']}")

        def rewind(self, step):
            self.lines = [line for line in self.lines if int(line.split()[1][:-1]) <= step]

        def close(self):
            self.lines.append("end")

    sink, nothing = Lines(), SimpleNamespace()
    cpu = torch.device("cpu")
    metrics = Metrics(nothing, nothing, nothing, cpu, PhaseTimer(cpu), [sink])
    metrics.rewind(0)
    for step in (1, 2, 3):
        metrics.log_event({"kind": "eval", "step": step, "loss": 1.0})
    metrics.rewind(1)
    metrics.log_event({"kind": "eval", "step": 2, "loss": 2.0})
    metrics.close()
    assert sink.lines == ["eval 1: 1.0", "eval 2: 2.0", "end"]

"""Delivery of metrics.jsonl to a service, which here is a list in memory that may be away."""

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.run.sinks.runs import Process, logged_run, opened, patient, record, wait_for
from trainer.run.metrics import Metrics
from trainer.run.sinks import build_sinks
from trainer.run.sinks.delivery import Delivery, HistoryLost, Service
from trainer.run.sinks.local import JsonLines
from trainer.runtime.step_timer import StepTimer


class Memory(Service):
    """A service that cannot remove single records. Its histories outlive the process."""

    can_continue = True
    histories: list[list[int]]
    is_away = False

    def write(self, record):
        if self.is_away:
            raise ConnectionError("no route to host\nand a traceback")
        if not self.state:
            self.state["id"] = len(self.histories)
            self.histories.append([])
        self.histories[self.state["id"]].append(record["step"])

    def restart(self):
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
        wait_for(lambda: process.delivery.warned)
        process.delivery.service.is_away = False
    assert service.histories == [[1, 2, 3]]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("warning: Memory cannot be written (no route to host); the run continues and tries again")


def test_the_next_process_delivers_what_this_one_could_not(tmp_path, service, capsys):
    process = Process(logged_run(tmp_path), service)
    process.write([1], 1.0)
    process.delivered().delivery.service.is_away = True
    process.write([2, 3], 1.0)
    wait_for(lambda: process.delivery.warned)
    process.close(limit_s=0)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(
        "Memory has not taken all records of metrics.jsonl in 0 s; it gets them if this run trains further"
    )
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


class Steps:
    """metrics.jsonl and its delivery, whose thread is never started: the test says when it works."""

    def __init__(self, run, service):
        self.jsonl, self.delivery = JsonLines(run), Delivery(service, run)
        self.jsonl.rewind(0)
        self.delivery.rewind(0)

    def deliver(self, steps=(), loss=1.0):
        for step in steps:
            self.jsonl.write(record(step, loss))
        self.delivery._deliver()


def test_a_rewind_is_not_forgotten_if_the_file_cannot_be_read_at_this_moment(tmp_path, service):
    run = Steps(logged_run(tmp_path), service)
    run.deliver([1, 2, 3])
    run.jsonl.rewind(1)
    run.delivery.rewind(1)
    (tmp_path / "metrics.jsonl").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        run.deliver()
    (tmp_path / "away").rename(tmp_path / "metrics.jsonl")
    run.deliver([2, 3], loss=2.0)
    assert service.histories == [[1, 2, 3], [1, 2, 3]]


def test_a_state_that_could_not_be_saved_is_saved_later(tmp_path, service):
    run = Steps(logged_run(tmp_path), service)
    (tmp_path / "sinks").mkdir()
    path = tmp_path / "sinks" / "memory.json"
    run.deliver()
    path.unlink()
    path.mkdir()  # nothing can be saved
    with pytest.raises(IsADirectoryError):
        run.deliver([1])
    path.rmdir()
    run.deliver()
    assert json.loads(path.read_text()) == {"service": {"id": 0}}
    assert service.histories == [[1]]


def test_nothing_is_imported_or_saved_before_the_first_record(tmp_path, service):
    """Data workers are forked by the first batch. A process that ends before its first record changes nothing."""
    with opened(logged_run(tmp_path), service) as process:
        process.write([1, 2, 3], 1.0)
    path = tmp_path / "sinks" / "memory.json"
    state = path.read_text()
    killed = Process(logged_run(tmp_path), service, 3)
    assert not killed.delivery.thread.is_alive()
    with opened(logged_run(tmp_path), service, 3):
        pass
    assert path.read_text() == state
    with opened(logged_run(tmp_path), service, 3) as process:
        process.write([4], 1.0)
    assert service.histories == [[1, 2, 3, 4]]


def test_a_process_whose_records_could_not_be_written_to_the_file_keeps_the_old_state(tmp_path, service):
    with opened(logged_run(tmp_path), service) as process:
        process.write([1, 2, 3], 1.0)
    state = (tmp_path / "sinks" / "memory.json").read_text()
    with opened(logged_run(tmp_path), service, 3) as process:
        process.delivery.write(record(4, 1.0))
    assert (tmp_path / "sinks" / "memory.json").read_text() == state


def test_a_history_that_the_service_has_lost_is_written_again(tmp_path, service, capsys):
    class Lost(service):
        def write(self, record):
            if self.state and self.histories[self.state["id"]] is None:
                raise HistoryLost("the run 0 was deleted")
            super().write(record)

    with opened(logged_run(tmp_path), Lost) as process:
        process.write([1, 2], 1.0)
        process.delivered()
        service.histories[0] = None
        process.write([3], 1.0)
    assert service.histories == [None, [1, 2, 3]]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("warning: Lost: the run 0 was deleted; a new history gets all records")


@pytest.mark.parametrize("rotate", [lambda path: path.rename(path.with_suffix(".1")), Path.unlink])
def test_a_file_that_was_moved_away_or_deleted_begins_a_new_history(tmp_path, service, rotate):
    """The new file is longer than what was delivered of the old one, so a number of bytes would not tell."""
    run = Steps(logged_run(tmp_path), service)
    run.deliver([1, 2])
    rotate(tmp_path / "metrics.jsonl")
    run.deliver([3, 4, 5])
    assert service.histories == [[1, 2], [3, 4, 5]]


def test_a_file_that_was_rewritten_is_not_taken_for_one_that_continues_it(tmp_path, service):
    """The record of a save in the background follows later steps, so a rollback rewrites the file instead of truncating it."""
    run = Steps(logged_run(tmp_path), service)
    run.deliver([1, 2, 1, 3])
    run.jsonl.rewind(1)
    run.deliver()  # before the delivery hears of the rollback
    run.delivery.rewind(1)
    run.deliver([2, 3])
    assert service.histories == [[1, 2, 1, 3], [1, 1, 2, 3]]


def test_a_file_that_was_rewritten_with_the_delivered_records_is_continued(tmp_path, service):
    run = Steps(logged_run(tmp_path), service)
    run.deliver([1, 2])
    path = tmp_path / "metrics.jsonl"
    path.with_name("copy").write_bytes(path.read_bytes())
    path.with_name("copy").replace(path)
    run.deliver([3])
    assert service.histories == [[1, 2, 3]]


def test_all_services_end_at_the_same_time(tmp_path, service, capsys):
    """A scheduler gives a process that it has told to end about 30 s, not 30 s for each service."""
    both = threading.Barrier(2)

    class Slow(service):
        def close(self):
            both.wait()

    run, nothing, cpu = logged_run(tmp_path), SimpleNamespace(), torch.device("cpu")
    sinks = [JsonLines(run), Delivery(Slow, run), Delivery(type("Slower", (Slow,), {}), run)]
    metrics = Metrics(nothing, nothing, nothing, cpu, StepTimer(cpu), sinks, 1)
    metrics.rewind(0)
    metrics.log_event(record(1, 1.0))
    with patient(60.0):
        metrics.close()
    assert service.histories == [[1], [1]]
    assert capsys.readouterr().err == ""


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
    metrics = Metrics(nothing, nothing, nothing, cpu, StepTimer(cpu), [sink], 1)
    metrics.rewind(0)
    for step in (1, 2, 3):
        metrics.log_event({"kind": "eval", "step": step, "loss": 1.0})
    metrics.rewind(1)
    metrics.log_event({"kind": "eval", "step": 2, "loss": 2.0})
    metrics.close()
    assert sink.lines == ["eval 1: 1.0", "eval 2: 2.0", "end"]

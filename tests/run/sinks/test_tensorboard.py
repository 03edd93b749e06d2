"""The curves that a real TensorBoard server shows."""

import json
import re
import resource
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from tests.run.sinks.runs import FLAGS, STEPS, logged_run, opened, record, recorded, train, wait_for
from tests.training_runs import combine, in_folder
from trainer.run.sinks.tensorboard import CHARTS, TensorBoard
from trainer.tools.testing.ranks import RankError

SINKS = ["--metrics.sinks", "console,jsonl,tensorboard"]
TASK = ["--evaluation.tasks.idioms.path", "python_idioms"]
LOADERS = {"default": "auto", "slow": "false"}


@pytest.fixture(scope="module")
def runs(ranks, tiny, tmp_path_factory):
    """A folder of runs that were killed, rolled back, or resumed with a clock that was set back."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name, *flags, **faults):
        ranks(1).run(
            train, combine([*tiny, *FLAGS, *SINKS, *TASK, *in_folder(folder / name), *flags]), *faults.values()
        )

    # The resumed run evaluates at other steps, so the evaluation at step 12 is never repeated.
    with pytest.raises(RankError, match="ended without a result"):
        run("killed", kill_before=14)
    run("killed", "--evaluation.interval_steps", "10")
    run("rolled_back", kill_before=0, failed_steps=(13, 14))
    with pytest.raises(RankError, match="ended without a result"):
        run("clock_set_back", kill_before=14, failed_steps=(), clock_offset_s=86400.0)
    run("clock_set_back")
    run("stopped", "--training.steps", "10", kill_before=0, failed_steps=(), clock_offset_s=86400.0)
    run("stopped")
    return folder


@contextmanager
def server(folder, loader):
    """Start TensorBoard and yield a function that returns the JSON content of a URL of its HTTP interface. TensorBoard must use
    this loader: where its default one, another program, is not installed, it silently uses the slow one."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1", "--port", "0"]
    command += ["--load_fast", LOADERS[loader], "--reload_interval", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            log = ""
            while not (url := re.search(r"http://127\.0\.0\.1:\d+", log)):
                log += process.stderr.readline() or pytest.fail(f"TensorBoard ended: {log}")
            assert ("fast data loading" in log) == (loader == "default"), log

            def get(path, **query):
                with urllib.request.urlopen(f"{url[0]}/data/{path}?{urllib.parse.urlencode(query)}") as response:
                    return json.load(response)

            yield get
        finally:
            process.kill()


def shown(get, run):
    """Return the values of each tag that the server shows, by step."""
    tags = get("plugin/scalars/tags").get(run, {})
    points = {tag: get("plugin/scalars/scalars", run=run, tag=tag) for tag in tags}
    assert all(len({step for _, step, _ in p}) == len(p) for p in points.values()), "a step is shown twice"
    assert all(p == sorted(p) for p in points.values()), "the clock of the curves goes back"
    return {tag: {step: value for _, step, value in p} for tag, p in points.items()}


def fp32(curves):
    """Return curves as TensorBoard keeps them: fp32, by step."""
    return {name: {step: float(np.float32(value)) for step, value in points} for name, points in curves.items()}


@pytest.fixture(scope="module", params=list(LOADERS))
def get(runs, request):
    with server(runs, request.param) as get:
        wait_for(lambda: len(get("runs")) >= 4 and all(get("plugin/scalars/tags").values()))
        yield get


@pytest.mark.parametrize("name", ["killed", "rolled_back", "clock_set_back", "stopped"])
def test_every_curve_has_each_step_of_the_surviving_run_once(runs, get, name):
    expected = fp32(recorded(runs / name))
    assert {"train/loss", "checkpoint/blocked_s", "eval/held_out/loss"} < set(expected)
    assert list(expected["train/loss"]) == list(range(1, STEPS + 1))
    wait_for(lambda: shown(get, f"{name}/tb") == expected)


def test_a_running_server_shows_what_a_rollback_has_removed_no_longer(runs, get, request):
    folder = runs / f"live_{request.node.callspec.params['get']}"
    folder.mkdir()
    with opened(logged_run(folder), TensorBoard) as process:
        process.write(range(1, 15), 1.0)
        wait_for(lambda: shown(get, f"{folder.name}/tb") == {"train/loss": dict.fromkeys(range(1, 15), 1.0)})
        process.rewind(5)
        process.write(range(6, 9), 2.0)
        kept = dict.fromkeys(range(1, 6), 1.0) | dict.fromkeys(range(6, 9), 2.0)
        wait_for(lambda: shown(get, f"{folder.name}/tb") == {"train/loss": kept})


# ------------------------------------------------------------ the file


def read(folder):
    """Return step -> value, as TensorBoard's Python reader loads them."""
    events = EventAccumulator(str(folder / "tb")).Reload().Scalars("train/loss")
    assert len({event.step for event in events}) == len(events)
    assert [event.wall_time for event in events] == sorted(event.wall_time for event in events)
    return {event.step: event.value for event in events}


def files(folder):
    return sorted((folder / "tb").iterdir())


def test_the_board_has_groups_of_curves_the_configuration_and_the_samples(tmp_path):
    board = TensorBoard(logged_run(tmp_path))
    board.restart()
    board.write(record(1, 3.0))
    samples = [{"prompt": "def ", "text": "f(x):\n\treturn"}, {"prompt": "a", "text": ""}]
    board.write({"kind": "samples", "step": 2, "timestamp_s": 1e9, "samples": samples, "samples_time_s": 0.5})
    board.close()
    again = TensorBoard(logged_run(tmp_path))  # a resumed run
    (tmp_path / "config.toml").write_text("[training]\nsteps = 30\n")
    again.write(record(3, 2.0))
    again.close()
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"tensors": 0}).Reload()
    shown = {tag: [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors(tag)]
             for tag in ("config.toml", "samples/1", "samples/2")}  # fmt: skip
    assert shown["samples/1"] == [(2, "after 'def ':\n\n    f(x):\n    \treturn")]
    assert shown["samples/2"] == [(2, "after 'a':\n\n")]
    assert [step for step, _ in shown["config.toml"]] == [1, 3]
    assert "    steps = 30\n" in shown["config.toml"][1][1]
    assert set(events.PluginTagToContent("text")) == set(shown)
    layout = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["losses", "tasks", "speed", "memory"]
    assert {e.step for e in events.Scalars("train/loss")} == {1, 3}


def test_every_chart_of_the_board_has_a_curve(runs):
    names = set().union(*(recorded(runs / name) for name in ("stopped", "killed")))
    only_on_gpus = {"train/mfu_percent"}
    for charts in CHARTS.values():
        for patterns in charts.values():
            for pattern in set(patterns) - only_on_gpus:
                assert any(re.fullmatch(pattern, name) for name in names), pattern


def test_a_resumed_run_continues_the_file_of_a_process_that_ended_properly(tmp_path):
    for first_step in (0, 3):
        with opened(logged_run(tmp_path), TensorBoard, first_step) as process:
            process.write(range(first_step + 1, first_step + 4), 1.0 + first_step)
    assert read(tmp_path) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 4.0, 5: 4.0, 6: 4.0}
    assert len(files(tmp_path)) == 1


def test_files_whose_end_is_unknown_are_emptied_and_replaced_by_one(tmp_path):
    """A killed process leaves an incomplete event, a power cut anything, an earlier version several files."""
    with opened(logged_run(tmp_path), TensorBoard) as process:
        process.write([1, 2, 3], 1.0)
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes() + bytes(100))
    (tmp_path / "sinks" / "tensorboard.json").write_text("")
    with opened(logged_run(tmp_path), TensorBoard, 2) as process:
        process.write([3, 4], 2.0)
    assert read(tmp_path) == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}
    first, last = files(tmp_path)
    assert first == path and not first.stat().st_size and last.stat().st_size


def test_the_new_file_is_the_last_one_by_name_although_the_clock_was_set_back(tmp_path, monkeypatch):
    with opened(logged_run(tmp_path), TensorBoard) as process:
        process.write([1, 2], 1.0)
    (first,) = files(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 1e8)
    with opened(logged_run(tmp_path), TensorBoard, 1) as process:
        process.write([2], 2.0)
    assert files(tmp_path)[0] == first and len(files(tmp_path)) == 2
    assert read(tmp_path) == {1: 1.0, 2: 2.0}


def test_the_curves_of_a_run_whose_clock_was_set_back_do_not_go_back(tmp_path):
    board = TensorBoard(logged_run(tmp_path))
    board.restart()
    for step, time_s in enumerate((2e9, 1e9), 1):
        board.write({"kind": "train", "step": step, "loss": 1.0, "timestamp_s": time_s})
    board.close()
    assert read(tmp_path) == {1: 1.0, 2: 1.0}


def test_an_event_that_does_not_fit_on_the_disk_leaves_no_damage(tmp_path):
    board = TensorBoard(logged_run(tmp_path))
    board.restart()
    board.write(record(1, 1.0))
    size = files(tmp_path)[0].stat().st_size
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, unlimited[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            board.write(record(2, 2.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert files(tmp_path)[0].stat().st_size == size
    board.write(record(2, 2.0))
    board.close()
    assert read(tmp_path) == {1: 1.0, 2: 2.0}

"""The curves that a real TensorBoard server shows."""

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from contextlib import closing, contextmanager
from unittest import mock

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.training_runs import combine, in_folder, trainer_from
from trainer.resilience.guard import StabilityGuard
from trainer.run.metrics import _NOT_PLOTTED
from trainer.run.tensorboard import EventFile
from trainer.system.files import read_json_lines
from trainer.testing.ranks import RankError
from trainer.trainer import Trainer

STEPS = 20
FLAGS = [
    *("--metrics.tensorboard", "true", "--training.steps", str(STEPS), "--checkpoint.interval_steps", "5"),
    *("--evaluation.interval_steps", "3", "--resilience.max_consecutive_skips", "2"),
    *("--resilience.on_max_skips", "rollback"),
]
LOADERS = {"default": "auto", "slow": "false"}


def train(argv, kill_before=0, failed_steps=(), clock_offset_s=0.0):
    """Train, with a clock that is wrong by clock_offset_s. kill_before: step before which the process is killed. failed_steps:
    those whose loss becomes NaN once."""
    trainer, failed = trainer_from(argv), set(failed_steps)
    train_step, decide, now = Trainer.train_step, StabilityGuard.decide, time.time

    def step(self, *args):
        if self.state.step + 1 == kill_before:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(self, *args)

    def decide_or_fail(self, loss, *args):
        next_step = trainer.state.step + 1
        if next_step in failed:
            failed.remove(next_step)
            loss = loss * math.nan
        return decide(self, loss, *args)

    with (
        mock.patch.object(Trainer, "train_step", step),
        mock.patch.object(StabilityGuard, "decide", decide_or_fail),
        mock.patch.object(time, "time", lambda: now() + clock_offset_s),
    ):
        trainer.train()


@pytest.fixture(scope="module")
def runs(ranks, tiny, tmp_path_factory):
    """A folder of runs that were killed, rolled back, or resumed with a clock that was set back."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name, *flags, **faults):
        ranks(1).run(train, combine([*tiny, *FLAGS, *in_folder(folder / name), *flags]), *faults.values())

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
    """Start TensorBoard and yield a function that returns the JSON content of a URL of its HTTP interface."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1", "--port", "0"]
    command += ["--load_fast", LOADERS[loader], "--reload_interval", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = next(m[0] for line in process.stderr if (m := re.search(r"http://127\.0\.0\.1:\d+", line)))

            def get(path, **query):
                with urllib.request.urlopen(f"{url}/data/{path}?{urllib.parse.urlencode(query)}") as response:
                    return json.load(response)

            yield get
        finally:
            process.kill()


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "not true within 60 s"
        time.sleep(0.1)


def shown(get, run):
    """Return the values of each tag that the server shows, by step."""
    tags = get("plugin/scalars/tags").get(run, {})
    points = {tag: get("plugin/scalars/scalars", run=run, tag=tag) for tag in tags}
    assert all(len({step for _, step, _ in p}) == len(p) for p in points.values()), "a step is shown twice"
    assert all(p == sorted(p) for p in points.values()), "the clock of the curves goes back"
    return {tag: {step: value for _, step, value in p} for tag, p in points.items()}


def recorded(folder):
    """Return the values of each tag that metrics.jsonl contains, by step, as TensorBoard's fp32."""
    curves = {}
    for record in read_json_lines(folder / "metrics.jsonl"):
        group = "/".join(filter(None, (record["kind"], record.get("dataset"))))
        for key, value in record.items():
            if key not in _NOT_PLOTTED and isinstance(value, int | float):
                curves.setdefault(f"{group}/{key}", {})[record["step"]] = float(np.float32(value))
    return curves


@pytest.fixture(scope="module", params=list(LOADERS))
def get(runs, request):
    with server(runs, request.param) as get:
        wait_for(lambda: len(get("runs")) >= 4 and all(get("plugin/scalars/tags").values()))
        yield get


@pytest.mark.parametrize("name", ["killed", "rolled_back", "clock_set_back", "stopped"])
def test_every_curve_has_each_step_of_the_surviving_run_once(runs, get, name):
    expected = recorded(runs / name)
    assert {"train/loss", "checkpoint/blocked_s", "eval/held_out/loss"} < set(expected)
    assert list(expected["train/loss"]) == list(range(1, STEPS + 1))
    wait_for(lambda: shown(get, f"{name}/tb") == expected)


BUFFER = 2**22


def write(folder, last_step, steps, value):
    file = EventFile(folder, last_step, BUFFER)
    for step in steps:
        file.write(step, {"loss": value})
    return file


def test_a_running_server_shows_what_a_rollback_has_removed_no_longer(runs, get, request):
    folder = runs / request.node.callspec.params["get"] / "tb"
    run = str(folder.relative_to(runs))
    with closing(write(folder, 0, range(1, 15), 1.0)):
        wait_for(lambda: shown(get, run) == {"loss": dict.fromkeys(range(1, 15), 1.0)})
    with closing(write(folder, 5, range(6, 9), 2.0)):
        kept = dict.fromkeys(range(1, 6), 1.0) | dict.fromkeys(range(6, 9), 2.0)
        wait_for(lambda: shown(get, run) == {"loss": kept})


# ------------------------------------------------------------ the file


def read(folder):
    """Return step -> value, as TensorBoard's Python reader loads them."""
    events = EventAccumulator(str(folder)).Reload().Scalars("loss")
    assert len({event.step for event in events}) == len(events)
    return {event.step: event.value for event in events}


@pytest.mark.parametrize("tail", [b"", b"\x05", bytes(100), b"\xff" * 100])
def test_a_resumed_run_continues_after_the_last_complete_step(tmp_path, tail):
    """A killed process leaves an incomplete record, a power cut zeros or the content of other files."""
    write(tmp_path, 0, [1, 2, 3], 1.0).close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes() + tail)
    write(tmp_path, 3, [4], 2.0).close()
    assert read(tmp_path) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0}
    assert (path.stat().st_size > 0) == (not tail), "an intact file is continued"


def test_the_files_of_earlier_versions_and_of_a_killed_replacement_become_one(tmp_path):
    """Earlier versions started a new file at each resume. Files are replaced by one before they are deleted."""
    write(tmp_path, 0, [1, 2, 3], 1.0).close()
    (first,) = tmp_path.iterdir()
    content = first.read_bytes()
    write(tmp_path, 2, [3, 4], 2.0).close()
    first.write_bytes(content)
    (tmp_path / "events.tmp-01234567").touch()
    write(tmp_path, 4, [5], 3.0).close()
    assert read(tmp_path) == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0, 5: 3.0}
    *empty, last = sorted(tmp_path.iterdir())
    assert all(not path.stat().st_size for path in empty) and last.name > first.name


def test_the_new_file_is_the_last_one_by_name_although_the_clock_was_set_back(tmp_path, monkeypatch):
    write(tmp_path, 0, [1, 2], 1.0).close()
    (first,) = tmp_path.iterdir()
    monkeypatch.setattr(time, "time", lambda: 1e9)
    write(tmp_path, 1, [2], 2.0).close()
    assert sorted(tmp_path.iterdir())[0] == first
    times = [event.wall_time for event in EventAccumulator(str(tmp_path)).Reload().Scalars("loss")]
    assert times == sorted(times)


def test_a_folder_in_which_nothing_fits_keeps_its_files(tmp_path):
    write(tmp_path, 0, range(1, 100), 1.0).close()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            EventFile(tmp_path, 50, BUFFER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before

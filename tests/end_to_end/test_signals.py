"""Signals, suspensions and closed streams, as a terminal, a scheduler or a parent process causes them."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from tests.end_to_end.test_commands import (
    SCRIPT,
    assert_saved_and_stopped,
    await_step,
    environment,
    ranks_of,
)
from tests.ports import free_port, free_ports
from tests.training_runs import records


@pytest.fixture
def start(tiny, tmp_path):
    """start(ranks, *options, ignored=(), **variables): start an endless run, which is killed after the test. ignored: signals
    that its parent ignores."""
    started = []

    def start_run(ranks, *options, ignored=(), streams=None, **variables):
        def choose():
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        command = [SCRIPT, *tiny, "--training.steps", "1000000", "--run.output_folder", str(tmp_path), *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        variables = environment(NGPU=str(ranks), **variables)
        process = subprocess.Popen(command, env=variables, preexec_fn=choose, **(streams or pipes))
        started.append(process)
        return process

    yield start_run
    for process in started:
        if process.poll() is None:
            signal_all(process, signal.SIGKILL)
        process.wait()


def processes(root):
    """Return the id and the command of a process and of all processes that descend from it."""
    listing = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()[1:]]
    family = {root.pid}
    while children := {int(pid) for pid, parent, _ in rows if int(parent) in family} - family:
        family |= children
    return {int(pid): command for pid, _, command in rows if int(pid) in family}


def signal_all(root, number):
    found = processes(root)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return found


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGUSR1), (2, signal.SIGHUP)])
def test_a_signal_to_every_process_of_a_job_saves(start, tmp_path, ranks, number):
    """A terminal that closes, or Slurm, signals all processes."""
    process = start(ranks, "--checkpoint.async_mode", "thread")
    await_step(process)
    found = signal_all(process, number)
    assert len(found) >= ranks
    assert_saved_and_stopped(process, tmp_path / "tiny")


def test_signals_that_the_parent_ignores_do_not_end_a_run(start, tmp_path):
    """`nohup` ignores SIGHUP, and a script ignores SIGINT and SIGQUIT in its background jobs."""
    ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    process = start(2, ignored=ignored)
    await_step(process)
    for number in ignored:
        signal_all(process, number)
    for _ in range(5):
        await_step(process)
    assert process.poll() is None
    process.send_signal(signal.SIGUSR2)
    assert_saved_and_stopped(process, tmp_path / "tiny")


SHORT_LIMITS = ["--resilience.hang_timeout_s", "8", "--distributed.timeout_s", "9"]
"""A suspension counts as half of the first limit, so 4 s are left for a step beside other tests."""
LONGER_S = 10


def suspend(process, seconds):
    """Suspend all processes of a run after its next step, and wait until it has made steps again: two suspensions in one step
    would exceed its limit. Return the ids of the processes."""
    await_step(process)
    stopped = signal_all(process, signal.SIGSTOP)
    time.sleep(seconds)
    signal_all(process, signal.SIGCONT)
    for _ in range(40):  # more than were in the pipe
        await_step(process)
    return stopped


def test_a_suspended_run_continues(start, tmp_path):
    """It is suspended for longer than the time limits of steps and of collectives."""
    process = start(2, *SHORT_LIMITS)
    assert len(suspend(process, LONGER_S)) == 3
    process.terminate()
    assert_saved_and_stopped(process, tmp_path / "tiny")


def test_a_run_with_saves_and_evaluations_is_suspended_repeatedly(start, tmp_path):
    options = ["--checkpoint.async_mode", "thread", "--evaluation.interval_steps", "2"]
    process = start(2, *SHORT_LIMITS, *options)
    for _ in range(2):
        suspend(process, LONGER_S)
    process.terminate()
    assert_saved_and_stopped(process, tmp_path / "tiny")


@pytest.mark.parametrize("console", ["terminal", "pipe"])
def test_a_paused_console_stops_neither_steps_nor_the_save_after_a_stop_request(start, tmp_path, console):
    """Its reader pauses for longer than the time limits: Ctrl-S, a pager, a stalled connection."""
    reader, writer = pty.openpty() if console == "terminal" else os.pipe()
    if console == "pipe":
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    options = ["--resilience.hang_timeout_s", "4", "--distributed.timeout_s", "5", "--metrics.interval_steps", "1"]
    process = start(
        2 if console == "terminal" else 1,
        *options,
        streams={"stdout": writer, "stderr": writer, "stdin": subprocess.DEVNULL},
    )
    os.close(writer)
    shown = b""
    while b"step  " not in shown and b"| loss" not in shown:
        shown += os.read(reader, 4096)
    folder = tmp_path / "tiny"

    def steps():
        return len(records(folder)) if (folder / "metrics.jsonl").exists() else 0

    paused_at, before = time.monotonic(), 0
    while time.monotonic() - paused_at < 9 or before < 330:  # more lines than are kept
        assert process.poll() is None
        time.sleep(3)
        now = steps()
        assert now > before, "no step while the console is paused"
        before = now
    if console == "pipe":  # the reader continues
        while b"lines are not shown, because the console was paused; the log file has them" not in shown:
            shown += os.read(reader, 4096)
    process.terminate()
    if console == "pipe":
        with contextlib.suppress(OSError):
            while part := os.read(reader, 4096):
                shown += part
        assert b"checkpoint saved" in shown
    assert process.wait(60) == 0
    log = (folder / "log.txt").read_text()
    assert (
        log.count("| loss ") == len(records(folder)) and "(checkpoint saved); rerun the same command to resume" in log
    )
    assert max((folder / "checkpoints").iterdir()).name == f"step-{records(folder)[-1]['step']:08}"
    os.close(reader)


MEMBERS = {
    "the first node": ({"NNODES": "2", "NODE_RANK": "0"}, "these of the 2 nodes to join at localhost:PORT: 1"),
    "another node": ({"NNODES": "2", "NODE_RANK": "1"}, "the first node to answer at localhost:PORT"),
    "an elastic node": ({"NNODES": "2:4"}, "at least 2 nodes to join at localhost:PORT; 1 have joined"),
    "the first rank": ({"WORLD_SIZE": "2", "RANK": "0"}, "these of the 2 ranks to join at localhost:PORT: 1"),
    "another rank": ({"WORLD_SIZE": "2", "RANK": "1"}, "rank 0 to answer at localhost:PORT"),
}


def test_a_process_that_waits_for_others_says_so_and_reacts_to_signals(start):
    ports = dict(zip(MEMBERS, free_ports(len(MEMBERS)), strict=True))
    waiting = {
        name: start(1, MASTER_ADDR="localhost", MASTER_PORT=ports[name], **variables)
        for name, (variables, _) in MEMBERS.items()
    }
    for (name, process), number in zip(waiting.items(), (15, 2, 15, 1, 2), strict=True):
        line = process.stdout.readline()
        expected = re.escape(MEMBERS[name][1].replace("PORT", ports[name]))
        assert line, (name, process.communicate())
        assert re.fullmatch(rf"[\d:]{{8}} (\[rank 1\] )?waiting until [\d:]{{8}} for {expected}\n", line), (name, line)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        end = f"{signal.Signals(number).name}: the run ends before its first step, so there is nothing to save\n"
        assert (process.returncode, out, err) == (128 + number, "", end), name


def test_a_node_that_does_not_join_is_named(start):
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "NNODES": "4"}
    first, second = (start(1, "--distributed.init_timeout_s", "8", NODE_RANK=str(i), **common) for i in range(2))
    _, err = first.communicate(timeout=120)
    late = "these of the 4 nodes did not join within 8 s: 2, 3"
    where = f"localhost:{common['MASTER_PORT']}"
    assert (first.returncode, err) == (1, f"rendezvous of the launchers failed at {where}: {late}\n")
    assert second.wait(60) == 1


def run(command, **options):
    return subprocess.run(["bash", "-c", command], env=environment(NGPU="1", LC_ALL="C.UTF-8"), timeout=120, **options)


@pytest.mark.parametrize(
    "redirection",
    ["NGPU=2 RUN <&- >&- 2>&-", "RUN | head -1; exit ${PIPESTATUS[0]}", "RUN >/dev/full 2>/dev/full"],
)
def test_a_run_whose_output_cannot_be_written_is_complete(tiny, tmp_path, redirection):
    words = " ".join([SCRIPT, *tiny, "--run.output_folder", str(tmp_path), "--training.steps", "12"])
    assert run(redirection.replace("RUN", words), capture_output=True).returncode == 0
    assert [record["step"] for record in records(tmp_path / "tiny")] == list(range(1, 13))


def test_a_name_that_the_console_cannot_encode_does_not_end_a_run(tiny, tmp_path):
    words = " ".join([SCRIPT, *tiny, "--run.output_folder", str(tmp_path), "--run.name", "tiñy-😀"])
    done = run(f"PYTHONIOENCODING=ascii {words}", capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(rb"ti\xf1y-\U0001f600" + b"\n")
    assert len(records(tmp_path / "tiñy-😀")) == 4


KILLED = "rank {} was killed by SIGTERM; the other ranks of this node were stopped\n"
BEFORE_TRAINING = "SIGTERM: the run ends before its first step, so there is nothing to save\n"


@pytest.mark.parametrize(
    ("receiver", "line"),
    [("all processes", BEFORE_TRAINING), ("launcher", BEFORE_TRAINING), (0, KILLED.format(0)), (1, KILLED.format(1))],
)
def test_a_signal_to_any_process_before_the_first_step_is_one_line(start, tmp_path, receiver, line):
    process = start(2)
    while not (tmp_path / "tiny").exists():  # the ranks have joined
        assert process.poll() is None
        time.sleep(0.01)
    if receiver == "all processes":
        signal_all(process, signal.SIGTERM)
    else:
        os.kill(process.pid if receiver == "launcher" else ranks_of(process)[receiver], signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (143, line)


@pytest.mark.parametrize("command", ["train.py", "scripts/prepare_data.py"])
def test_sigterm_during_the_preparation_is_one_line(tiny, tmp_path, command):
    """Python would warn about the semaphores of the workers."""
    (tmp_path / "data").mkdir()
    for i in range(4):  # several chunks
        (tmp_path / "data" / f"{i}.txt").write_text("some words\n" * 500_000)
    options = ["--data.path", tmp_path / "data", "--data.store_folder", tmp_path, "--data.prepare_workers", "2"]
    words = [sys.executable, ROOT / command, *tiny, *options, "--run.output_folder", tmp_path]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(list(map(str, words)), env=environment(), **pipes)
    while not any("spawn_main" in command for command in processes(process).values()):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=60)
    line = "SIGTERM: the run ends before its first step, so there is nothing to save\n"
    assert process.returncode == 143
    assert err == (line if command == "train.py" else "interrupted; rerun the same command to continue\n")

"""Stop signals: the thread that receives them, the reactions of ranks, and those of the launcher with its exit codes."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
from trainer.base.system import signals
from trainer.base.system.signals import STOP_SIGNALS, SignalForwarder, StopRequest

SLEEP = "import signal, time; signal.signal(signal.SIGUSR1, signal.SIG_IGN); print(flush=True); time.sleep(60)"
PROGRAM = """
import subprocess, sys, threading
from trainer.base.system.signals import SignalListener
SignalListener(lambda number: print(number.name, flush=True))
child = "import signal; print(sorted(n.name for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])), flush=True)"
subprocess.run([sys.executable, "-c", child])
threading.Event().wait()  # the main thread runs no handlers
"""


@pytest.fixture
def start():
    """start(ignored, blocked): start a process that lists the signals that its children inherit as blocked, then each signal."""
    started = []

    def start_one(ignored=(), blocked=()):
        def choose():
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=choose
        )
        started.append(process)
        return process, process.stdout.readline()

    yield start_one
    for process in started:
        process.kill()
        process.wait()


def test_every_stop_signal_is_received_and_children_inherit_that_it_is_blocked(start):
    process, blocked = start()
    assert blocked == f"{sorted(number.name for number in STOP_SIGNALS)}\n"
    for number in STOP_SIGNALS:
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name}\n"


def test_signals_that_the_launcher_has_blocked_are_received(start):
    process, _ = start(blocked=STOP_SIGNALS)
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "SIGUSR1\n"


def test_a_signal_that_the_parent_ignores_stays_ignored(start):
    process, blocked = start(ignored=(signal.SIGHUP, signal.SIGINT))
    assert blocked == "['SIGTERM', 'SIGUSR1', 'SIGUSR2']\n"
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    assert process.stdout.readline() == "SIGTERM\n"


@pytest.mark.parametrize("command", ["train.py", "trainer/launch.py"])
def test_a_signal_while_python_starts_is_one_line(command):
    """The signal waits until the command has unblocked it, before it imports other modules than those of this page."""

    def interrupt():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        os.kill(os.getpid(), signal.SIGINT)

    done = subprocess.run(
        [sys.executable, ROOT / command], capture_output=True, text=True, timeout=60, preexec_fn=interrupt
    )
    line = "SIGINT: the run ends before its first step, so there is nothing to save\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", line)


# ---------------------------------------------------------------- a rank that trains


@pytest.fixture
def request_after(monkeypatch):
    """Function that returns the request after signals at the given times, whose messages are collected in `lines`."""

    def receive(lines, *signals):
        request = StopRequest(lambda line: lines.append((line, request.requested)))
        for second, number in signals:
            monkeypatch.setattr(time, "monotonic", lambda second=second: second)
            request.receive(number)
        return request

    return receive


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_request_is_confirmed_once_and_is_in_effect_before_its_message(request_after, number):
    lines = []
    request_after(lines, (0.0, number), (0.5, number))
    text = "the run stops after this step or the next; a repeated SIGTERM or SIGINT ends it immediately"
    assert lines == [(f"{number.name}: {text}", True)]


def test_a_repeated_sigterm_or_sigint_ends_the_process_with_a_line(request_after, monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    request_after([], (0.0, signal.SIGINT), (0.5, signal.SIGINT), (2.0, signal.SIGTERM))
    assert codes == [143]
    assert capsys.readouterr().err == "a repeated SIGTERM ends this process\n"


def test_other_signals_never_end_the_process_nor_count_as_the_first_sigterm(request_after, monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"exited with {code}"))
    hang_ups = [(float(second), signal.SIGHUP) for second in range(0, 10, 2)]
    assert request_after([], *hang_ups, (10.0, signal.SIGUSR1), (12.0, signal.SIGTERM), (14.0, signal.SIGHUP)).requested


def test_a_signal_during_the_delivery_of_the_last_records_does_not_promise_a_step():
    lines = []
    request = StopRequest(lines.append)
    request.has_ended = True
    request.receive(signal.SIGINT)
    text = "the run has ended and delivers its last records; a repeated SIGTERM or SIGINT ends it immediately"
    assert lines == [f"SIGINT: {text}"]


def test_ctrl_c_in_a_python_program_is_a_request_until_training_has_ended():
    request = StopRequest(print)
    end = request.receive_interrupts()
    os.kill(os.getpid(), signal.SIGINT)
    assert request.requested
    end()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_program_keeps_its_own_reaction_to_ctrl_c():
    received, previous = [], signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        request = StopRequest(print)
        end = request.receive_interrupts()
        os.kill(os.getpid(), signal.SIGINT)
        end()
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert received == [signal.SIGINT, signal.SIGINT] and not request.requested


# ---------------------------------------------------------------- the launcher


@pytest.fixture
def rank(monkeypatch):
    """A child process that ignores SIGUSR1 and ends after other signals. The launcher also lists one that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    process = subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.PIPE)
    process.stdout.readline()
    monkeypatch.setattr(signals, "children", lambda: [ended.pid] + [process.pid] * (process.poll() is None))
    monkeypatch.setattr(signals, "prevent_restarts", lambda ranks: None)  # the thread would outlive the test
    yield process
    process.kill()
    process.wait()


def test_a_signal_reaches_the_other_ranks_if_one_has_just_ended(rank):
    forwarder = SignalForwarder()
    forwarder.receive(signal.SIGHUP)
    assert rank.wait(10) == -signal.SIGHUP and forwarder.signal is signal.SIGHUP


def test_only_a_repeated_sigterm_or_sigint_kills_the_ranks(rank, monkeypatch):
    clock = iter([5.0, 5.5, 10.0, 10.0, 10.0, 12.0])
    monkeypatch.setattr(signals.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(signals, "send", lambda number, processes: sent.append(number))
    sent, forwarder = [], SignalForwarder()
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):  # the third is the same request as the second
        forwarder.receive(number)
    assert forwarder.signal is signal.SIGUSR1
    forwarder.receive(signal.SIGINT)
    assert sent == [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGKILL]
    assert forwarder.signal is signal.SIGINT


def test_ranks_that_start_after_a_signal_are_killed(monkeypatch):
    """torchrun would restart ranks that have failed, although the run was asked to stop."""
    sent, rounds = [], iter([[7], [7, 8], [7, 9]])
    monkeypatch.setattr(signals, "children", lambda: next(rounds))
    monkeypatch.setattr(signals, "send", lambda number, processes: sent.append((number, processes)))
    with pytest.raises(StopIteration):
        signals.prevent_restarts({7})
    assert sent == [(signal.SIGKILL, []), (signal.SIGKILL, [8]), (signal.SIGKILL, [9])]


def failed(**codes):
    """A torchrun error: the first of the ranks has failed first. codes: exit code of each rank."""
    failures = {int(rank[1:]): SimpleNamespace(exitcode=code, local_rank=int(rank[1:])) for rank, code in codes.items()}
    first = next(iter(failures.items()))
    return SimpleNamespace(failures=failures, get_first_failure=lambda: first)


BEFORE_TRAINING = "SIGTERM: the run ends before its first step, so there is nothing to save"


@pytest.mark.parametrize(
    ("received", "error", "code", "line"),
    [
        (None, failed(r1=2, r0=-15), 2, ""),
        (None, failed(r1=-9), 137, "rank 1 was killed by SIGKILL; the other ranks of this node were stopped\n"),
        (None, failed(r0=255), 255, ""),
        (None, failed(r0=143), 143, "rank 0 was killed by SIGTERM; the other ranks of this node were stopped\n"),
        (None, failed(r1=143), 143, "rank 1 was killed by SIGTERM; the other ranks of this node were stopped\n"),
        (signal.SIGHUP, failed(r0=1, r1=-9), 129, "the run was stopped by SIGHUP before its state could be saved\n"),
        (signal.SIGTERM, failed(r1=1, r0=143), 143, f"{BEFORE_TRAINING}\n"),
    ],
)
def test_the_exit_code_is_that_of_the_first_failed_rank_or_of_the_signal(received, error, code, line, capsys):
    forwarder = SignalForwarder()
    forwarder.signal = received
    assert (forwarder.exit_code(error), capsys.readouterr().err) == (code, line)


def test_ranks_that_a_repeated_signal_ends_have_printed_the_line(capsys):
    forwarder = SignalForwarder()
    forwarder.signal, forwarder.repeated = signal.SIGTERM, True
    assert (forwarder.exit_code(failed(r0=143, r1=143)), capsys.readouterr().err) == (143, "")

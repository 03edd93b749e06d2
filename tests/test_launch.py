"""Signals that the launcher forwards, and its exit codes."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from trainer import launch
from trainer.launch import SignalForwarder

SLEEP = "import signal, time; signal.signal(signal.SIGUSR1, signal.SIG_IGN); print(flush=True); time.sleep(60)"


@pytest.fixture
def rank(monkeypatch):
    """A child process that ignores SIGUSR1 and ends after other signals. The launcher also lists one that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    process = subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.PIPE)
    process.stdout.readline()
    monkeypatch.setattr(launch, "children", lambda: [ended.pid] + [process.pid] * (process.poll() is None))
    monkeypatch.setattr(launch, "prevent_restarts", lambda ranks: None)  # the thread would outlive the test
    yield process
    process.kill()
    process.wait()


def test_a_signal_reaches_the_other_ranks_if_one_has_just_ended(rank):
    forwarder = SignalForwarder()
    forwarder.receive(signal.SIGHUP)
    assert rank.wait(10) == -signal.SIGHUP and forwarder.signal is signal.SIGHUP


def test_only_a_repeated_sigterm_or_sigint_kills_the_ranks(rank, monkeypatch):
    clock = iter([0.0, 5.0, 5.5, 10.0, 10.0, 12.0])
    monkeypatch.setattr(launch.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(launch, "send", lambda number, processes: sent.append(number))
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
    monkeypatch.setattr(launch, "children", lambda: next(rounds))
    monkeypatch.setattr(launch, "send", lambda number, processes: sent.append((number, processes)))
    with pytest.raises(StopIteration):
        launch.prevent_restarts({7})
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

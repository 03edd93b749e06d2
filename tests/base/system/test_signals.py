"""The thread that receives stop signals."""

import os
import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from trainer.base.system.signals import STOP_SIGNALS

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

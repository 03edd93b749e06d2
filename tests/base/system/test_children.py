"""Processes that multiprocessing starts."""

import os
import signal
import subprocess
import sys
import time

from tests.conftest import ROOT
from trainer.base.system.children import exit_with_parent, start_fork_server


def _wait(pid_file):
    exit_with_parent()
    pid_file.write_text(str(os.getpid()))
    time.sleep(600)


def start(pid_file):
    process = start_fork_server([]).Process(target=_wait, args=(pid_file,))
    process.start()
    process.join()


def _exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_child_of_the_fork_server_exits_with_the_process_that_started_it(tmp_path):
    pid_file = tmp_path / "pid"
    code = (
        f"from pathlib import Path; from tests.base.system.test_children import start; start(Path({str(pid_file)!r}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    end = time.monotonic() + 120
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < end:
        time.sleep(0.01)
    child = int(pid_file.read_text())
    parent.send_signal(signal.SIGTERM)
    parent.wait()
    while _exists(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not _exists(child)


def test_a_fork_server_starts_processes_with_a_long_tmpdir(tmp_path):
    folder = tmp_path / ("x" * 120)  # too long for the path of a socket
    folder.mkdir()
    code = "import os; from trainer.base.system.children import start_fork_server as context\nfor _ in range(2):"
    code += " p = context([]).Process(target=os._exit, args=(7,)); p.start(); p.join(); print(p.exitcode)"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"TMPDIR": str(folder)}, capture_output=True, text=True
    )
    assert (ended.stdout, ended.stderr, list(folder.iterdir())) == ("7\n7\n", "", [])

"""Locks of folders."""

import multiprocessing
import shutil
import sys
import threading

import pytest

from trainer.system.files import try_lock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")
CONTEXT = multiprocessing.get_context("fork")


def _hold_lock(path, ready, release, remove):
    file = try_lock(path, 0)
    ready.set()
    release.wait(30)
    if remove:
        shutil.rmtree(path.parent)
    file.close()


def start_holder(path, remove=False):
    """Start a process that holds the lock: locks of one process do not exclude each other."""
    ready, release = CONTEXT.Event(), CONTEXT.Event()
    process = CONTEXT.Process(target=_hold_lock, args=(path, ready, release, remove))
    process.start()
    assert ready.wait(30)
    return process, release


def lock_from_another_process(path):
    results = CONTEXT.Queue()
    process = CONTEXT.Process(target=lambda: results.put(str(try_lock(path, 0))))
    process.start()
    result = results.get(timeout=30)
    process.join()
    return result


def test_a_held_lock_names_its_process_and_is_released_when_that_is_killed(tmp_path):
    path = tmp_path / "run" / ".lock"
    process, _ = start_holder(path)
    message = try_lock(path, 0)
    assert isinstance(message, str) and message.startswith(f"process {process.pid} on ")
    process.kill()
    process.join()
    assert not isinstance(try_lock(path, 0), str)


def test_a_lock_file_that_is_removed_while_waiting_is_created_again(tmp_path):
    """Otherwise a third process would lock a new file of that name, and two processes would hold the lock."""
    path = tmp_path / "run" / ".lock"
    process, release = start_holder(path, remove=True)
    threading.Timer(0.3, release.set).start()
    file = try_lock(path, 20)
    assert not isinstance(file, str)
    assert lock_from_another_process(path).startswith("process ")
    process.join()

"""Locks of folders."""

import multiprocessing
import shutil
import sys
import threading

import pytest

from trainer.system.files import try_lock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")
CONTEXT = multiprocessing.get_context("fork")


def hold(path, ready, leave, remove):
    file = try_lock(path, 0)
    ready.set()
    leave.wait(30)
    if remove:
        shutil.rmtree(path.parent)
    file.close()


def holder(path, remove=False):
    """The locks of one process do not exclude each other."""
    ready, leave = CONTEXT.Event(), CONTEXT.Event()
    process = CONTEXT.Process(target=hold, args=(path, ready, leave, remove))
    process.start()
    assert ready.wait(30)
    return process, leave


def asked_by_another(path):
    answers = CONTEXT.Queue()
    process = CONTEXT.Process(target=lambda: answers.put(str(try_lock(path, 0))))
    process.start()
    answer = answers.get(timeout=30)
    process.join()
    return answer


def test_who_has_it_is_told_and_it_goes_with_the_process(tmp_path):
    path = tmp_path / "run" / ".lock"
    process, _ = holder(path)
    told = try_lock(path, 0)
    assert isinstance(told, str) and told.startswith(f"process {process.pid} on ")
    process.kill()
    process.join()
    assert not isinstance(try_lock(path, 0), str)


def test_a_lock_that_is_removed_while_it_is_waited_for_is_made_anew(tmp_path):
    """Else the next one would lock another file of that name, and two would have the folder."""
    path = tmp_path / "run" / ".lock"
    process, leave = holder(path, remove=True)
    threading.Timer(0.3, leave.set).start()
    file = try_lock(path, 20)
    assert not isinstance(file, str)
    assert asked_by_another(path).startswith("process ")
    process.join()

"""Locks, atomic files and atomic folders."""

import multiprocessing
import shutil
import sys
import threading

import pytest

from trainer.base.system.files import (
    HashingFile,
    atomic_file,
    atomic_folder,
    atomic_write,
    digest_of,
    is_temporary,
    read_json_lines,
    try_lock,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")
CONTEXT = multiprocessing.get_context("fork")


def test_lines_that_are_not_json_objects_are_ignored(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n\xff\n\n[1]\n' + b"[" * 100_000 + b'\n{"a": 2}\r\n{"a"')
    assert list(read_json_lines(path)) == [{"a": 1}, {"a": 2}]


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


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_atomic_file_keeps_the_old_content_until_the_block_ends(tmp_path):
    path = tmp_path / "a.json"
    atomic_write(path, "old")
    with atomic_file(path) as file:
        file.write("new")
        (temporary,) = set(tmp_path.iterdir()) - {path}
        assert path.read_text() == "old" and is_temporary(temporary)
    assert path.read_text() == "new" and names(tmp_path) == ["a.json"]


def test_atomic_file_is_removed_after_an_error(tmp_path):
    atomic_write(tmp_path / "a.json", "old")
    with pytest.raises(ZeroDivisionError), atomic_file(tmp_path / "a.json") as file:
        file.write(str(1 / 0))
    assert (tmp_path / "a.json").read_text() == "old" and names(tmp_path) == ["a.json"]


def test_atomic_folder_replaces_the_old_one_and_removes_leftovers_of_its_name(tmp_path):
    for name in ("[a]", "[a].tmp-0123abcd", "a.tmp-0123abcd", "[a].tmp-shards"):
        (tmp_path / name).mkdir()
    with atomic_folder(tmp_path / "[a]") as unfinished:
        assert is_temporary(unfinished)
        (unfinished / "file").write_text("x")
        assert not any((tmp_path / "[a]").iterdir())
    assert names(tmp_path) == ["[a]", "[a].tmp-shards", "a.tmp-0123abcd"] and names(tmp_path / "[a]") == ["file"]


def test_atomic_folder_is_removed_after_an_error(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "a") as unfinished:
        (unfinished / str(1 / 0)).touch()
    assert names(tmp_path) == ["a"]


def test_hashing_file_returns_the_digest_of_its_content(tmp_path):
    file = HashingFile(tmp_path / "a")
    file.write(b"ab")
    file.write(memoryview(b"cd"))
    assert file.close() == {"size": 4, "digest": digest_of(tmp_path / "a")}

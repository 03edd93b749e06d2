"""The log file beside the console."""

import logging
import os
import re

import pytest

from trainer.base.system import console


@pytest.fixture(autouse=True)
def logger():
    """Remove the file from the logger."""
    yield console.LOGGER
    for handler in console._files():
        console.LOGGER.removeHandler(handler)
        handler.close()


def lines(path):
    """Return the lines without their times, which must be there."""
    texts = path.read_text().splitlines()
    return [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", text) for text in texts]


def test_a_restarted_process_appends_what_the_console_shows(tmp_path, capsys):
    for _ in range(2):  # the second handler replaces the first
        console.log_to(tmp_path / "log.txt")
        console.info("one\ntwo")
        console.warning("three \x1b")
        console.record_in_file("shown elsewhere")
    once = ["one", "two", "warning: three \\x1b", "shown elsewhere"]
    assert lines(tmp_path / "log.txt") == 2 * once
    shown = capsys.readouterr()
    assert [line[9:] or line for line in shown.out.splitlines()] == 2 * ["one", "two"]
    assert [line[9:] for line in shown.err.splitlines()] == 2 * ["warning: three \\x1b"]


def test_the_file_has_the_lines_of_a_rank_that_does_not_log_to_the_console(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LOG_RANK", "3")
    console.info("before")
    console.log_to(tmp_path / "log.txt")
    console.info("after")
    assert lines(tmp_path / "log.txt") == ["after"]
    assert capsys.readouterr().out == ""


def test_a_file_that_logrotate_moves_is_created_again(tmp_path):
    console.log_to(tmp_path / "log.txt")
    console.info("one")
    os.rename(tmp_path / "log.txt", tmp_path / "log.1.txt")
    console.info("two")
    assert [lines(tmp_path / name) for name in ("log.1.txt", "log.txt")] == [["one"], ["two"]]


@pytest.mark.parametrize(
    "make", [lambda path: path.parent.rmdir(), os.mkfifo, lambda path: path.symlink_to("/dev/full")]
)
def test_a_file_that_cannot_be_written_is_one_warning(tmp_path, capsys, make):
    path = tmp_path / "run" / "log.txt"
    path.parent.mkdir()
    make(path)
    console.log_to(path)
    console.info("one")
    console.info("two")
    shown = capsys.readouterr()
    assert [line[9:] for line in shown.out.splitlines()] == ["one", "two"]
    assert re.fullmatch(rf"\S+ warning: {path} cannot be written \(.+\); the run continues\n", shown.err)


def test_lines_that_a_full_disk_refuses_are_one_warning_and_written_later(tmp_path, capsys, monkeypatch):
    console.log_to(tmp_path / "log.txt")
    console.info("one")
    (handler,) = console._files()
    full = os.open("/dev/full", os.O_WRONLY)
    kept = os.dup(handler.stream.fileno())
    os.dup2(full, handler.stream.fileno())
    monkeypatch.setattr(handler, "reopenIfNeeded", lambda: None)  # the descriptor is that of another file now
    console.info("two")
    console.info("three")
    assert capsys.readouterr().err.count("cannot be written (No space left on device); the run continues") == 1
    os.dup2(kept, handler.stream.fileno())
    console.info("four")
    warning = f"warning: {tmp_path}/log.txt cannot be written (No space left on device); the run continues"
    assert lines(tmp_path / "log.txt") == ["one", "two", warning, "three", "four"]
    for descriptor in (full, kept):
        os.close(descriptor)


def test_a_program_with_handlers_of_its_own_gets_the_records(tmp_path, logger):
    records = []
    own = logging.Handler()
    own.emit = records.append
    previous, logger.handlers = logger.handlers, [own]
    try:
        console.log_to(tmp_path / "log.txt")
        console.info("one")
        assert [record.getMessage() for record in records] == ["one"]
        assert not any(isinstance(handler, console.ConsoleHandler) for handler in logger.handlers)
    finally:
        logger.handlers = previous

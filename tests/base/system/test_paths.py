"""Patterns match the same paths as in the standard library's glob, with the exceptions that the module describes."""

import errno
import glob
import os

import pytest

from trainer.base.system.paths import Remarks, exists, expand, split_pattern, unreadable


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in ("a.txt", "b.md", "x/a.txt", "x/y/a.txt", "x/y/.hidden.txt", ".git/a.txt", "x2/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def matches(pattern: str) -> list[str]:
    return sorted(set(expand(*split_pattern(pattern, "", Remarks()), Remarks())))


@pytest.mark.parametrize(
    "pattern",
    [
        *("*", "*.txt", "x*", "x*/*", "x/?/a.txt", "**/*.txt", "x/**/a.txt", "[!b].txt", "**/y/*", ".g*/*"),
        *("none*/*", "none/**/x", "./*.txt", "x/../*.md", "*/", "x//*.txt", "**/**/a.txt"),
    ],
)
@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_pattern_matches_like_glob(tree, pattern, is_absolute):
    pattern = f"{tree}/{pattern}" if is_absolute else pattern
    expected = {os.path.normpath(path) for path in glob.iglob(pattern, recursive=True)}
    assert {os.path.normpath(path) for path in matches(pattern)} == expected
    assert exists(pattern) == bool(expected)


def test_a_last_double_star_matches_files_only(tree):
    assert matches("x/**") == ["x/a.txt", "x/y/a.txt"]


def test_a_path_or_a_pattern_exists(tree):
    (tree / "run[1]").mkdir()
    for path in ("a.txt", "x", "*.md", f"{tree}/x/*/*.txt", "run[1]"):
        assert exists(path)
    for path in ("b.txt", "*.json", "a.txt/*", "run[2]"):
        assert not exists(path)


def test_an_error_of_an_open_file_which_has_no_name_gets_one(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    assert unreadable(OSError(errno.EIO, "Input/output error"), "a.txt") == "a.txt cannot be read (Input/output error)"
    assert unreadable(OSError(errno.ENOENT, "x", f"{tmp_path}/link"), "a.txt") == f"{tmp_path}/link is a broken link"

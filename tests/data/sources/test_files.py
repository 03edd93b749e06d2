"""Resolution of data.path to files."""

import os

import pytest

from tests.data.sources.helpers import error_of, read


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "deep/a.md", "deep/c.txt", "other.bin"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_a_folder_is_searched_recursively_and_a_file_or_pattern_is_taken_literally(folder):
    assert read("text", folder) == ["b.txt", "deep/a.md", "deep/c.txt"]
    assert read("text", folder / "b.txt") == ["b.txt"]
    assert read("text", f"{folder}/**/*.md") == ["deep/a.md"]
    assert read("text", f"{folder}/*") == ["b.txt", "other.bin"]


def test_patterns_are_relative_to_the_current_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert read("text", "*.txt") == ["b.txt"]
    assert read("text", "deep/*") == ["deep/a.md", "deep/c.txt"]


def test_a_path_without_matching_files_is_rejected(tmp_path):
    (tmp_path / "x.csv").touch()
    compressed = {
        "text": ".txt.gz or .md.gz or .txt.zst or .md.zst",
        "jsonl": ".jsonl.gz or .json.gz or .jsonl.zst or .json.zst",
    }
    for dataset, suffixes in (
        ("text", f".txt or .md or {compressed['text']}"),
        ("jsonl", f".jsonl or .json or {compressed['jsonl']}"),
        ("parquet", ".parquet"),
        ("tokens", ".bin or .npy"),
    ):
        assert error_of(dataset, tmp_path) == ("data.path", f"this path holds no file ending in {suffixes}")
        assert error_of(dataset, f"{tmp_path}/*.none") == ("data.path", f"this path holds no file ending in {suffixes}")


def test_a_manifest_lists_files_folders_and_patterns_relative_to_itself(folder, monkeypatch):
    (folder / "list.manifest").write_text("# the corpus\n\nb.txt\ndeep\n")
    assert read("text", folder / "list.manifest") == ["b.txt", "deep/a.md", "deep/c.txt"]
    (folder / "list.manifest").write_text(f"deep/*.md\r\n{folder}/b.txt\r\n")
    monkeypatch.chdir(folder)
    assert read("text", "list.manifest") == ["b.txt", "deep/a.md"]


def test_an_error_in_a_manifest_names_its_line(folder):
    manifest = folder / "list.manifest"
    manifest.write_text("b.txt\n\nnone/*.txt\n")
    assert error_of("text", manifest) == ("data.path", f"{manifest}:3: none/*.txt matches no file")
    manifest.write_text("b.txt\ndeep/a.md\n*.txt\n")
    assert error_of("text", manifest) == ("data.path", f"{manifest}:3: {folder}/b.txt is already listed on line 1")
    manifest.write_text("# nothing\n")
    assert error_of("text", manifest)[1].startswith("this path holds no file ending in .txt or .md")
    manifest.write_bytes(b"b\xff.txt\n")
    assert error_of("text", manifest) == ("data.path", f"{manifest} is not UTF-8 text (byte 1)")


def test_an_unreadable_folder_is_an_error(folder, monkeypatch):
    scandir = os.scandir

    def locked(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    assert error_of("text", folder) == ("data.path", f"{folder}/deep cannot be read (Permission denied)")


def test_a_broken_link_is_an_error(folder):
    (folder / "broken.txt").symlink_to(folder / "nowhere")
    assert error_of("text", folder) == ("data.path", f"{folder}/broken.txt is a broken link")

import json
import sysconfig
from pathlib import Path

import pytest

from trainer.config import ConfigError, DataConfig
from trainer.data.sources import Problem, Span, open_source


def read_all(config, step=None):
    source = open_source(config)
    found = []
    for path in source.files:
        size = path.stat().st_size
        for start in range(0, size, step or max(size, 1)):
            found += source.read(Span(path, start, min(start + (step or size), size)))
    return found


def test_the_standard_library_is_there_without_what_was_installed():
    source = open_source(DataConfig())
    root = Path(sysconfig.get_path("stdlib"))
    names = {p.relative_to(root).as_posix() for p in source.files}
    assert {"os.py", "json/decoder.py"} <= names
    assert not [n for n in names if "site-packages" in n or "dist-packages" in n or "__pycache__" in n]
    assert list(source.files) == sorted(source.files, key=lambda p: p.as_posix())


def test_texts_of_a_folder_a_file_and_a_pattern(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "deep" / "a.md").write_text("a")
    (tmp_path / "other.bin").write_bytes(b"\xff")
    (tmp_path / "bad.txt").write_bytes(b"ok\xff")
    bad = Problem(str(tmp_path / "bad.txt"), "not UTF-8 text (byte 2)")
    assert read_all(DataConfig(dataset="text", path=str(tmp_path))) == ["b", bad, "a"]
    assert read_all(DataConfig(dataset="text", path=str(tmp_path / "b.txt"))) == ["b"]
    assert read_all(DataConfig(dataset="text", path=f"{tmp_path}/**/*.md")) == ["a"]


@pytest.mark.parametrize("step", [None, 1, 7, 30, 1000])
def test_each_json_line_is_read_once_however_the_file_is_cut(tmp_path, step):
    texts = ["one", "two\nlines", "ünï", "", "long " * 20, "last"]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    assert read_all(DataConfig(dataset="jsonl", path=str(tmp_path)), step) == texts


def test_broken_json_lines_are_named(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_bytes(
        b'{"text": "a"}\n{"text": \n\n{"body": "b"}\n[1]\n{"text": 5}\n{"text": "\xff"}\n{"text": "\\ud800"}\n{"text": "z"}'
    )
    assert read_all(DataConfig(dataset="jsonl", path=str(file))) == [
        "a",
        Problem(f"{file} (byte 14)", "not valid JSON"),
        Problem(f"{file} (byte 25)", "no text in field 'text'"),
        Problem(f"{file} (byte 39)", "no text in field 'text'"),
        Problem(f"{file} (byte 43)", "no text in field 'text'"),
        Problem(f"{file} (byte 55)", "not UTF-8 text"),
        Problem(f"{file} (byte 69)", "holds half of a surrogate pair"),
        "z",
    ]


def test_another_field_can_hold_the_text(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"body": "b"}\n')
    assert read_all(DataConfig(dataset="jsonl", path=str(tmp_path), text_field="body")) == ["b"]


def test_a_folder_without_files_is_refused(tmp_path):
    (tmp_path / "x.csv").touch()
    for dataset, suffixes in (("text", ".txt or .md"), ("jsonl", ".jsonl or .json")):
        with pytest.raises(ConfigError, match=f"data.path: holds no file ending in {suffixes}"):
            open_source(DataConfig(dataset=dataset, path=str(tmp_path)))

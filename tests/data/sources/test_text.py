"""Text files and JSON lines."""

import json
import sysconfig
import tracemalloc
from pathlib import Path

import pytest

from tests.data.sources.helpers import messages, open_dataset, read
from trainer.base.config import DataConfig, TokenizerConfig
from trainer.data.sources import open_source
from trainer.data.sources.source import InvalidDocument, Span
from trainer.data.tokenizer.backends import load_tokenizer


def test_the_standard_library_excludes_installed_packages():
    source = open_source(DataConfig(), load_tokenizer(TokenizerConfig()))
    root = Path(sysconfig.get_path("stdlib"))
    names = {Path(p).relative_to(root).as_posix() for p in source.files}
    assert {"os.py", "json/decoder.py"} <= names
    assert not [n for n in names if "site-packages" in n or "dist-packages" in n or "__pycache__" in n]
    assert list(source.files) == sorted(source.files)


TEXTS = {
    b"plain": "plain",
    b"\xef\xbb\xbfwith a BOM": "with a BOM",
    b"zeros \x00 are text": "zeros \x00 are text",
    b"\n": "\n",
    b"": "FILE: the document is empty",
    b"\xef\xbb\xbf": "FILE: the document is empty",
    b"one\ntwo\nth\xffree": "FILE:3: the file is not UTF-8 text (byte 10)",
    "Latin".encode("utf-16-le"): "FILE: this is UTF-16 text; convert such files to UTF-8",
    "utf-16".encode("utf-16"): "FILE: this is UTF-16 text; convert such files to UTF-8",
    b"x" * 101: "FILE: the document is longer than data.max_document_bytes = 100",
    b"x" * 100: "x" * 100,
}


@pytest.mark.parametrize("content", TEXTS, ids=lambda c: ascii(c[:12]))
def test_a_text_file_is_a_document_or_a_bad_document(tmp_path, content):
    file = tmp_path / "x.txt"
    file.write_bytes(content)
    found = read("text", file, max_document_bytes=100)
    assert [str(f) for f in found] == [TEXTS[content].replace("FILE", str(file))]


LINES = {
    b'{"text": "a"}': "a",
    b'  {"text": "a", "id": 5}  \r': "a",
    b'{"text": "a\\u0000b"}': "a\x00b",
    b'{"text": ': "the line is not valid JSON: Expecting value (column 10)",
    b"{'text': 'a'}": "the line is not valid JSON: Expecting property name enclosed in double quotes (column 2); Python's "
    "notation is not JSON",
    b'{"text": "a"} {"text": "b"}': "the line is not valid JSON: Extra data (column 15)",
    b'{"text": "\x00"}': "the line is not valid JSON: Invalid control character at (column 11)",
    b'{"text": "a", "n": ' + b"1" * 5000 + b"}": "the line is not valid JSON",
    b"[" * 100_000: "the line is not valid JSON",
    b'{"body": "b"}': "the record has no field 'text', which data.text_field names; its fields: body",
    b"[1]": "expected an object, found a list",
    b"null": "expected an object, found null",
    b'"text"': "expected an object, found a string",
    b'{"text": 5}': "field 'text', which data.text_field names, is a number, not a string",
    b'{"text": null}': "field 'text', which data.text_field names, is null, not a string",
    b'{"text": ["a"]}': "field 'text', which data.text_field names, is a list, not a string",
    b'{"text": true}': "field 'text', which data.text_field names, is a boolean, not a string",
    b'{"text": {"text": "a"}}': "field 'text', which data.text_field names, is an object, not a string",
    b'{"text": "\xff"}': "the line is not UTF-8 text (byte 10)",
    b'{"text": "\\ud800"}': "the document contains a lone surrogate",
    b'{"text": ""}': "the document is empty",
    b'{"text": "' + b"x" * 200_000 + b'"}': "the document is longer than data.max_document_bytes = 150000",
}


@pytest.mark.parametrize("chunk_bytes", [2**40, 64])
@pytest.mark.parametrize("line", LINES, ids=lambda c: ascii(c[:24]))
def test_a_line_is_a_document_or_a_bad_document_with_its_number(tmp_path, line, chunk_bytes):
    file = tmp_path / "x.jsonl"
    before, after = b'{"text": "before"}\n\n  \n', b'\n{"text": "after"}'
    file.write_bytes(before + line + after)
    found = read("jsonl", file, chunk_bytes, max_document_bytes=150_000)
    assert (found[0], found[-1], len(found)) == ("before", "after", 3)
    assert str(found[1]) in (LINES[line], f"{file}:4: {LINES[line]}")


@pytest.mark.parametrize("chunk_bytes", [1, 7, 30, 1000, 2**40])
def test_each_json_line_is_read_once_in_spans_of_any_size(tmp_path, chunk_bytes):
    texts = ["one", "two\nlines", "ünï", "long " * 20, "last"]
    (tmp_path / "x.jsonl").write_text("\ufeff" + "\n".join(json.dumps({"text": t}) for t in texts))
    assert read("jsonl", tmp_path, chunk_bytes) == texts


@pytest.mark.parametrize("chunk_bytes", [50, 333, 2**40])
def test_bad_documents_have_their_line_numbers_in_spans_of_any_size(tmp_path, chunk_bytes):
    file = tmp_path / "x.jsonl"
    lines = [f'{{"text": "{i}"}}' if i % 7 else "{" for i in range(1, 100)]
    file.write_text("\n".join(lines))
    expected = [f"{file}:{i}: the line is not valid JSON" for i in range(7, 100, 7)]
    assert [line.partition(": Expecting")[0] for line in messages(read("jsonl", file, chunk_bytes))] == expected


def test_a_line_of_50_mb_is_skipped_without_loading_it(tmp_path):
    file = tmp_path / "x.jsonl"
    with file.open("wb") as out:
        out.write(b'{"text": "before"}\n{"text": "')
        for _ in range(50):
            out.write(b"x" * 2**20)
        out.write(b'"}\n{"text": "after"}\n')
    assert messages(read("jsonl", file)) == [
        f"{file}:2: the document is longer than data.max_document_bytes = 33554432"
    ]
    tracemalloc.start()
    found = read("jsonl", file, max_document_bytes=2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found[0], found[2]) == ("before", "after")
    assert str(found[1]) == f"{file}:2: the document is longer than data.max_document_bytes = 1048576"
    assert peak < 2**23


def test_the_text_field_can_be_chosen(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"body": "b"}\n')
    assert read("jsonl", tmp_path, text_field="body") == ["b"]


def test_a_document_rejected_by_the_transform_has_its_line_number(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('\n{"text": "a"}\n{"text": "b"}\n')

    def reject_b(document):
        if document == "b":
            raise InvalidDocument("no b here")
        return document.upper()

    found = list(open_dataset("jsonl", file).read(Span(str(file), 0, 2**40), reject_b))
    assert found[0] == "A"
    assert messages(found) == [f"{file}:3: no b here"]

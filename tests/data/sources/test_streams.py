"""Compressed files of documents."""

import gzip
import io
import json
import sys

import pytest
import zstandard

from tests.data.sources.helpers import messages, open_dataset, read
from trainer.base.config import ConfigError, packages
from trainer.data.sources.streams import open_stream

TEXT = "".join(f'{{"text": "document {i}"}}\n' for i in range(5000))
DOCUMENTS = [f"document {i}" for i in range(5000)]


def compress(suffix: str, content: bytes) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content)
    out = io.BytesIO()  # in blocks, as streaming writers do
    with zstandard.ZstdCompressor().stream_writer(out, closefd=False) as writer:
        for start in range(0, len(content), 10_000):
            writer.write(content[start : start + 10_000])
            writer.flush(zstandard.FLUSH_BLOCK)
    return out.getvalue()


@pytest.fixture(params=[".gz", ".zst"])
def suffix(request) -> str:
    return request.param


def test_compressed_lines_and_texts_read_like_plain_ones(tmp_path, suffix):
    (tmp_path / f"x.jsonl{suffix}").write_bytes(compress(suffix, TEXT.encode()))
    (tmp_path / f"x.txt{suffix}").write_bytes(compress(suffix, b"a text"))
    assert read("jsonl", tmp_path) == DOCUMENTS
    assert read("jsonl", tmp_path, chunk_bytes=100) == DOCUMENTS, "a compressed file is never split"
    assert read("text", tmp_path) == ["a text"]


def test_concatenated_streams_are_one_file(tmp_path, suffix):
    lines = TEXT.encode().splitlines(keepends=True)
    pieces = [b"".join(lines[i : i + 900]) for i in range(0, 5000, 900)]
    (tmp_path / f"x.jsonl{suffix}").write_bytes(b"".join(compress(suffix, piece) for piece in pieces) + b"\0" * 700)
    assert read("jsonl", tmp_path) == DOCUMENTS


@pytest.mark.parametrize("fraction", [0.3, 0.7, 0.999])
def test_a_truncated_file_yields_its_documents_and_one_bad_document(tmp_path, suffix, fraction):
    file = tmp_path / f"x.jsonl{suffix}"
    content = compress(suffix, TEXT.encode())
    file.write_bytes(content[: int(len(content) * fraction)])
    found = read("jsonl", file)
    documents = [document for document in found if isinstance(document, str)]
    assert documents == DOCUMENTS[: len(documents)]
    format = {".gz": "gzip", ".zst": "zstd"}[suffix]
    assert messages(found) == [f"{file}:{len(documents) + 1}: the {format} data is truncated"]


@pytest.mark.parametrize("content", [b"plain text", b"\0" * 100])
def test_a_file_that_is_not_compressed_is_a_bad_document(tmp_path, suffix, content):
    format = {".gz": "gzip", ".zst": "zstd"}[suffix]
    for name in (f"x.txt{suffix}", f"x.jsonl{suffix}"):
        (tmp_path / name).write_bytes(content)
    assert messages(read("text", tmp_path)) == [
        f"{tmp_path}/x.txt{suffix}: this is not {format} data, or it is damaged"
    ]
    assert messages(read("jsonl", tmp_path)) == [
        f"{tmp_path}/x.jsonl{suffix}:1: this is not {format} data, or it is damaged"
    ]
    (tmp_path / f"x.txt{suffix}").write_bytes(b"")
    assert messages(read("text", tmp_path)) == [f"{tmp_path}/x.txt{suffix}: the {format} data is truncated"]


def test_line_numbers_count_in_compressed_files(tmp_path, suffix):
    file = tmp_path / f"x.jsonl{suffix}"
    file.write_bytes(compress(suffix, b'{"text": "a"}\n\n{\n'))
    expected = "the line is not valid JSON: Expecting property name enclosed in double quotes (column 2)"
    assert messages(read("jsonl", file)) == [f"{file}:3: {expected}"]


def test_a_decompression_bomb_is_read_in_small_chunks(tmp_path, suffix):
    """256 MiB of zeros: the text is too long, and most of it is never decompressed."""
    file = tmp_path / f"x.txt{suffix}"
    with open(file, "wb") as out:
        writer = (
            gzip.GzipFile(fileobj=out, mode="wb") if suffix == ".gz" else zstandard.ZstdCompressor().stream_writer(out)
        )
        with writer:
            for _ in range(256):
                writer.write(b"\0" * 2**20)
    assert messages(read("text", file)) == [f"{file}: the document is longer than data.max_document_bytes = 33554432"]
    with open_stream(str(file)) as stream:
        stream.read(1)
        assert len(stream.raw._out) <= 2**26


def test_a_zst_file_without_its_package_is_a_one_line_error(tmp_path, monkeypatch):
    (tmp_path / "x.txt.zst").write_bytes(compress(".zst", b"a"))

    def missing(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(packages.importlib, "import_module", missing)
    with pytest.raises(ConfigError) as error:
        read("text", tmp_path)
    assert str(error.value) == f"data.path: needs the package zstandard: {sys.executable} -m pip install zstandard"


def test_only_uncompressed_files_are_split(tmp_path, suffix):
    for name in ("a.jsonl", f"b.jsonl{suffix}"):
        (tmp_path / name).write_bytes(compress(suffix, json.dumps({"text": "a"}).encode()))
    source = open_dataset("jsonl", tmp_path)
    assert [len(list(source.spans(path, 100, 30))) for path in source.files] == [4, 1]

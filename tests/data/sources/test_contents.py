"""Files that another type of dataset reads: one clear line instead of many bad documents."""

import gzip
import io
import json
import tarfile
import zipfile

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from tests.data.sources.helpers import error_of, messages, open_dataset, read
from trainer.base.config.schema.data import DATASET_TYPES, READER_OF_ENDING
from trainer.data.sources import DATASETS
from trainer.data.sources.contents import FILES
from trainer.data.sources.source import InvalidDocument, Span

TABLE = pa.table({"text": ["a", "b"], "messages": [[{"role": "user", "content": "q"}]] * 2})


def parquet_bytes() -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(TABLE, out)
    return out.getvalue()


def arrow_bytes() -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_file(out, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return out.getvalue()


def zip_bytes() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("x.jsonl", '{"text": "a"}')
    return out.getvalue()


def tar_bytes() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("x.jsonl"))
    return out.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 12345\n" % (b"0" * 64)
CONTENTS = {
    "a Parquet table": (parquet_bytes, 'dataset = "parquet" reads such files'),
    "an Arrow table": (arrow_bytes, 'dataset = "huggingface" reads such files'),
    "an archive": (zip_bytes, "unpack such files"),
    "an archive (tar)": (tar_bytes, "unpack such files"),
    "compressed data": (
        lambda: gzip.compress(b"{}"),
        "decompress such files, or let their names end in .gz or .zst",
    ),
    "an HTML page": (lambda: b"\n<!DOCTYPE html><html>\n404\n</html>", "download the file itself"),
    "a Git LFS pointer instead of the file": (lambda: LFS, "download such files with: git lfs pull"),
    "UTF-16 text": (lambda: '{"text": "a"}'.encode("utf-16"), "convert such files to UTF-8"),
}


@pytest.mark.parametrize("chunk_bytes", [30, 2**40])
@pytest.mark.parametrize("dataset", ["jsonl", "chat", "preference"])
@pytest.mark.parametrize("name", CONTENTS)
def test_json_that_is_something_else_is_one_bad_document(tmp_path, name, dataset, chunk_bytes):
    file = tmp_path / "x.jsonl"
    content, advice = CONTENTS[name]
    file.write_bytes(content())
    if "reads such files" in advice and dataset != "jsonl":
        assert read(dataset, file, chunk_bytes) == TABLE.to_pylist(), "the content determines the format"
        return
    (bad,) = read(dataset, file, chunk_bytes)
    assert str(bad) == f"{file}: this is {name.removesuffix(' (tar)')}, not JSON; {advice}"
    assert bad.ends_file, "any number of documents may be missing"


def test_compressed_tables_are_recognized_too(tmp_path):
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(parquet_bytes()))
    assert messages(read("jsonl", tmp_path))[0].startswith(f"{tmp_path}/x.jsonl.gz: this is a Parquet table, not JSON")


def test_a_compressed_table_of_conversations_must_be_decompressed(tmp_path):
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(parquet_bytes()))
    expected = f"{tmp_path}/x.jsonl.gz: this is a Parquet table, not JSON; decompress such files"
    assert messages(read("chat", tmp_path)) == [expected]


def test_a_csv_file_that_is_named_is_one_bad_document(tmp_path):
    (tmp_path / "x.csv").write_text("text\na\nb\n")
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"text\na\nb\n"))
    for file in (tmp_path / "x.csv", tmp_path / "x.csv.gz"):
        assert messages(read("jsonl", file)) == [
            f'{file}: this is a table of comma-separated values, not JSON; dataset = "csv" reads such files'
        ]


def test_a_spreadsheet_and_json_are_no_tables_of_values(tmp_path):
    (tmp_path / "x.xlsx").write_bytes(zip_bytes())
    for dataset, format in (("chat", "JSON"), ("csv", "a table of values")):
        expected = f"{tmp_path}/x.xlsx: this is a spreadsheet, not {format}; save such files as CSV"
        assert messages(read(dataset, tmp_path / "x.xlsx")) == [expected]
    (tmp_path / "x.jsonl").write_text('{"text": "a"}')
    expected = f'{tmp_path}/x.jsonl: this is JSON, not a table of values; dataset = "jsonl" reads such files'
    assert messages(read("csv", tmp_path / "x.jsonl")) == [expected]


def test_lines_that_are_no_records_name_the_formats_that_the_dataset_reads(tmp_path):
    (tmp_path / "x.txt").write_text("Q: 1 + 1?\nA: 2\n")
    reason = "the line is not valid JSON: Expecting value (column 1)"
    assert messages(read("chat", tmp_path / "x.txt")) == [
        f"{tmp_path}/x.txt:1: {reason}; a chat dataset reads JSON, Parquet, Arrow or CSV",
        f"{tmp_path}/x.txt:2: {reason}",
    ]


def test_a_text_that_is_something_else_is_a_bad_document(tmp_path):
    file = tmp_path / "x.txt"
    file.write_bytes(parquet_bytes())
    expected = f'{file}: this is a Parquet table, not UTF-8 text; dataset = "parquet" reads such files'
    assert messages(read("text", file)) == [expected]
    file.write_bytes(LFS)
    expected = f"{file}: this is a Git LFS pointer instead of the file; download such files with: git lfs pull"
    assert messages(read("text", file)) == [expected]
    file.write_bytes(LFS + b"This text quotes a pointer. " * 50)
    assert not messages(read("text", file))
    file.write_text("<html>A page may be a document.</html>")
    assert not messages(read("text", file))


def test_a_table_that_is_something_else_is_a_bad_document(tmp_path):
    file = tmp_path / "x.parquet"
    for content, expected in (
        (b'{"text": "a"}\n', 'JSON, not a parquet file; dataset = "jsonl" reads such files'),
        (arrow_bytes(), 'an Arrow table, not a parquet file; dataset = "huggingface" reads such files'),
        (zip_bytes(), "an archive, not a parquet file; unpack such files"),
        (LFS, "a Git LFS pointer instead of the file, not a parquet file; download such files with: git lfs pull"),
    ):
        file.write_bytes(content)
        assert messages(read("parquet", file)) == [f"{file}: this is {expected}"]


def test_a_folder_of_save_to_disk_is_described_and_its_metadata_is_not_data(tmp_path):
    folder = tmp_path / "saved"
    datasets.Dataset(TABLE).save_to_disk(str(folder))
    assert sorted(path.suffix for path in folder.iterdir()) == [".arrow", ".json", ".json"]
    for dataset in ("jsonl", "parquet"):
        key, message = error_of(dataset, folder)
        expected = '; its files: 1 .arrow; dataset = "huggingface" reads such files'
        assert key == "data.path" and message.endswith(expected), message
    datasets.DatasetDict(train=datasets.Dataset(TABLE)).save_to_disk(str(tmp_path / "splits"))
    for dataset in ("chat", "preference"):
        assert read(dataset, folder) == read(dataset, tmp_path / "splits") == TABLE.to_pylist()
    (folder / "x.jsonl").write_text('{"text": "a"}\n')
    assert read("jsonl", folder) == ["a"]
    (tmp_path / "state.json").write_text('{"text": "a state"}')
    assert read("jsonl", tmp_path / "state.json") == ["a state"]
    (tmp_path / "usa").mkdir()
    (tmp_path / "usa" / "state.json").write_text('{"text": "another state"}')
    assert read("jsonl", tmp_path / "usa") == ["another state"], "only beside dataset_info.json, it is metadata"


def test_a_pattern_may_name_the_tables_of_a_saved_dataset(tmp_path):
    datasets.Dataset(TABLE).save_to_disk(str(tmp_path / "saved"))
    assert read("chat", f"{tmp_path}/saved/*.arrow") == TABLE.to_pylist()


def test_a_folder_that_save_to_disk_did_not_write_is_described(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.parquet").write_bytes(parquet_bytes())
    (tmp_path / "README.md").touch()
    assert error_of("huggingface", tmp_path)[1] == (
        f"{tmp_path} has no state.json, so it was not written by save_to_disk; its files: 1 .md, 1 .parquet; "
        'dataset = "parquet" reads such files'
    )


def test_conversations_in_a_wrapping_object_are_a_bad_document_that_names_the_list(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"data": [{"messages": []}] * 3}))

    def reject(record):
        raise InvalidDocument("no conversation")

    (bad,) = open_dataset("chat", file).read(Span(str(file), 0, 2**40), reject)
    assert str(bad) == f"{file}:1: field 'data' holds a list of 3 records; the file must hold this list only"


def test_the_endings_of_the_table_are_those_of_the_readers():
    read = [(ending, kind.reader) for kind in FILES if kind.reader for ending in kind.endings]
    assert dict(read) == dict(READER_OF_ENDING) and len(read) == len(READER_OF_ENDING)


def test_every_type_of_dataset_is_opened():
    assert {*DATASETS, "prepared"} == set(DATASET_TYPES)

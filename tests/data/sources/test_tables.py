"""Parquet tables and the Arrow files of Hugging Face's datasets."""

import json
import os
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.data.sources.helpers import error_of, messages, open_dataset, read
from trainer.base.config import ConfigError, packages
from trainer.data.sources import BadDocument

TEXTS = [f"row {i} ünï" for i in range(1000)]


def write_parquet(path, column, name="text", **options):
    pyarrow.parquet.write_table(pa.table({"id": list(range(len(column))), name: column}), path, **options)


@pytest.mark.parametrize("chunk_bytes", [700, 5000, 2**40])
def test_each_row_is_read_once_in_spans_of_any_size(tmp_path, chunk_bytes):
    write_parquet(tmp_path / "x.parquet", TEXTS, row_group_size=70)
    write_parquet(tmp_path / "y.parquet", ["one more"])
    assert read("parquet", tmp_path, chunk_bytes) == [*TEXTS, "one more"]


def test_a_span_reads_only_its_own_row_groups(tmp_path):
    file = tmp_path / "x.parquet"
    write_parquet(file, TEXTS, row_group_size=100)
    size = os.path.getsize(file)
    source = open_dataset("parquet", file)
    counts = [len(list(source.read(span, str))) for span in source.spans(str(file), size, size // 4)]
    assert sum(counts) == 1000 and max(counts) <= 400


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_text_of_any_arrow_type(tmp_path, kind):
    values = pa.array(["a", "b", None, "a", ""]).cast(kind)
    table = pa.table({"text": values})
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(table, file)
    found = read("parquet", file)
    assert [f for f in found if isinstance(f, str)] == ["a", "b", "a"]
    assert messages(found) == [f"{file}:3: column 'text' is null", f"{file}:5: the document is empty"]


def test_bad_rows_are_reported_by_number(tmp_path):
    file = tmp_path / "x.parquet"
    broken = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.array([0, 2, 4, 7], pa.int32()).buffers()[1], pa.py_buffer(b"ok\xff\xfelon")]
    )
    pyarrow.parquet.write_table(
        pa.table({"text": pa.chunked_array([broken, ["a" * 11, None]])}), file, row_group_size=2
    )
    assert messages(read("parquet", file, max_document_bytes=10)) == [
        f"{file}:2: the value is not UTF-8 text (byte 0)",
        f"{file}:4: the document is longer than data.max_document_bytes = 10",
        f"{file}:5: column 'text' is null",
    ]


def test_a_damaged_parquet_file_is_a_bad_document(tmp_path):
    file = tmp_path / "x.parquet"
    for content in (b"", b"not a parquet file", b"PAR1" + b"\0" * 100 + b"PAR1"):
        file.write_bytes(content)
        (bad,) = read("parquet", file)
        assert str(bad).startswith(f"{file}: this is not a parquet file, or it is damaged (")
    write_parquet(file, TEXTS, row_group_size=100, compression="zstd")
    content = bytearray(file.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 200] = b"\xff" * 200
    file.write_bytes(content)
    *documents, bad = read("parquet", file)
    assert isinstance(bad, BadDocument) and documents == TEXTS[: len(documents)]
    assert "this is not a parquet file, or it is damaged (" in str(bad)


@pytest.mark.parametrize("chunk_bytes", [50, 2**40])
def test_a_damaged_table_is_reported_once_in_spans_of_any_size(tmp_path, chunk_bytes):
    file = tmp_path / "x.parquet"
    file.write_bytes(b"PAR1" + b"\0" * 1000 + b"PAR1")
    assert len(messages(read("parquet", file, chunk_bytes))) == 1
    save_to_disk(tmp_path / "saved", TEXTS)
    arrow = min((tmp_path / "saved").glob("data-*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[: arrow.stat().st_size // 2])
    assert len(messages(read("huggingface", tmp_path / "saved", chunk_bytes))) == 1
    arrow.write_bytes(b"\xff" * 5000)
    assert len(messages(read("huggingface", tmp_path / "saved", chunk_bytes))) == 1


def test_a_table_without_a_text_column_of_that_name_is_rejected(tmp_path):
    file = tmp_path / "x.parquet"
    write_parquet(file, ["a"], name="body")
    key, message = error_of("parquet", file)
    assert (key, message) == ("data.text_field", f"{file} has no column 'text'; its columns: id, body")
    assert read("parquet", file, text_field="body") == ["a"]
    assert error_of("parquet", file, text_field="id") == (
        "data.text_field",
        f"column 'id' of {file} holds int64, not text",
    )
    write_parquet(file, [["a"]])
    assert error_of("parquet", file)[1].startswith(f"column 'text' of {file} holds list<")


def test_tables_without_pyarrow_are_a_one_line_error(tmp_path, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(packages.importlib, "import_module", missing)
    for dataset in ("parquet", "huggingface"):
        assert error_of(dataset, tmp_path) == (
            "data.dataset",
            f"needs the package pyarrow: {sys.executable} -m pip install pyarrow",
        )


# ---------------------------------------------------------------- Hugging Face


def save_to_disk(folder, texts, shards=1):
    """Write the files of the package datasets."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    for i, name in enumerate(names):
        table = pa.table({"text": texts[i * len(texts) // shards : (i + 1) * len(texts) // shards]})
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=100)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "cache-of-a-map.arrow").write_bytes(b"not a file of the dataset")


@pytest.mark.parametrize("chunk_bytes", [700, 5000, 2**40])
def test_a_saved_dataset_is_read_once_in_spans_of_any_size(tmp_path, chunk_bytes):
    save_to_disk(tmp_path / "saved", TEXTS, shards=3)
    assert read("huggingface", tmp_path / "saved", chunk_bytes) == TEXTS


def test_a_dataset_of_several_splits_gives_the_one_that_is_set(tmp_path):
    save_to_disk(tmp_path / "train", ["a"])
    save_to_disk(tmp_path / "test", ["b"])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert read("huggingface", tmp_path) == ["a"]
    assert read("huggingface", tmp_path, split="test") == ["b"]
    for split, hint in (("dev", ""), ("Train", "; did you mean 'train'?")):
        message = f"{tmp_path} has no such split; available: train, test{hint}"
        assert error_of("huggingface", tmp_path, split=split) == ("data.split", message)


def test_rows_of_a_saved_dataset_that_are_no_documents_have_their_numbers(tmp_path):
    save_to_disk(tmp_path / "saved", [*TEXTS, None, "end"])
    file = tmp_path / "saved" / "data-00000-of-00001.arrow"
    assert messages(read("huggingface", tmp_path / "saved", 5000)) == [f"{file}:1001: column 'text' is null"]
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    found = read("huggingface", tmp_path / "saved")
    assert found[:-1] == TEXTS[: len(found) - 1]
    assert f"{file}:{len(found) - 1}: this is not an Arrow table, or it is damaged (" in str(found[-1])


def test_damage_anywhere_in_a_mapped_file_is_a_bad_document_not_a_crash(tmp_path):
    """Offsets that point beyond the file would crash the process."""
    save_to_disk(tmp_path / "saved", TEXTS[:300])
    file = tmp_path / "saved" / "data-00000-of-00001.arrow"
    content = file.read_bytes()
    damaged = 0
    for at in range(0, len(content) - 4, 52):
        file.write_bytes(content[:at] + b"\xff\xff\xff\x7f" + content[at + 4 :])
        try:
            reasons = messages(read("huggingface", tmp_path / "saved"))
        except ConfigError as error:
            assert error.key == "data.text_field", "the damage is in the name or the type of the column"
        else:
            damaged += "this is not an Arrow table, or it is damaged (" in "".join(reasons)
    assert damaged > 20
    file.write_bytes(content)
    assert read("huggingface", tmp_path / "saved") == TEXTS[:300]


def test_a_folder_without_a_dataset_is_rejected(tmp_path):
    no_state = f"{tmp_path} has no state.json, so it was not written by save_to_disk"
    assert error_of("huggingface", tmp_path) == ("data.path", no_state)
    state = tmp_path / "state.json"
    for content, message in {
        "{": f"{state} is not a JSON object",
        "{}": f"{state} does not list the dataset's files",
        '{"_data_files": [{"filename": "../../etc/passwd"}]}': f"{state} does not list the dataset's files",
        '{"_data_files": [{"filename": "a.arrow"}]}': f"{tmp_path}/a.arrow is missing",
    }.items():
        state.write_text(content)
        assert error_of("huggingface", tmp_path) == ("data.path", message)
    assert error_of("huggingface", "/no/such/folder") == ("data.path", "no such folder")


class Datasets:
    """A stand-in for the package, with one dataset."""

    def __init__(self, folder):
        self.folder = folder
        self.cache_files = [{"filename": str(folder / "data-00000-of-00001.arrow")}]

    def load_dataset(self, name, subset, split):
        if (name, subset, split.partition("[")[0]) != ("user/name", "en", "validation"):
            raise FileNotFoundError(f"Couldn't find {name} on the Hub.\nMore about it.")
        return self


def test_a_dataset_name_is_loaded_by_the_package_datasets(tmp_path, monkeypatch):
    save_to_disk(tmp_path / "cache", TEXTS)
    require_package = packages.require_package
    package = Datasets(tmp_path / "cache")
    monkeypatch.setattr(
        "trainer.data.sources.datasets_library.require_package",
        lambda name, key: package if name == "datasets" else require_package(name, key),
    )
    assert read("huggingface", "user/name", subset="en", split="validation") == TEXTS
    message = "this path is not a folder, and the package datasets cannot load it: Couldn't find user/other on the Hub"
    assert error_of("huggingface", "user/other") == ("data.path", message)
    message = 'slices such as "train[:10%]" and combined splits are not supported: name one full split'
    assert error_of("huggingface", "user/name", subset="en", split="validation[:10%]") == ("data.split", message)
    package.cache_files = []
    message = "this dataset is only in memory; write it with save_to_disk and name that folder"
    assert error_of("huggingface", "user/name", subset="en", split="validation") == ("data.path", message)


def test_a_dataset_written_by_the_package_datasets_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": dataset, "test": dataset.select([5])}).save_to_disk(
        tmp_path, num_shards={"train": 2, "test": 1}
    )
    assert read("huggingface", tmp_path) == TEXTS
    assert read("huggingface", tmp_path, split="test") == [TEXTS[5]]

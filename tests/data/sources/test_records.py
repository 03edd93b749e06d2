"""Records of conversations and pairs in tables, saved datasets and datasets by name."""

import datetime
import decimal

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from tests.data.sources.helpers import error_of, messages, read
from trainer.base.config import ConfigError
from trainer.base.config.load import load_config
from trainer.data.sources import records

CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
OTHER = {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "g", "arguments": {"y": ["z"]}}}]}
TALKS = [{"messages": [{"role": "user", "content": "ünï"}, CALL], "id": 1}, {"messages": [OTHER], "id": 2}] * 40


def invalid_utf8(values: list[str | None]) -> pa.Array:
    """Return texts, with the byte 0xff in the place of X."""
    return pa.array([v and v.encode().replace(b"X", b"\xff") for v in values], pa.binary()).view(pa.string())


@pytest.mark.parametrize("chunk_bytes", [500, 2**40])
@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.feather", "saved"])
def test_nested_rows_are_read_once_in_spans_of_any_size_without_the_fields_of_other_rows(tmp_path, name, chunk_bytes):
    table = pa.Table.from_pylist(TALKS)
    if name == "x.parquet":
        pyarrow.parquet.write_table(table, tmp_path / name, row_group_size=7)
    elif name == "x.arrow":
        with pa.ipc.new_stream(tmp_path / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    elif name == "x.feather":
        pyarrow.feather.write_feather(table, tmp_path / name, chunksize=7, compression="zstd")
    else:
        datasets.Dataset(table).save_to_disk(str(tmp_path / name), num_shards=3)
    assert read("chat", tmp_path / name, chunk_bytes) == TALKS


def test_values_that_json_lacks_have_the_form_of_json(tmp_path):
    row = {
        "question": "q",
        "bytes": b"text",
        "raw": b"\xff",
        "time": datetime.datetime(2024, 1, 2),
        "price": decimal.Decimal("1.5"),
        "none": None,
        "score": 0.5,
        "map": [("k", 1)],
    }
    table = pa.Table.from_pylist([row], pa.schema([*pa.Table.from_pylist([row | {"map": 0}]).schema][:-1]))
    table = table.append_column("map", pa.array([row["map"]], pa.map_(pa.string(), pa.int64())))
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    assert read("chat", tmp_path / "x.parquet") == [
        {
            "question": "q",
            "bytes": "text",
            "raw": "ff",
            "time": "2024-01-02 00:00:00",
            "price": "1.5",
            "score": 0.5,
            "map": {"k": 1},
        }
    ]


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_bad_value_anywhere_in_a_row_is_a_bad_document_of_this_row(tmp_path, name):
    texts = pa.StructArray.from_arrays([invalid_utf8(["a", "bXb", "c", "d" * 50])], ["content"])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3, 4], pa.int32()), texts)
    table = pa.table({"messages": lists, "id": ["1", "2", "3", "4"]})
    if name == "x.parquet":
        pyarrow.parquet.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_stream(tmp_path / name, table.schema) as stream:
            stream.write_table(table)
    found = read("chat", tmp_path / name, max_document_bytes=60)
    file = tmp_path / name
    assert [document["id"] for document in found if isinstance(document, dict)] == ["1", "3"]
    assert messages(found) == [
        f"{file}:2: column 'messages' is not UTF-8 text (byte 1)",
        f"{file}:4: the document is longer than data.max_document_bytes = 60",
    ]


def test_damage_in_a_nested_table_is_a_bad_document_not_a_crash(tmp_path):
    file = tmp_path / "x.arrow"
    with pa.ipc.new_stream(file, pa.Table.from_pylist(TALKS).schema) as stream:
        stream.write_table(pa.Table.from_pylist(TALKS))
    content = file.read_bytes()
    damaged = 0
    for at in range(0, len(content) - 4, 68):
        file.write_bytes(content[:at] + b"\xff\xff\xff\x7f" + content[at + 4 :])
        damaged += "this is not an Arrow table, or it is damaged (" in "".join(messages(read("chat", file)))
    assert damaged > 20


def test_texts_in_arrow_files_are_read(tmp_path):
    pyarrow.feather.write_feather(pa.table({"text": ["a", "b"], "id": [1, 2]}), tmp_path / "x.feather")
    assert read("huggingface", tmp_path / "x.feather") == ["a", "b"]
    assert read("huggingface", f"{tmp_path}/*.feather") == ["a", "b"]
    (tmp_path / "x.feather").write_bytes(b"ARROW1\0\0" + b"\0" * 100)
    assert messages(read("huggingface", tmp_path / "x.feather"))[0].startswith(
        f"{tmp_path}/x.feather: this is not an Arrow table, or it is damaged ("
    )


def test_a_split_of_plain_files_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text("{}")
    message = (
        "has an effect only if data.path is a folder written by save_to_disk or the name of a dataset; select files with a "
        "pattern, such as data/test-*.parquet"
    )
    assert error_of("chat", tmp_path, split="test") == ("data.split", message)
    assert error_of("preference", tmp_path, subset="en") == ("data.subset", message)
    saved = datasets.DatasetDict(
        train=datasets.Dataset.from_list(TALKS[:1]), test=datasets.Dataset.from_list(TALKS[1:2])
    )
    saved.save_to_disk(str(tmp_path / "saved"))
    assert [read("chat", tmp_path / "saved", split=split)[0]["id"] for split in ("train", "test")] == [1, 2]


def test_a_selection_of_rows_is_refused(tmp_path):
    datasets.Dataset.from_list(TALKS).save_to_disk(str(tmp_path / "saved"))
    state = tmp_path / "saved" / "state.json"
    state.write_text(state.read_text().replace("{", '{"_indices_data_files": [{"filename": "indices.arrow"}],', 1))
    message = (
        f"{tmp_path}/saved holds a selection of rows; write it again after flatten_indices() of the package datasets"
    )
    assert error_of("chat", tmp_path / "saved") == ("data.path", message)


def test_conversations_of_a_dataset_are_loaded_by_its_name(tmp_path, monkeypatch):
    datasets.Dataset.from_list(TALKS).save_to_disk(str(tmp_path / "saved"))
    files = [str(tmp_path / "saved" / "data-00000-of-00001.arrow")]
    monkeypatch.setattr(records, "cached_files", lambda config: files if config.path == "user/chats" else None)
    monkeypatch.chdir(tmp_path)
    assert read("chat", "user/chats") == TALKS
    argv = ["--data.dataset", "chat", "--data.path"]
    assert load_config([*argv, "user/chats"]).data.path == "user/chats"
    for path in ("user/chats.jsonl", "saved/chats", "chats", "/user/chats", "a/b/c"):
        with pytest.raises(ConfigError, match="no such file or folder"):
            load_config([*argv, path])

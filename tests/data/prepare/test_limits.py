"""How many documents of a dataset may be bad."""

import gzip
import json
import re
import shutil
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest

from tests.data.prepare.test_prepare import DEFAULT, prepare
from trainer.base.config import ConfigError, DataConfig
from trainer.data.store.store import read_description


@pytest.fixture
def data(tmp_path) -> DataConfig:
    (tmp_path / "corpus").mkdir()
    return DataConfig(
        dataset="jsonl", path=str(tmp_path / "corpus"), store_folder=str(tmp_path / "stores"), prepare_workers=1
    )


def write(tmp_path, good: int, bad: int, name: str = "x.jsonl") -> str:
    """Write a file of documents and return its path."""
    path = tmp_path / "corpus" / name
    path.write_text("5\n" * bad + "".join(json.dumps({"text": f"document {i} of {name}"}) + "\n" for i in range(good)))
    return str(path)


def refused(data) -> tuple[str, str]:
    with pytest.raises(ConfigError) as error:
        prepare(data, DEFAULT)
    return error.value.key, re.sub(": expected an object, found a number", "", error.value.message)


def test_a_dataset_of_which_more_than_a_hundredth_is_bad_is_refused(data, tmp_path):
    write(tmp_path, good=99, bad=1)
    assert read_description(prepare(data, DEFAULT))["bad_documents"] == 1
    file = write(tmp_path, good=98, bad=1)
    message = f"1 of 99 documents are unreadable (1.01 %); the first: {file}:1; repair the data, or raise this setting"
    assert refused(data) == ("data.max_bad_documents_percent", message)
    allowed = replace(data, max_bad_documents_percent=2.0)
    folder = prepare(allowed, DEFAULT)
    assert refused(data)[0] == "data.max_bad_documents_percent", "an existing store is refused too"
    assert prepare(allowed, DEFAULT) == folder


def test_one_bad_document_of_a_tiny_dataset_needs_a_setting(data, tmp_path):
    write(tmp_path, good=19, bad=1)
    assert refused(data)[1].startswith("1 of 20 documents are unreadable (5 %)")
    assert refused(replace(data, max_bad_documents_percent=4.9))[1].startswith("1 of 20 documents")
    assert prepare(replace(data, max_bad_documents_percent=5.0), DEFAULT)


def test_an_array_of_conversations_that_is_split_into_lines_is_never_trained_on_its_rest(data, tmp_path):
    """An array that begins in the second line is not recognized: 24 lines end with a comma."""
    record = json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})
    (tmp_path / "corpus" / "x.jsonl").write_text('"comment"\n' + ",\n".join([record] * 25) + "\n")
    assert refused(replace(data, dataset="chat"))[1].startswith("25 of 26 documents are unreadable (96.2 %)")


def test_the_message_about_the_number_names_the_share_if_both_limits_are_exceeded(data, tmp_path):
    file = write(tmp_path, good=10, bad=30)
    first = "; ".join(f"{file}:{line}" for line in (1, 2, 3))
    message = f"5 or more documents are unreadable; the first: {first}"
    share = "this is 100 % of the documents read, so that data.max_bad_documents_percent = 1 must be raised too"
    assert refused(replace(data, max_bad_documents=4)) == ("data.max_bad_documents", f"{message}; {share}")
    generous = replace(data, max_bad_documents=4, max_bad_documents_percent=100.0)
    assert refused(generous) == ("data.max_bad_documents", message)
    stop = replace(generous, on_bad_document="stop")
    assert refused(stop) == ("data.on_bad_document", f"1 or more documents are unreadable; the first: {file}:1")
    assert prepare(replace(generous, max_bad_documents=30), DEFAULT)
    # The documents before the last bad one count, although their chunk is not complete.
    (tmp_path / "corpus" / "x.jsonl").write_text('{"text": "good"}\n' * 900 + "5\n" * 5)
    assert "of the documents read" not in refused(replace(data, max_bad_documents=4))[1]


def test_the_share_applies_to_each_shard_and_to_their_concatenation(data, tmp_path):
    write(tmp_path, good=300, bad=0, name="a.jsonl")
    write(tmp_path, good=95, bad=5, name="b.jsonl")
    with pytest.raises(ConfigError, match=r"5 of 100 documents are unreadable \(5 %\)"):
        shards(data)
    shards(replace(data, max_bad_documents_percent=5.0))
    prepared = replace(data, dataset="prepared", path=data.store_folder, store_folder=str(tmp_path / "joined"))
    assert refused(prepared)[1].startswith(
        f"5 of 400 documents are unreadable (1.25 %); the first: {tmp_path}/corpus/b"
    )
    assert read_description(prepare(replace(prepared, max_bad_documents_percent=1.25), DEFAULT))["files_read"] == 2


def shards(data) -> None:
    from trainer.data.prepare.prepare import prepare
    from trainer.data.tokenizer.backends import load_tokenizer

    for i in range(2):
        prepare(data, DEFAULT, load_tokenizer(DEFAULT), (i, 2))


def test_the_share_of_damaged_files_is_limited_too(data, tmp_path):
    """A damaged file is one bad document, but any number of its documents may be missing."""
    for i in range(3):
        table = pyarrow.table({"text": [f"document {n} of {i}" for n in range(500)]})
        pyarrow.parquet.write_table(table, tmp_path / "corpus" / f"{i}.parquet")
    file = tmp_path / "corpus" / "1.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    parquet = replace(data, dataset="parquet")
    key, message = refused(parquet)
    assert key == "data.max_bad_documents_percent"
    assert message.startswith(f"1 of 3 files are damaged (33.3 %); the first: {file}: this is not a parquet file, or")
    folder = prepare(replace(parquet, max_bad_documents_percent=34.0), DEFAULT)
    assert read_description(folder)["damaged_files"] == 1
    assert refused(parquet)[1] == message, "an existing store is refused too"


def test_a_truncated_compressed_file_needs_a_setting(data, tmp_path):
    lines = b"".join(b'{"text": "document %d"}\n' % i for i in range(5000))
    file = tmp_path / "corpus" / "x.jsonl.gz"
    file.write_bytes(gzip.compress(lines)[:-50])
    assert refused(data)[1].startswith(f"1 of 1 files are damaged (100 %); the first: {file}:")
    assert prepare(replace(data, max_bad_documents_percent=100.0), DEFAULT)


def test_a_store_without_numbers_of_files_can_be_used(data, tmp_path):
    write(tmp_path, good=99, bad=1)
    folder = prepare(data, DEFAULT)
    description = read_description(folder)
    del description["files_read"], description["damaged_files"]
    (folder / "store.json").write_text(json.dumps(description))
    assert prepare(data, DEFAULT) == folder
    joined = replace(data, dataset="prepared", path=str(folder), store_folder=str(tmp_path / "joined"))
    assert prepare(joined, DEFAULT)
    shutil.rmtree(folder)

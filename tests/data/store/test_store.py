"""What a store on disk must be, and many read as one."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from tests.data.prepare.test_prepare import DEFAULT, documents, of_texts, prepare
from tests.faults.bench import write_corpus
from trainer.config import ConfigError, DataConfig, TokenizerConfig
from trainer.data.prepare import tokenize
from trainer.data.store.store import ConcatArray, Encoded, check_content, open_store, read_description
from trainer.data.tokenizer.backends import DEFAULT_FILE


@pytest.fixture
def data(tmp_path) -> DataConfig:
    return of_texts(tmp_path, 20)


def refused(work, *arguments) -> tuple[str, str]:
    with pytest.raises(ConfigError) as error:
        work(*arguments)
    return error.value.key, error.value.message


def test_a_file_of_another_size_is_told(data):
    folder = prepare(data, DEFAULT)
    path = folder / "train.tokens"
    path.write_bytes(path.read_bytes()[:-2])
    size = path.stat().st_size
    rule = f"{path} has {size} bytes of {size + 2}; delete the folder {folder}"
    assert refused(open_store, folder, "train") == ("data.store_folder", rule)
    (folder / "problems.jsonl").unlink()
    assert refused(open_store, folder, "held_out")[1].startswith(f"{folder}/")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"version": 2}', '{"version": 2, "stores": 5}'])
def test_a_description_that_is_none_is_told(data, content):
    folder = prepare(data, DEFAULT)
    (folder / "store.json").write_text(content)
    rule = f"{folder}/store.json cannot be read; delete the folder {folder}"
    assert refused(open_store, folder, "train") == ("data.store_folder", rule)


def test_a_store_of_another_version_is_told(data):
    folder = prepare(data, DEFAULT)
    (folder / "store.json").write_text('{"version": 1}')
    rule = f"{folder} is a store of version 1, not 2: prepare it anew"
    assert refused(open_store, folder, "train") == ("data.store_folder", rule)


@pytest.mark.parametrize("key", ["dtype", "splits", "files", "targets"])
def test_a_description_that_promises_something_else_is_told(data, key):
    folder = prepare(data, DEFAULT)
    description = read_description(folder)
    description[key] = {"dtype": "<u4", "splits": {}, "files": [], "targets": True}[key]
    (folder / "store.json").write_text(json.dumps(description))
    assert refused(open_store, folder, "train")[0] == "data.store_folder"


def test_another_content_is_found_by_reading_it(data):
    folder = prepare(data, DEFAULT)
    check_content(folder)
    for name in read_description(folder)["files"]:
        path = folder / name
        whole = path.read_bytes()
        if whole:
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            rule = f"{path} has another content than was written; delete the folder {folder}"
            assert refused(check_content, folder) == ("data.store_folder", rule)
            path.write_bytes(whole)


def test_a_store_has_targets_where_its_documents_have_them(data, monkeypatch):
    def masked(config, tokenizer):
        return lambda text: Encoded(np.arange(5), np.array([0, 0, 1, 1, 1]))

    assert open_store(prepare(data, DEFAULT), "train").targets is None
    shutil.rmtree(data.store_folder)
    monkeypatch.setitem(tokenize.ENCODERS, "text", masked)
    store = open_store(prepare(data, DEFAULT), "train")
    assert store.targets is not None and store.targets.dtype == np.uint8
    assert store.targets.tolist() == [0, 0, 1, 1, 1] * (len(store.documents) - 1)


# ---------------------------------------------------------------- many stores


def test_joined_arrays_read_as_one():
    arrays = [np.arange(3, dtype="<u2"), np.empty(0, "<u2"), np.arange(3, 10, dtype="<u2")]
    joined, whole = ConcatArray(arrays), np.concatenate(arrays)
    assert len(joined) == 10 and joined.dtype == whole.dtype
    for index in (slice(None), slice(2, 7), slice(-3, None), np.arange(10), np.array([[9, 0], [2, 3]]), np.arange(0)):
        assert np.array_equal(joined[index], whole[index])


@pytest.fixture
def stores(data, tmp_path):
    """Of three machines; settings of a run that joins them."""
    folders = []
    for machine in range(3):
        corpus = write_corpus(tmp_path / f"corpus{machine}", 10 + machine, seed=machine)
        folders.append(prepare(replace(data, path=str(corpus)), DEFAULT))
    return replace(data, dataset="prepared", path=data.store_folder, store_folder=str(tmp_path / "joined")), folders


def test_stores_of_many_machines_are_one(stores):
    data, folders = stores
    folder = prepare(data, DEFAULT)
    for split in ("train", "held_out"):
        one_by_one = [document for f in sorted(folders) for document in documents(f, split)]
        assert documents(folder, split) == one_by_one
    assert read_description(folder)["splits"]["train"]["documents"] == len(documents(folder, "train"))
    check_content(folder)
    assert prepare(data, DEFAULT) == folder
    assert prepare(replace(data, path=f"{data.path}/text-*"), DEFAULT) == folder
    assert prepare(replace(data, path=str(folders[0])), DEFAULT) != folder


def test_joined_stores_beside_those_that_they_join_change_nothing(stores):
    data, folders = stores
    beside = replace(data, store_folder=data.path)
    made = [prepare(beside, DEFAULT) for _ in range(3)]
    assert len(set(made)) == 1
    assert len(open_store(made[0], "train").tokens) == sum(len(open_store(f, "train").tokens) for f in folders)
    with pytest.raises(ConfigError, match="is a joined store; name those that it joins"):
        prepare(replace(beside, path=str(made[0])), DEFAULT)


def test_joined_stores_are_known_by_their_names_and_contents_wherever_they_lie(stores, tmp_path):
    data, folders = stores
    folder = prepare(data, DEFAULT)
    moved = tmp_path / "moved"
    shutil.move(data.path, moved)
    assert prepare(replace(data, path=str(moved)), DEFAULT) == folder
    assert len(documents(folder, "train")) > 20
    shutil.rmtree(moved / folders[0].name)
    assert prepare(replace(data, path=str(moved)), DEFAULT) != folder


def test_targets_of_joined_stores_are_everywhere_in_those_that_have_none(stores, tmp_path, monkeypatch):
    data, _ = stores
    monkeypatch.setitem(tokenize.ENCODERS, "text", lambda *_: lambda text: Encoded(np.arange(5), np.zeros(5)))
    more = replace(data, dataset="text", path=str(write_corpus(tmp_path / "more", 4, seed=9)), store_folder=data.path)
    masked = open_store(prepare(more, DEFAULT), "train")
    joined = open_store(prepare(data, DEFAULT), "train")
    assert joined.targets is not None and len(joined.targets) == len(joined.tokens)
    assert (joined.targets[:] == 0).sum() == len(masked.tokens)


def test_stores_of_another_tokenizer_are_refused_by_name(stores, tmp_path):
    data, folders = stores
    shorter = tmp_path / "shorter.tiktoken"
    shorter.write_bytes(b"".join(DEFAULT_FILE.read_bytes().splitlines(keepends=True)[:-1]))
    key, rule = refused(prepare, data, TokenizerConfig(backend="tiktoken", path=str(shorter)))
    first = sorted(folders)[0]
    ours = read_description(first)["tokenizer"]
    assert key == "data.path"
    assert rule.startswith(f"{first} was prepared with the tokenizer {ours}, this run has tiktoken-")
    description = read_description(first) | {"dtype": "<u4"}
    (first / "store.json").write_text(json.dumps(description))
    assert refused(prepare, data, DEFAULT) == (
        "data.path",
        f"{first} was prepared with the dtype <u4, this run has <u2",
    )


def test_joined_stores_are_held_to_the_problems_that_are_allowed(stores, tmp_path):
    data, _ = stores
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.txt").touch()
    (tmp_path / "bad" / "b.txt").write_text("b")
    prepare(replace(data, dataset="text", path=str(tmp_path / "bad"), store_folder=data.path), DEFAULT)
    assert read_description(prepare(data, DEFAULT))["skipped"] == 1
    rule = f"documents that cannot be read: 1 or more, the first: {tmp_path}/bad/a.txt: empty"
    assert refused(prepare, replace(data, on_bad_document="stop"), DEFAULT) == ("data.on_bad_document", rule)


def test_a_folder_without_stores_is_refused(stores, tmp_path):
    data, _ = stores
    for path in (tmp_path / "corpus", tmp_path / "none*"):
        rule = "holds no prepared store (a folder with a store.json)"
        assert refused(prepare, replace(data, path=str(path)), DEFAULT) == ("data.path", rule)


def test_a_store_that_changes_after_it_was_joined_is_told(stores):
    data, folders = stores
    folder = prepare(data, DEFAULT)
    (folders[1] / "store.json").write_text("{}")
    rule = f"{folders[1]} is not the store any more that it was at the start"
    assert refused(open_store, folder, "train") == ("data.path", rule)

"""Checks of a store on disk, and concatenated stores."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from tests.data.prepare.test_prepare import DEFAULT, documents, prepare, text_dataset
from tests.faults.harness import write_corpus
from trainer.base.config import ConfigError, DataConfig, TokenizerConfig
from trainer.data.prepare import tokenize
from trainer.data.store import store as store_module
from trainer.data.store.arrays import ConcatArray
from trainer.data.store.store import Encoded, check_content, open_store, read_description
from trainer.data.tokenizer.backends import DEFAULT_FILE


@pytest.fixture
def data(tmp_path) -> DataConfig:
    return text_dataset(tmp_path, 20)


def refused(function, *arguments) -> tuple[str, str]:
    with pytest.raises(ConfigError) as error:
        function(*arguments)
    return error.value.key, error.value.message


def test_a_file_of_another_size_is_an_error(data):
    folder = prepare(data, DEFAULT)
    path = folder / "train.tokens"
    path.write_bytes(path.read_bytes()[:-2])
    size = path.stat().st_size
    message = f"{path} has {size} bytes instead of {size + 2}; delete the folder {folder}"
    assert refused(open_store, folder, "train") == ("data.store_folder", message)
    (folder / "bad_documents.jsonl").unlink()
    assert refused(open_store, folder, "held_out")[1].startswith(f"{folder}/")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"version": 3}', '{"version": 3, "members": 5}'])
def test_an_invalid_store_json_is_an_error(data, content):
    folder = prepare(data, DEFAULT)
    (folder / "store.json").write_text(content)
    message = f"{folder}/store.json cannot be read; delete the folder {folder}"
    assert refused(open_store, folder, "train") == ("data.store_folder", message)


def test_a_store_of_another_format_version_is_an_error(data):
    folder = prepare(data, DEFAULT)
    (folder / "store.json").write_text('{"version": 1}')
    message = f"{folder} has format version 1, not 3; prepare it again"
    assert refused(open_store, folder, "train") == ("data.store_folder", message)


@pytest.mark.parametrize("key", ["dtype", "splits", "files", "targets"])
def test_a_store_json_that_does_not_match_the_files_is_an_error(data, key):
    folder = prepare(data, DEFAULT)
    description = read_description(folder)
    description[key] = {"dtype": "<u4", "splits": {}, "files": [], "targets": True}[key]
    (folder / "store.json").write_text(json.dumps(description))
    assert refused(open_store, folder, "train")[0] == "data.store_folder"


def test_check_content_finds_a_flipped_bit_in_every_file(data):
    folder = prepare(data, DEFAULT)
    check_content(folder)
    for name in read_description(folder)["files"]:
        path = folder / name
        content = path.read_bytes()
        if content:
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            message = f"{path} does not match its digest in store.json; delete the folder {folder}"
            assert refused(check_content, folder) == ("data.store_folder", message)
            path.write_bytes(content)


def test_a_store_has_targets_if_its_documents_have_them(data, monkeypatch):
    def masked(config, tokenizer):
        return lambda text: Encoded(np.arange(5), np.array([0, 0, 1, 1, 1]))

    assert open_store(prepare(data, DEFAULT), "train").targets is None
    shutil.rmtree(data.store_folder)
    monkeypatch.setattr(tokenize, "encoder", masked)
    store = open_store(prepare(data, DEFAULT), "train")
    assert store.targets is not None and store.targets.dtype == np.uint8
    assert store.targets[:].tolist() == [0, 0, 1, 1, 1] * (len(store.documents) - 1)


# ---------------------------------------------------------------- concatenated stores


def test_a_concat_array_reads_like_one_array():
    arrays = [np.arange(3, dtype="<u2"), np.empty(0, "<u2"), np.arange(3, 10, dtype="<u2")]
    lazy, array = ConcatArray(arrays), np.concatenate(arrays)
    assert len(lazy) == 10 and lazy.dtype == array.dtype
    for index in (slice(None), slice(2, 7), slice(-3, None), np.arange(10), np.array([9, 0, 2, 3]), np.arange(0)):
        assert np.array_equal(lazy[index], array[index])


@pytest.fixture
def stores(data, tmp_path):
    """The config of a run on the stores of three nodes, and their folders."""
    folders = []
    for node in range(3):
        corpus = write_corpus(tmp_path / f"corpus{node}", 10 + node, seed=node)
        folders.append(prepare(replace(data, path=str(corpus)), DEFAULT))
    return replace(
        data, dataset="prepared", path=data.store_folder, store_folder=str(tmp_path / "concatenated")
    ), folders


def test_a_concatenated_store_has_the_documents_of_its_members_in_order(stores):
    data, folders = stores
    folder = prepare(data, DEFAULT)
    for split in ("train", "held_out"):
        expected = [document for f in sorted(folders) for document in documents(f, split)]
        assert documents(folder, split) == expected
    assert read_description(folder)["splits"]["train"]["documents"] == len(documents(folder, "train"))
    check_content(folder)
    assert prepare(data, DEFAULT) == folder
    assert prepare(replace(data, path=f"{data.path}/text-*"), DEFAULT) == folder
    assert prepare(replace(data, path=str(folders[0])), DEFAULT) != folder


def test_a_concatenated_store_in_the_folder_of_its_members_is_not_a_member(stores):
    data, folders = stores
    same_folder = replace(data, store_folder=data.path)
    concatenated = [prepare(same_folder, DEFAULT) for _ in range(3)]
    assert len(set(concatenated)) == 1
    assert len(open_store(concatenated[0], "train").tokens) == sum(len(open_store(f, "train").tokens) for f in folders)
    with pytest.raises(ConfigError, match="is a concatenation; give the paths of its members instead"):
        prepare(replace(same_folder, path=str(concatenated[0])), DEFAULT)


def test_a_concatenated_store_is_reused_when_its_members_have_moved(stores, tmp_path):
    data, folders = stores
    folder = prepare(data, DEFAULT)
    moved = tmp_path / "moved"
    shutil.move(data.path, moved)
    assert prepare(replace(data, path=str(moved)), DEFAULT) == folder
    assert len(documents(folder, "train")) > 20
    shutil.rmtree(moved / folders[0].name)
    assert prepare(replace(data, path=str(moved)), DEFAULT) != folder


def test_all_tokens_of_a_member_without_targets_are_targets(stores, tmp_path, monkeypatch):
    data, _ = stores
    monkeypatch.setattr(tokenize, "encoder", lambda *_: lambda text: Encoded(np.arange(5), np.zeros(5)))
    with_targets = replace(
        data, dataset="text", path=str(write_corpus(tmp_path / "more", 4, seed=9)), store_folder=data.path
    )
    masked = open_store(prepare(with_targets, DEFAULT), "train")
    concatenated = open_store(prepare(data, DEFAULT), "train")
    assert concatenated.targets is not None and len(concatenated.targets) == len(concatenated.tokens)
    assert (concatenated.targets[:] == 0).sum() == len(masked.tokens)


def test_a_member_of_another_tokenizer_is_an_error(stores, tmp_path):
    data, folders = stores
    shorter = tmp_path / "shorter.tiktoken"
    shorter.write_bytes(b"".join(DEFAULT_FILE.read_bytes().splitlines(keepends=True)[:-1]))
    key, message = refused(prepare, data, TokenizerConfig(backend="tiktoken", path=str(shorter)))
    first = sorted(folders)[0]
    fingerprint = read_description(first)["tokenizer"]
    assert key == "data.path"
    assert message.startswith(f"{first} was prepared with tokenizer {fingerprint}, but this run uses tiktoken-")
    description = read_description(first) | {"dtype": "<u4"}
    (first / "store.json").write_text(json.dumps(description))
    assert refused(prepare, data, DEFAULT) == (
        "data.path",
        f"{first} was prepared with dtype <u4, but this run uses <u2",
    )


def test_the_limit_of_bad_documents_applies_to_a_concatenated_store(stores, tmp_path):
    data, _ = stores
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.txt").touch()
    (tmp_path / "bad" / "b.txt").write_text("b")
    half = {"max_bad_documents_percent": 50.0, "store_folder": data.path}
    prepare(replace(data, dataset="text", path=str(tmp_path / "bad"), **half), DEFAULT)
    assert read_description(prepare(data, DEFAULT))["bad_documents"] == 1
    message = f"1 or more documents are unreadable; the first: {tmp_path}/bad/a.txt: the document is empty"
    assert refused(prepare, replace(data, on_bad_document="stop"), DEFAULT) == ("data.on_bad_document", message)


def test_a_folder_without_stores_is_an_error(stores, tmp_path):
    data, _ = stores
    for path in (tmp_path / "corpus", tmp_path / "none*"):
        message = "no prepared store was found; a prepared store is a folder with a store.json"
        assert refused(prepare, replace(data, path=str(path)), DEFAULT) == ("data.path", message)


def test_a_member_that_changes_during_the_run_is_an_error(stores):
    data, folders = stores
    folder = prepare(data, DEFAULT)
    (folders[1] / "store.json").write_text("{}")
    message = f"{folders[1]} has changed since the run started"
    assert refused(open_store, folder, "train") == ("data.path", message)


def test_stores_in_folders_whose_names_look_like_patterns(stores, tmp_path):
    data, folders = stores
    for name in ("s[t]", "st", "what?"):
        (tmp_path / name).mkdir()
        folder = folders.pop()
        shutil.move(folder, tmp_path / name / folder.name)
        for path in (tmp_path / name, tmp_path / name / "*", tmp_path / name / folder.name):
            members = read_description(prepare(replace(data, path=str(path)), DEFAULT))["members"]
            assert [member["folder"] for member in members] == [str(tmp_path / name / folder.name)]
    store_folder = replace(data, path=str(tmp_path / "s[t]"), store_folder=str(tmp_path / "new[1]" / "*"))
    assert prepare(store_folder, DEFAULT).parent == tmp_path / "new[1]" / "*"


@pytest.mark.parametrize("copy", ["link", "copy"])
def test_a_store_that_is_found_twice_is_an_error(stores, copy):
    data, folders = stores
    first, again = min(folders), min(folders).with_name("text-zzz")
    again.symlink_to(first) if copy == "link" else shutil.copytree(first, again)
    message = f"{again} and {first} are the same store, whose documents would be read twice; remove one"
    assert refused(prepare, data, DEFAULT) == ("data.path", message)


def test_a_broken_link_among_stores_is_an_error(stores):
    data, folders = stores
    (folders[0].parent / "text-lost").symlink_to("nowhere")
    assert refused(prepare, data, DEFAULT) == ("data.path", f"{folders[0].parent}/text-lost is a broken link")


def test_a_concatenation_in_the_folder_of_its_members_moves_with_them(stores, tmp_path, monkeypatch):
    data, _ = stores
    folder = prepare(replace(data, store_folder=data.path), DEFAULT)
    before = (folder / "store.json").read_bytes()
    moved = shutil.move(data.path, tmp_path / "moved")
    monkeypatch.setattr(store_module, "_write_concatenation", lambda *_: pytest.fail("written"))
    monkeypatch.setattr(store_module, "file_lock", lambda *_: pytest.fail("locked"))
    again = prepare(replace(data, path=str(moved), store_folder=str(moved)), DEFAULT)
    assert (again / "store.json").read_bytes() == before
    assert len(documents(again, "train")) > 20
    check_content(again)

"""Token stores: complete, reused, rebuilt when an input changes, and never incomplete."""

import errno
import io
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.faults.harness import write_corpus
from trainer.base.config import ConfigError, DataConfig, TokenizerConfig
from trainer.data.datasets import prepare_datasets
from trainer.data.prepare import fingerprint, tokenize
from trainer.data.prepare import prepare as prepare_module
from trainer.data.sources import text
from trainer.data.store.store import open_store, read_description, token_dtype
from trainer.data.tokenizer.backends import DEFAULT_FILE, load_tokenizer

DEFAULT = TokenizerConfig()


def prepare(data, tokenizer_config):
    return prepare_module.prepare(data, tokenizer_config, load_tokenizer(tokenizer_config))


def text_dataset(folder, num_documents) -> DataConfig:
    """Write texts and return the config of a dataset of them."""
    return DataConfig(
        dataset="text",
        path=str(write_corpus(folder / "corpus", num_documents)),
        store_folder=str(folder / "stores"),
        held_out_fraction=0.2,
        prepare_workers=1,
        max_bad_documents_percent=10.0,
    )


@pytest.fixture
def data(tmp_path) -> DataConfig:
    return text_dataset(tmp_path, 60)


def documents(folder, split):
    store, tokenizer = open_store(folder, split), load_tokenizer(DEFAULT)
    texts = []
    for start, stop in zip(store.documents, store.documents[1:], strict=False):
        tokens = store.tokens[start:stop].tolist()
        assert (tokens[0], tokens[-1]) == (tokenizer.bos, tokenizer.eos)
        texts.append(tokenizer.decode(tokens[1:-1]))
    assert store.documents[-1] == len(store.tokens)
    return texts


def corpus_texts(data):
    return sorted(p.read_text() for p in Path(data.path).glob("*.txt"))


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_every_document_is_in_exactly_one_split(data):
    folder = prepare(data, DEFAULT)
    train, held_out = documents(folder, "train"), documents(folder, "held_out")
    assert sorted(train + held_out) == corpus_texts(data)
    assert 4 <= len(held_out) <= 25
    assert train != sorted(train), "documents are shuffled"


def test_the_store_does_not_depend_on_the_number_of_worker_processes(data, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize, "CHUNK_BYTES", 4000)
    one = prepare(data, DEFAULT)
    three = prepare(replace(data, prepare_workers=3, store_folder=str(tmp_path / "other")), DEFAULT)
    assert len(contents(one)) == 6
    assert contents(one) == contents(three)


def test_an_existing_store_is_reused(data, monkeypatch):
    folder = prepare(data, DEFAULT)
    monkeypatch.setattr(prepare_module, "_build", lambda *_: pytest.fail("rebuilt"))
    assert prepare(data, DEFAULT) == folder


def test_a_new_modification_time_with_the_same_content_is_not_a_change(data):
    folder = prepare(data, DEFAULT)
    file = next(iter(sorted((folder.parent.parent / "corpus").iterdir())))
    file.write_text(file.read_text())
    assert prepare(data, DEFAULT) == folder


@pytest.mark.parametrize("change", ["content", "added", "removed", "renamed"])
def test_a_changed_corpus_gives_another_store(data, tmp_path, change):
    folder = prepare(data, DEFAULT)
    file = tmp_path / "corpus" / "0003.txt"
    if change == "content":
        file.write_text(file.read_text().replace("t", "T", 1))
    elif change == "added":
        (tmp_path / "corpus" / "new.txt").write_text("new")
    elif change == "removed":
        file.unlink()
    else:
        file.rename(file.with_name("zzz.txt"))
    changed = prepare(data, DEFAULT)
    assert changed != folder
    assert sorted(documents(changed, "train") + documents(changed, "held_out")) == corpus_texts(data)


def test_another_tokenizer_or_held_out_fraction_gives_another_store(data, tmp_path):
    folder = prepare(data, DEFAULT)
    shorter = tmp_path / "shorter.tiktoken"
    shorter.write_bytes(b"".join(DEFAULT_FILE.read_bytes().splitlines(keepends=True)[:-1]))
    assert prepare(data, TokenizerConfig(backend="tiktoken", path=str(shorter))) != folder
    assert prepare(replace(data, held_out_fraction=0.1), DEFAULT) != folder
    copy = shutil.copy(DEFAULT_FILE, tmp_path / "copy.tiktoken")
    assert prepare(data, TokenizerConfig(backend="tiktoken", path=str(copy))) == folder


class Killed(BaseException):
    """A kill: not an Exception that a handler could catch."""


@pytest.mark.parametrize(("target", "name"), [(prepare_module, "write_split"), (tokenize, "_tokenize")])
def test_a_killed_preparation_leaves_no_store_and_resumes(data, monkeypatch, target, name):
    monkeypatch.setattr(tokenize, "CHUNK_BYTES", 4000)
    complete = contents(prepare(data, DEFAULT))
    shutil.rmtree(data.store_folder)

    original, calls = getattr(target, name), []

    def killed_at_the_second_call(*args):
        calls.append(args)
        if len(calls) == 2:
            raise Killed
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(target, name, killed_at_the_second_call)
        with pytest.raises(Killed):
            prepare(data, DEFAULT)
    assert not list(Path(data.store_folder).glob("*/store.json"))
    tokenized = []
    is_held_out = tokenize._is_held_out
    monkeypatch.setattr(tokenize, "_is_held_out", lambda *args: tokenized.append(args) or is_held_out(*args))
    assert contents(prepare(data, DEFAULT)) == complete
    assert len(tokenized) < 60, "finished chunks are not tokenized again"


def test_equal_documents_are_in_the_same_split(data, tmp_path):
    for i in range(30):
        (tmp_path / "corpus" / f"copy{i}.txt").write_text("the same text")
    folder = prepare(data, DEFAULT)
    assert {documents(folder, s).count("the same text") for s in ("train", "held_out")} == {0, 30}


def test_bad_documents_are_counted_listed_and_logged(data, tmp_path, capsys):
    (tmp_path / "corpus" / "a_bad.txt").write_bytes(b"\xff")
    (tmp_path / "corpus" / "empty.txt").touch()
    folder = prepare(data, DEFAULT)
    assert read_description(folder)["bad_documents"] == 2
    first = f"{tmp_path}/corpus/a_bad.txt:1: the file is not UTF-8 text (byte 0)"
    expected = f"warning: skipped 2 bad documents, listed in {folder}/bad_documents.jsonl; the first: {first}"
    assert expected in capsys.readouterr().err
    assert [json.loads(line) for line in (folder / "bad_documents.jsonl").open()] == [
        {"file": f"{tmp_path}/corpus/a_bad.txt", "line": 1, "reason": "the file is not UTF-8 text (byte 0)"}
        | {"ends_file": False},
        {"file": f"{tmp_path}/corpus/empty.txt", "line": 0, "reason": "the document is empty", "ends_file": False},
    ]


def chat_dataset(folder, num_documents, **settings) -> DataConfig:
    """Write conversations with fields that are not used, and return the config of a dataset of them."""
    talk = [{"role": "user", "content": "q", "name": "n"}, {"role": "assistant", "content": "a", "mask": 1}]
    documents = [{"messages": talk, "id": i} | ({"source": "web"} if i % 2 else {}) for i in range(num_documents)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    return DataConfig(
        dataset="chat",
        path=str(folder / "chats.jsonl"),
        store_folder=str(folder / "stores"),
        prepare_workers=1,
        ignored_fields=("mask", "history"),
        columns={"question": "query"},
        **settings,
    )


FIELDS = [
    "fields that were not used: id (30 documents), name (30 documents), source (15 documents)",
    "fields that data.ignored_fields removed: mask (30 documents)",
    "no document has these fields of data.ignored_fields: history",
    "no document has these fields of data.columns: query",
]


@pytest.mark.parametrize("workers", [1, 2])
def test_fields_that_were_not_used_are_counted_and_listed_once(tmp_path, monkeypatch, capsys, workers):
    monkeypatch.setattr(tokenize, "CHUNK_BYTES", 1000)
    data = replace(chat_dataset(tmp_path, 30), prepare_workers=workers)
    folder = prepare(data, DEFAULT)
    logged = capsys.readouterr().out
    assert all(logged.count(line) == 1 for line in FIELDS), logged
    assert read_description(folder)["unused_fields"] == {
        "id": 30, "mask": 30, "name": 30, "source": 15, "data.columns.question": 30,
    }  # fmt: skip
    assert prepare(data, DEFAULT) == folder and prepare_module.unused_fields(folder, data) == FIELDS
    merged = prepare(replace(data, dataset="prepared", path=str(folder.parent), ignored_fields=()), DEFAULT)
    assert read_description(merged)["unused_fields"] == read_description(folder)["unused_fields"]
    assert prepare(replace(data, ignored_fields=("mask",)), DEFAULT) != folder


def test_fields_of_chunks_that_were_finished_before_a_kill_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize, "CHUNK_BYTES", 1000)
    data = chat_dataset(tmp_path, 30)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "write_split", lambda *_: pytest.fail("stop"))
        with pytest.raises(pytest.fail.Exception):
            prepare(data, DEFAULT)
    assert prepare_module.unused_fields(prepare(data, DEFAULT), data) == FIELDS


def test_a_store_without_unused_fields_lists_none(data):
    folder = prepare(data, DEFAULT)
    assert read_description(folder)["unused_fields"] == {} and prepare_module.unused_fields(folder, data) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_more_bad_documents_than_allowed_are_an_error_with_the_first_of_them(data, tmp_path, monkeypatch, workers):
    monkeypatch.setattr(tokenize, "CHUNK_BYTES", 4000)
    for i in range(5):
        (tmp_path / "corpus" / f"0{i}_empty.txt").touch()
    data = replace(data, prepare_workers=workers)
    first = "; ".join(f"{tmp_path}/corpus/0{i}_empty.txt: the document is empty" for i in range(3))
    assert refused(replace(data, max_bad_documents=4)) == (
        "data.max_bad_documents",
        f"5 or more documents are unreadable; the first: {first}",
    )
    key, message = refused(replace(data, on_bad_document="stop"))
    assert (key, message) == (
        "data.on_bad_document",
        f"1 or more documents are unreadable; the first: {tmp_path}/corpus/00_empty.txt: the document is empty",
    )
    assert read_description(prepare(replace(data, max_bad_documents=5), DEFAULT))["bad_documents"] == 5
    assert refused(replace(data, max_bad_documents=4))[1].startswith("5 or more documents are unreadable"), (
        "the limit applies to an existing store too"
    )


def refused(data) -> tuple[str, str]:
    with pytest.raises(ConfigError) as error:
        prepare(data, DEFAULT)
    return error.value.key, error.value.message


def test_a_corpus_without_documents_is_an_error(data, tmp_path):
    folder = tmp_path / "nothing"
    folder.mkdir()
    (folder / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError) as error:
        prepare(replace(data, path=str(folder)), DEFAULT)
    assert error.value.message == (
        f"this dataset contains no readable document; found {folder}/bad.txt:1: the file is not UTF-8 text (byte 0)"
    )
    (folder / "bad.txt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"contains no readable document; .*bad\.txt: the document is empty"):
        prepare(replace(data, path=str(folder)), DEFAULT)
    (folder / "blank.jsonl").write_text("\n\n")
    with pytest.raises(
        ConfigError, match=r"contains no readable document; found 1 file \(2 bytes\) without a document"
    ):
        prepare(replace(data, dataset="jsonl", path=str(folder)), DEFAULT)


def test_a_store_folder_that_cannot_be_written_is_an_error(data, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as error:
        prepare(replace(data, store_folder=str(tmp_path / "file")), DEFAULT)
    assert (error.value.key, error.value.message) == (
        "data.store_folder",
        f"{tmp_path}/file is a file, not a folder",
    )


@pytest.mark.parametrize("change", ["content", "removed"])
def test_a_file_that_changes_while_the_store_is_built_is_an_error(data, tmp_path, monkeypatch, change):
    file, original = tmp_path / "corpus" / "0003.txt", tokenize.tokenize_chunks
    intact = file.read_text()

    def changed_meanwhile(*args):
        file.write_text("other") if change == "content" else None
        chunks = original(*args)
        file.unlink() if change == "removed" else None
        return chunks

    with monkeypatch.context() as patch:
        patch.setattr(tokenize, "tokenize_chunks", changed_meanwhile)
        message = {
            "content": "the dataset has changed while it was prepared: "
            f"{file} is the file that changed last; start again",
            "removed": f"{file} cannot be read (No such file or directory)",
        }
        assert refused(data) == ("data.path", message[change])
    file.write_text(intact)
    folder = prepare(data, DEFAULT)
    assert sorted(documents(folder, "train") + documents(folder, "held_out")) == corpus_texts(data)


# ---------------------------------------------------------------- folders that cannot be written


@pytest.fixture
def locked(monkeypatch):
    """Function that makes a folder read-only, also for root, who ignores permissions: every open for writing, mkdir and rename
    below the folder fails."""

    def lock(folder: Path, code: int = errno.EROFS) -> None:
        def guard(function, writes):
            def guarded(path, *args, **kwargs):
                if writes(*args, **kwargs) and Path(os.fsdecode(path)).absolute().is_relative_to(folder):
                    raise OSError(code, os.strerror(code), str(path))
                return function(path, *args, **kwargs)

            return guarded

        def opens_for_writing(mode="r", *_, **__):
            return bool(set(mode) & set("wax+"))

        monkeypatch.setattr(io, "open", guard(io.open, opens_for_writing))
        monkeypatch.setattr(os, "mkdir", guard(os.mkdir, lambda *_, **__: True))

    return lock


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_complete_store_in_a_folder_that_cannot_be_written_is_used(data, monkeypatch, locked, capsys, code):
    packed = replace(data, packing="best-fit")
    folders = json.loads(prepare_datasets(packed, {}, DEFAULT, load_tokenizer(DEFAULT), 32, False))
    monkeypatch.setattr(fingerprint, "_RECENT_S", -60.0)
    prepare(data, DEFAULT)
    before = sorted(Path(data.store_folder).rglob("*"))
    capsys.readouterr()
    locked(Path(data.store_folder), code)
    assert json.loads(prepare_datasets(packed, {}, DEFAULT, load_tokenizer(DEFAULT), 32, False)) == folders
    assert capsys.readouterr() == ("", ""), "all digests are cached"
    for cache in Path(data.store_folder).glob("digests-*"):
        cache.unlink()
    assert json.loads(prepare_datasets(packed, {}, DEFAULT, load_tokenizer(DEFAULT), 32, False)) == folders
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("warning: ")[2] for line in lines] == [
        f"{data.store_folder} cannot be written ({os.strerror(code)}), so that each start reads all files of the dataset"
    ]
    assert {path for path in before if not path.name.startswith("digests-")} == set(Path(data.store_folder).rglob("*"))


def test_a_missing_store_in_a_folder_that_cannot_be_written_is_an_error(data, tmp_path, locked, capsys):
    locked(tmp_path / "stores")
    for folder in (tmp_path / "stores", tmp_path / "stores" / "deep"):
        key, message = refused(replace(data, store_folder=str(folder)))
        assert key == "data.store_folder"
        assert message.startswith("this folder cannot be written (Read-only file system: ")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("suffix", ["runs", "json", "bad_documents"])
@pytest.mark.parametrize("size", [0, 30])
def test_a_torn_chunk_is_tokenized_again(data, tmp_path, monkeypatch, suffix, size):
    (tmp_path / "corpus" / "empty.txt").touch()
    complete = contents(prepare(data, DEFAULT))
    shutil.rmtree(data.store_folder)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "write_split", lambda *_: pytest.fail("stop"))
        with pytest.raises(pytest.fail.Exception):
            prepare(data, DEFAULT)
    (chunk,) = Path(data.store_folder).glob(f"*.tmp-chunks/chunk-000000.{suffix}")
    chunk.write_bytes(chunk.read_bytes()[:size] if size else b"\0" * chunk.stat().st_size)  # as after a power cut
    assert contents(prepare(data, DEFAULT)) == complete


def test_an_error_about_the_documents_leaves_no_file(data, tmp_path):
    (tmp_path / "corpus" / "bad.txt").write_bytes(b"\xff")
    key, _ = refused(replace(data, max_bad_documents_percent=0.5))
    assert key == "data.max_bad_documents_percent"
    assert [path.name for path in Path(data.store_folder).iterdir() if not path.name.startswith("digests-")] == []


def test_what_a_killed_preparation_leaves_is_removed_by_the_next_one(data):
    folder = prepare(data, DEFAULT)
    chunks, lock = folder.with_name(f"{folder.name}.tmp-chunks"), folder.with_suffix(".lock")
    unfinished = folder.with_name(f"{folder.name}.tmp-0123abcd")
    assert not chunks.exists() and not lock.exists()
    for is_complete in (True, False):
        if not is_complete:
            shutil.rmtree(folder)
            unfinished.mkdir()
        chunks.mkdir()
        lock.touch()
        assert prepare(data, DEFAULT) == folder
        assert not any(path.exists() for path in (chunks, lock, unfinished))


def test_pretokenized_documents_are_stored_unchanged(data, tmp_path):
    eos = load_tokenizer(DEFAULT).eos
    np.array([5, 6, eos, 7, eos, 8], "<u2").tofile(tmp_path / "x.bin")
    folder = prepare(replace(data, dataset="tokens", path=str(tmp_path / "x.bin"), held_out_fraction=0.0), DEFAULT)
    store = open_store(folder, "train")
    documents = [store.tokens[a:b].tolist() for a, b in zip(store.documents, store.documents[1:], strict=False)]
    assert sorted(documents) == [[5, 6, eos], [7, eos], [8]]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_token_outside_the_vocabulary_is_an_error_in_every_process(data, tmp_path, monkeypatch, workers):
    monkeypatch.setattr(tokenize, "CHUNK_BYTES", 40)
    np.array([5] * 99 + [2048], "<u2").tofile(tmp_path / "x.bin")
    data = replace(data, dataset="tokens", path=str(tmp_path / "x.bin"), prepare_workers=workers)
    message = f"{tmp_path}/x.bin: token 2048 at byte 198 (read as uint16) is outside the tokenizer's vocabulary of 2048"
    assert refused(data) == ("data.path", message)


def test_an_unreadable_file_is_an_error(data, tmp_path, monkeypatch):
    def unreadable(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "digest_of", unreadable)
        assert refused(data) == ("data.path", f"{tmp_path}/corpus/0000.txt cannot be read (Permission denied)")
    monkeypatch.setattr(text, "open_stream", unreadable)  # after its digest was computed
    assert refused(data) == ("data.path", f"{tmp_path}/corpus/0000.txt cannot be read (Permission denied)")


def test_a_killed_worker_process_is_an_error(data, monkeypatch):
    monkeypatch.setattr(tokenize, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(tokenize, "_tokenize_in_worker", _killed)
    message = "a worker process was killed, possibly for lack of memory; use fewer workers"
    assert refused(replace(data, prepare_workers=2)) == ("data.prepare_workers", message)


def _killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_file_shards_of_all_nodes_make_up_the_corpus(data, tmp_path):
    prepared = []
    for node in range(3):
        folder = prepare_module.prepare(data, DEFAULT, load_tokenizer(DEFAULT), (node, 3))
        prepared += documents(folder, "train") + documents(folder, "held_out")
    assert sorted(prepared) == corpus_texts(data)
    with pytest.raises(ConfigError, match=r"data\.path: this dataset has 60 files, too few for 61 shards"):
        prepare_module.prepare(data, DEFAULT, load_tokenizer(DEFAULT), (60, 61))


def test_a_store_of_another_tokenizer_is_not_reused(data, tmp_path):
    """Case 35 of the fault matrix: the content of the tokenizer counts, not its path."""
    path = tmp_path / "t.tiktoken"
    path.write_bytes(DEFAULT_FILE.read_bytes())
    config = TokenizerConfig(backend="tiktoken", path=str(path))
    before = prepare(data, config)
    path.write_bytes(b"".join(DEFAULT_FILE.read_bytes().splitlines(keepends=True)[:-1]))
    after = prepare(data, config)
    assert after != before
    assert read_description(after)["tokenizer"] == load_tokenizer(config).fingerprint


@pytest.mark.parametrize("pattern", ["corpus/*.txt", "c*/0*.txt", "**/*.txt"])
def test_an_absolute_pattern_selects_a_corpus(data, tmp_path, pattern):
    folder = prepare(replace(data, path=f"{tmp_path}/{pattern}"), DEFAULT)
    assert sorted(documents(folder, "train") + documents(folder, "held_out")) == corpus_texts(data)


def test_the_token_dtype_follows_the_vocabulary_size():
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32

"""The token store: complete, found again, rebuilt when something changed, and never half there."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import write_corpus
from trainer.config import ConfigError, DataConfig, TokenizerConfig
from trainer.data import prepare as module
from trainer.data.store import open_store, read_description, token_dtype
from trainer.data.tokenizers import DEFAULT_FILE, load_tokenizer

DEFAULT = TokenizerConfig()


def prepare(data, tokenizer_config):
    return module.prepare(data, tokenizer_config, load_tokenizer(tokenizer_config))


@pytest.fixture
def data(tmp_path) -> DataConfig:
    corpus = write_corpus(tmp_path / "corpus", 60)
    return DataConfig(
        dataset="text",
        path=str(corpus),
        store_folder=str(tmp_path / "stores"),
        held_out_fraction=0.2,
        prepare_processes=1,
    )


def documents(folder, split):
    store, tokenizer = open_store(folder, split), load_tokenizer(DEFAULT)
    found = []
    for start, stop in zip(store.documents, store.documents[1:], strict=False):
        tokens = store.tokens[start:stop].tolist()
        assert (tokens[0], tokens[-1]) == (tokenizer.bos, tokenizer.eos)
        found.append(tokenizer.decode(tokens[1:-1]))
    assert store.documents[-1] == len(store.tokens)
    return found


def texts(data):
    return sorted(p.read_text() for p in Path(data.path).glob("*.txt"))


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_every_document_is_in_exactly_one_split(data):
    folder = prepare(data, DEFAULT)
    train, held_out = documents(folder, "train"), documents(folder, "held_out")
    assert sorted(train + held_out) == texts(data)
    assert 4 <= len(held_out) <= 25
    assert train != sorted(train), "documents are shuffled"


def test_any_number_of_processes_gives_the_same_store(data, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", 4000)
    one = prepare(data, DEFAULT)
    three = prepare(replace(data, prepare_processes=3, store_folder=str(tmp_path / "other")), DEFAULT)
    assert len(contents(one)) == 5
    assert contents(one) == contents(three)


def test_a_store_is_found_again(data, monkeypatch):
    folder = prepare(data, DEFAULT)
    monkeypatch.setattr(module, "_build", lambda *_: pytest.fail("built again"))
    assert prepare(data, DEFAULT) == folder


def test_a_touched_file_with_the_same_content_is_no_change(data):
    folder = prepare(data, DEFAULT)
    file = next(iter(sorted((folder.parent.parent / "corpus").iterdir())))
    file.write_text(file.read_text())
    assert prepare(data, DEFAULT) == folder


@pytest.mark.parametrize("change", ["content", "added", "removed", "renamed"])
def test_a_changed_corpus_is_another_store(data, tmp_path, change):
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
    assert sorted(documents(changed, "train") + documents(changed, "held_out")) == texts(data)


def test_another_tokenizer_or_split_is_another_store(data, tmp_path):
    folder = prepare(data, DEFAULT)
    shorter = tmp_path / "shorter.tiktoken"
    shorter.write_bytes(b"".join(DEFAULT_FILE.read_bytes().splitlines(keepends=True)[:-1]))
    assert prepare(data, TokenizerConfig(kind="tiktoken", path=str(shorter))) != folder
    assert prepare(replace(data, held_out_fraction=0.1), DEFAULT) != folder
    copy = shutil.copy(DEFAULT_FILE, tmp_path / "copy.tiktoken")
    assert prepare(data, TokenizerConfig(kind="tiktoken", path=str(copy))) == folder


class Killed(BaseException):
    """Not an error that anything could handle."""


@pytest.mark.parametrize("where", ["_write_split", "_tokenize"])
def test_a_killed_preparation_leaves_no_store_and_goes_on_where_it_was(data, monkeypatch, where):
    monkeypatch.setattr(module, "PART_BYTES", 4000)
    whole = contents(prepare(data, DEFAULT))
    shutil.rmtree(data.store_folder)

    original, calls = getattr(module, where), []

    def killed_at_the_second_call(*args):
        calls.append(args)
        if len(calls) == 2:
            raise Killed
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, where, killed_at_the_second_call)
        with pytest.raises(Killed):
            prepare(data, DEFAULT)
    assert not list(Path(data.store_folder).glob("*/store.json"))
    tokenized = []
    encode = module._is_held_out
    monkeypatch.setattr(module, "_is_held_out", lambda *args: tokenized.append(args) or encode(*args))
    assert contents(prepare(data, DEFAULT)) == whole
    assert len(tokenized) < 60, "finished parts are not done again"


def test_equal_documents_fall_on_the_same_side(data, tmp_path):
    for i in range(30):
        (tmp_path / "corpus" / f"copy{i}.txt").write_text("the same text")
    folder = prepare(data, DEFAULT)
    assert {documents(folder, s).count("the same text") for s in ("train", "held_out")} == {0, 30}


def test_unreadable_and_empty_documents_are_counted_and_told(data, tmp_path, capsys):
    (tmp_path / "corpus" / "a_bad.txt").write_bytes(b"\xff")
    (tmp_path / "corpus" / "empty.txt").touch()
    folder = prepare(data, DEFAULT)
    assert read_description(folder)["skipped"] == 2
    expected = f"warning: documents left out: 2; the first: {tmp_path}/corpus/a_bad.txt: not UTF-8 text (byte 0)"
    assert expected in capsys.readouterr().err


def test_a_corpus_without_documents_is_refused(data, tmp_path):
    folder = tmp_path / "nothing"
    folder.mkdir()
    (folder / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError) as error:
        prepare(replace(data, path=str(folder)), DEFAULT)
    assert error.value.rule == f"holds no readable document; {folder}/bad.txt: not UTF-8 text (byte 0)"
    (folder / "bad.txt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds no readable document; .*bad\.txt: empty"):
        prepare(replace(data, path=str(folder)), DEFAULT)
    (folder / "blank.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no readable document; 1 files of blank lines"):
        prepare(replace(data, dataset="jsonl", path=str(folder)), DEFAULT)


@pytest.mark.parametrize("content", ["[]", "{", '{"x": 1}', ""])
def test_a_damaged_cache_of_digests_is_made_anew(data, content):
    folder = prepare(data, DEFAULT)
    (folder.parent / "digests.json").write_text(content)
    assert prepare(data, DEFAULT) == folder


def test_a_damaged_store_is_told(data):
    folder = prepare(data, DEFAULT)
    path = folder / "train.tokens"
    path.write_bytes(path.read_bytes()[:-2])
    size = path.stat().st_size
    with pytest.raises(ConfigError) as error:
        open_store(folder, "train")
    assert error.value.key == "data.store_folder"
    assert error.value.rule == f"{path} has {size} bytes of {size + 2}; delete the folder {folder}"
    (folder / "store.json").write_text("{")
    with pytest.raises(ConfigError, match=r"store\.json cannot be read; delete the folder"):
        open_store(folder, "train")


def test_a_store_folder_that_cannot_be_written_is_told(data, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as error:
        prepare(replace(data, store_folder=str(tmp_path / "file")), DEFAULT)
    assert (error.value.key, error.value.rule) == (
        "data.store_folder",
        f"cannot be written (File exists: {tmp_path}/file)",
    )


@pytest.mark.parametrize("size", [0, 1000])
def test_a_torn_part_is_made_again(data, monkeypatch, size):
    whole = contents(prepare(data, DEFAULT))
    shutil.rmtree(data.store_folder)
    monkeypatch.setattr(module, "_write_split", lambda *_: pytest.fail("stop"))
    with pytest.raises(pytest.fail.Exception):
        prepare(data, DEFAULT)
    monkeypatch.undo()
    (part,) = Path(data.store_folder).glob("*.partial/part-000000.npz")
    part.write_bytes(part.read_bytes()[:size])
    assert contents(prepare(data, DEFAULT)) == whole


@pytest.mark.parametrize("pattern", ["corpus/*.txt", "c*/0*.txt", "**/*.txt"])
def test_an_absolute_pattern_names_a_corpus(data, tmp_path, pattern):
    folder = prepare(replace(data, path=f"{tmp_path}/{pattern}"), DEFAULT)
    assert sorted(documents(folder, "train") + documents(folder, "held_out")) == texts(data)


def test_the_width_of_tokens_follows_the_vocabulary():
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32

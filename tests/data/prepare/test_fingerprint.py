"""The fingerprint of a corpus and its cache of digests."""

import os
import shutil

import pytest

from trainer.base.config import ConfigError
from trainer.data.prepare import fingerprint
from trainer.data.sources.source import Source


@pytest.fixture(autouse=True)
def cached_at_once(monkeypatch):
    """The digest of a new file is cached without waiting until its change time is certain."""
    monkeypatch.setattr(fingerprint, "_RECENT_S", -60.0)


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """Names of the files that were hashed."""
    names, original = [], fingerprint.digest_of
    monkeypatch.setattr(fingerprint, "digest_of", lambda path: names.append(path.name) or original(path))
    return names


def key_of(source: Source, caches, shape=()) -> str:
    key, problem = fingerprint.fingerprint(source, list(shape), caches)
    assert problem == ""
    return key


@pytest.fixture
def source(tmp_path) -> Source:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in "abcd":
        (folder / name).write_text(name)
    return Source(str(folder), tuple(str(folder / n) for n in "abd"), False, None, auxiliary_files=(str(folder / "c"),))


def test_unchanged_files_are_not_hashed_again(source, tmp_path, hashed):
    first = key_of(source, tmp_path)
    assert hashed == ["a", "b", "c", "d"]
    hashed.clear()
    assert key_of(source, tmp_path) == first
    assert hashed == []
    (tmp_path / "corpus" / "b").write_text("longer")
    (tmp_path / "corpus" / "bb").write_text("new")
    changed_source = Source(source.root, (*source.files, str(tmp_path / "corpus" / "bb")), False, None)
    changed_source = Source(changed_source.root, tuple(sorted(changed_source.files)), False, None)  # without c
    changed = key_of(changed_source, tmp_path)
    assert hashed == ["b", "bb"] and changed != first
    hashed.clear()
    assert key_of(changed_source, tmp_path) == changed
    assert hashed == []


def test_the_fingerprint_depends_on_the_other_inputs_of_a_store(source, tmp_path):
    assert key_of(source, tmp_path, [1]) != key_of(source, tmp_path, [2])


@pytest.mark.parametrize("content", ["[]", "{", '["a"]', "[1, 2, 3, 4]", "", "\n", '["a", 1, 1, 5]'])
def test_a_damaged_cache_is_rewritten(source, tmp_path, content):
    first = key_of(source, tmp_path)
    (cache,) = tmp_path.glob("digests-*.jsonl")
    complete = cache.read_text()
    cache.write_text(content)
    assert key_of(source, tmp_path) == first
    assert cache.read_text() == complete
    assert len(list(tmp_path.glob("digests-*"))) == 1


# ---------------------------------------------------------------- what counts as the same file


def corpus(folder, content: str = "old", name: str = "x") -> Source:
    """Write a corpus of one file."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    return Source(str(folder), (str(folder / name),), False, None)


def test_relative_roots_of_two_folders_have_two_caches(tmp_path, monkeypatch):
    keys = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        corpus(tmp_path / name / "corpus", name)
        os.utime("corpus/x", ns=(0, 0))
        keys.append(key_of(Source("corpus", ("corpus/x",), False, None), tmp_path))
    assert keys[0] != keys[1]
    assert len(list(tmp_path.glob("digests-*"))) == 2


def test_a_link_that_moves_to_another_version_is_noticed(tmp_path):
    for name, content in (("v1", "old"), ("v2", "new")):
        corpus(tmp_path / name, content)
        os.utime(tmp_path / name / "x", ns=(0, 0))
    link = tmp_path / "latest"
    link.symlink_to("v1")
    source = Source(str(link), (str(link / "x"),), False, None)
    first = key_of(source, tmp_path)
    link.unlink()
    link.symlink_to("v2")
    assert key_of(source, tmp_path) != first
    assert key_of(corpus(tmp_path / "v1"), tmp_path) == first, "equal content has an equal fingerprint"


@pytest.mark.parametrize("change", ["written in place", "copied", "moved", "swapped", "linked"])
def test_another_content_of_equal_size_and_modification_time_is_noticed(tmp_path, hashed, change):
    source = corpus(tmp_path / "corpus")
    corpus(tmp_path / "other", "new")
    file, other = tmp_path / "corpus" / "x", tmp_path / "other" / "x"
    for path in (file, other):
        os.utime(path, ns=(10**18, 10**18))
    first = key_of(source, tmp_path)
    match change:
        case "written in place":
            file.write_text("new")
        case "copied":
            shutil.copy2(other, file)
        case "moved":
            other.replace(file)
        case "swapped":  # renames do not change the inode of either file
            file.rename(tmp_path / "third")
            other.rename(file)
        case "linked":
            file.unlink()
            file.symlink_to(other)
    os.utime(file, ns=(10**18, 10**18))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (3, 10**18)
    assert key_of(source, tmp_path) != first
    hashed.clear()
    key_of(source, tmp_path)
    assert hashed == []


def test_two_files_that_exchange_their_names_are_noticed(tmp_path):
    source = corpus(tmp_path / "corpus", "one", "a")
    corpus(tmp_path / "corpus", "two", "b")
    paths = [tmp_path / "corpus" / name for name in "ab"]
    source = Source(source.root, tuple(map(str, paths)), False, None)
    first = key_of(source, tmp_path)
    paths[0].rename(tmp_path / "c")
    paths[1].rename(paths[0])
    (tmp_path / "c").rename(paths[1])
    assert key_of(source, tmp_path) != first


def test_a_file_that_has_just_changed_is_not_cached(source, tmp_path, monkeypatch, hashed):
    """A second change within the resolution of the file system's times would not change them."""
    monkeypatch.setattr(fingerprint, "_RECENT_S", 60.0)
    for _ in range(2):
        key_of(source, tmp_path)
    assert hashed == 2 * ["a", "b", "c", "d"]
    assert not list(tmp_path.glob("digests-*"))


def test_a_file_that_changes_while_it_is_hashed_is_not_cached(source, tmp_path, monkeypatch):
    original = fingerprint.digest_of

    def changed_after(path):
        digest = original(path)
        if path.name == "b":
            path.write_text("changed")
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "digest_of", changed_after)
        first = key_of(source, tmp_path)
    assert key_of(source, tmp_path) != first


def test_a_file_that_disappears_is_an_error(source, tmp_path):
    (tmp_path / "corpus" / "b").unlink()
    with pytest.raises(ConfigError) as error:
        key_of(source, tmp_path)
    assert error.value.message == f"{tmp_path}/corpus/b cannot be read (No such file or directory)"


def test_an_interrupted_fingerprint_leaves_no_file(source, tmp_path, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(fingerprint, "digest_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        key_of(source, tmp_path)
    assert not list(tmp_path.glob("digests-*"))

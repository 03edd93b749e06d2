"""The fingerprint of a corpus and its cache of digests."""

import pytest

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

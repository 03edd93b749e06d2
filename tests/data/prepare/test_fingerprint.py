"""What a corpus is known by, and that it is read once."""

import pytest

from trainer.data.prepare import fingerprint
from trainer.data.sources.source import Source


@pytest.fixture
def looked(monkeypatch) -> list[str]:
    """Names of the files that were read."""
    names, original = [], fingerprint.digest_of
    monkeypatch.setattr(fingerprint, "digest_of", lambda path: names.append(path.name) or original(path))
    return names


@pytest.fixture
def source(tmp_path) -> Source:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in "abcd":
        (folder / name).write_text(name)
    return Source(str(folder), tuple(str(folder / n) for n in "abd"), False, None, auxiliary_files=(str(folder / "c"),))


def test_files_that_did_not_change_are_not_read_again(source, tmp_path, looked):
    first = fingerprint.fingerprint(source, [], tmp_path)
    assert looked == ["a", "b", "c", "d"]
    looked.clear()
    assert fingerprint.fingerprint(source, [], tmp_path) == first
    assert looked == []
    (tmp_path / "corpus" / "b").write_text("longer")
    (tmp_path / "corpus" / "bb").write_text("new")
    more = Source(source.root, (*source.files, str(tmp_path / "corpus" / "bb")), False, None)
    more = Source(more.root, tuple(sorted(more.files)), False, None)  # and without c
    changed = fingerprint.fingerprint(more, [], tmp_path)
    assert looked == ["b", "bb"] and changed != first
    looked.clear()
    assert fingerprint.fingerprint(more, [], tmp_path) == changed
    assert looked == []


def test_what_shapes_the_store_is_part_of_it(source, tmp_path):
    assert fingerprint.fingerprint(source, [1], tmp_path) != fingerprint.fingerprint(source, [2], tmp_path)


@pytest.mark.parametrize("content", ["[]", "{", '["a"]', "[1, 2, 3, 4]", "", "\n", '["a", 1, 1, 5]'])
def test_a_damaged_cache_is_made_anew(source, tmp_path, content):
    first = fingerprint.fingerprint(source, [], tmp_path)
    (cache,) = tmp_path.glob("digests-*.jsonl")
    whole = cache.read_text()
    cache.write_text(content)
    assert fingerprint.fingerprint(source, [], tmp_path) == first
    assert cache.read_text() == whole
    assert len(list(tmp_path.glob("digests-*"))) == 1

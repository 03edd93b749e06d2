"""Objects of a real S3 server, and one line for each error."""

import os
import sys

import pytest

from tests.object_stores import SECRET

pytest.importorskip("obstore")
pytest.importorskip("moto")

from trainer.base.system.files import sha256_of
from trainer.base.system.object_store import ObjectStore, is_url, url_error
from trainer.base.system.store_errors import StoreError
from trainer.checkpoint import lease


def test_small_objects_are_written_under_conditions(bucket):
    store = ObjectStore(f"{bucket}/small")
    first = store.write("a/x", b"1", "")
    with pytest.raises(StoreError, match="changed by another writer") as error:
        store.write("a/x", b"2", "")
    assert error.value.kind == "changed"
    second = store.write("a/x", b"2", first)
    with pytest.raises(StoreError, match="changed by another writer"):
        store.write("a/x", b"3", first)
    assert store.read("a/x") == (b"2", second)
    assert [(o.key, o.size, o.version) for o in store.list("a/")] == [("a/x", 1, second)]
    store.delete(["a/x", "a/missing"])
    assert store.head("a/x") is None


@pytest.mark.parametrize("size", [0, 1, 2**20, 20 * 2**20 + 17])
def test_a_file_is_uploaded_and_a_download_continues(bucket, tmp_path, size):
    store, path, copy = ObjectStore(f"{bucket}/files"), tmp_path / "file", tmp_path / "copy"
    path.write_bytes(os.urandom(size))
    paces = []
    sha = store.upload(path, "file", paces.append)
    assert (sha, sum(paces)) == (sha256_of(path), size)
    assert store.has("file", path) and not store.has("other", path)
    copy.write_bytes(path.read_bytes()[: size // 3])
    store.download("file", copy, size, sha256=sha)
    assert copy.read_bytes() == path.read_bytes()
    if size:
        store.write("file", bytes(size), None)
        assert not store.has("file", path)


def test_a_wrong_object_is_not_taken_for_the_right_one(bucket, tmp_path):
    store, path = ObjectStore(f"{bucket}/wrong"), tmp_path / "file"
    path.write_bytes(b"right")
    sha = store.upload(path, "file")
    store.write("file", b"wrong", None)
    with pytest.raises(StoreError, match="does not match its SHA-256"):
        store.download("file", tmp_path / "copy", 5, sha256=sha)
    assert not (tmp_path / "copy").exists()


URLS = {
    "s3://": "names no bucket",
    "s3a://bucket/x": "write s3://BUCKET/PREFIX",
    "s3://bucket/a?b=1": "must not contain # or ?",
    "s3://bucket/a#b": "must not contain # or ?",
    "S3://bucket/x": "write s3://BUCKET/PREFIX",
    "s3://bucket/../x": "must not contain the names . and ..",
    "s3://bu cket/x": "must not contain spaces in the name of the bucket",
    "s3://bucket//x": "has an empty name between two slashes",
    "http://host/x": "expected a URL",
    "s3:/bucket/x": "expected a URL",
    "s3://bucket/a//b": "has an empty name between two slashes",
    "file://x/y": "expected file:/// and an absolute path",
    f"s3://user:{SECRET}@bucket/x": "must not contain credentials",
}


@pytest.mark.parametrize("url", URLS)
def test_a_wrong_url_is_one_line_without_credentials(url):
    assert URLS[url] in url_error(url)
    with pytest.raises(StoreError) as error:
        ObjectStore(url)
    assert SECRET not in str(error.value) and "\n" not in str(error.value)


def test_paths_are_no_urls():
    assert [is_url(path) for path in ("data/a", "s3/b", "jsonl:s3", "s3://b/x", "file:///x")] == [False] * 3 + [
        True
    ] * 2


ERRORS = {
    "a missing key": ({}, "s3://bucket/x/y: cannot be read: there is no such object"),
    "a missing bucket": ({"url": "s3://no-bucket/x"}, "s3://no-bucket/x/y: cannot be read: there is no such bucket"),
    "no server": (
        {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
        "s3://bucket/x/y: cannot be read: 127.0.0.1:9 cannot be reached",
    ),
    "no host": (
        {"AWS_ENDPOINT_URL": "http://host.invalid"},
        "s3://bucket/x/y: cannot be read: the name of the host host.invalid cannot be resolved",
    ),
}


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:5000", "s3.example.com/x"])
@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_address_that_is_none_is_one_line(bucket, monkeypatch, name, address):
    monkeypatch.setenv(name, address)
    with pytest.raises(StoreError) as error:
        ObjectStore(f"{bucket}/x")
    assert str(error.value) == f"{name}={address}: expected an address such as https://s3.example.com"


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_is_one_line_with_the_object_and_the_reason(bucket, monkeypatch, case):
    variables, line = ERRORS[case]
    for name, value in variables.items():
        if name != "url":
            monkeypatch.setenv(name, value)
    with pytest.raises(StoreError) as error:
        ObjectStore(variables.get("url", "s3://bucket/x")).read("y")
    assert str(error.value) == line


def test_credentials_come_from_a_profile(bucket, monkeypatch, tmp_path):
    keys = [f"aws_{name} = {os.environ[f'AWS_{name.upper()}']}" for name in ("access_key_id", "secret_access_key")]
    (tmp_path / "credentials").write_text("\n".join(["[other]", *keys, ""]))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "other")
    store = ObjectStore(f"{bucket}/profile")
    store.write("x", b"1", "")
    assert store.read("x")[0] == b"1"
    monkeypatch.setenv("AWS_PROFILE", "none")
    with pytest.raises(
        StoreError, match=r"^the profile .* cannot be used: The config profile \(none\) could not be found$"
    ):
        ObjectStore(f"{bucket}/profile")
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", None)
    with pytest.raises(
        StoreError, match=r"the profile in AWS_PROFILE or ~/\.aws needs the package boto3: pip install boto3"
    ):
        ObjectStore(f"{bucket}/profile")


def test_a_folder_is_a_store_too(tmp_path):
    store = ObjectStore(f"file://{tmp_path}/store")
    store.write("a/b", b"1", "")
    assert store.read("a/b")[0] == b"1"
    with pytest.raises(StoreError, match="changed by another writer"):
        store.write("a/b", b"2", "")
    first = store.read("a/b")[1]
    second = store.write("a/b", b"3", first)
    with pytest.raises(StoreError, match="changed by another writer"):
        store.write("a/b", b"4", first)
    assert store.read("a/b") == (b"3", second)
    assert [(item.key, item.version) for item in store.list()] == [("a/b", second)]
    assert lease.honours_conditions(store)

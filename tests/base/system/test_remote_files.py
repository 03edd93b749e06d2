"""Local copies of URLs: what a URL means, and the cache that processes share."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.mirrored_runs import impatient
from tests.object_stores import SECRET
from tests.s3_proxy import Act, cut_at, flipped, replaced_by, resets, s3_proxy, says, slow, truncated

pytest.importorskip("obstore")
pytest.importorskip("moto")

from trainer.base.system import remote_files
from trainer.base.system.object_store import ObjectStore
from trainer.base.system.remote_files import local_copy
from trainer.base.system.remote_run import Lineage, RemoteFile, Save, create_save, key_of
from trainer.base.system.store_errors import StoreError
from trainer.base.system.urls import with_urls


@pytest.fixture
def prefix(bucket, request):
    return f"{bucket}/{re.sub('[^a-z0-9]+', '-', request.node.name)}"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, as a new process sees it."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MESHWRIGHT_URLS", "{}")
    return tmp_path / "cache"


@pytest.fixture
def start_again(monkeypatch):
    """Function after which this process is like a new one."""

    def start():
        monkeypatch.setenv("MESHWRIGHT_URLS", "{}")
        for lock in remote_files._held.values():
            lock.close()
        remote_files._held.clear()

    return start


def put(url, *keys, content=None):
    store = ObjectStore(url)
    for key in keys:
        store.write(key, content or key.encode(), None)


def files(path):
    """Relative paths of the files of a local copy."""
    root = Path(path)
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


KEYS = ("a.jsonl", "b.jsonl", "b.txt", "deep/c.jsonl", "deep/er/d.jsonl", ".hidden/x.jsonl", "t.bin", "t.idx", "u.idx")
MEANINGS = {
    "": ["a.jsonl", "b.jsonl", "b.txt", "deep/c.jsonl", "deep/er/d.jsonl", "t.bin", "t.idx", "u.idx"],
    "/": ["a.jsonl", "b.jsonl", "b.txt", "deep/c.jsonl", "deep/er/d.jsonl", "t.bin", "t.idx", "u.idx"],
    "/deep": ["c.jsonl", "er/d.jsonl"],
    "/a.jsonl": ["a.jsonl"],
    "/t.bin": ["t.bin", "t.idx"],
    "/*.jsonl": ["a.jsonl", "b.jsonl"],
    "/?.bin": ["t.bin", "t.idx"],
    "/[b-z].*": ["b.jsonl", "b.txt", "t.bin", "t.idx", "u.idx"],
    "/**/*.jsonl": ["a.jsonl", "b.jsonl", "deep/c.jsonl", "deep/er/d.jsonl"],
    "/deep/**": ["c.jsonl", "er/d.jsonl"],
    "/*/*.jsonl": ["deep/c.jsonl"],
    "/list.MANIFEST": ["a.jsonl", "deep/c.jsonl", "deep/er/d.jsonl", "list.MANIFEST"],
    "/list.manifest": ["a.jsonl", "deep/c.jsonl", "deep/er/d.jsonl", "list.manifest"],
}


@pytest.mark.parametrize("end", MEANINGS)
def test_a_url_means_a_file_a_prefix_a_pattern_or_a_manifest(bucket, end):
    url = f"{bucket}/meanings"
    put(url, *KEYS)
    if end.lower().endswith(".manifest"):
        put(url, end[1:], content=b"\xef\xbb\xbfa.jsonl\n# some\n\n./deep\n")
    path = local_copy(url + end, beside=["*.idx"])
    folder = path.partition("/files")[0] + "/files"
    assert files(folder) == MEANINGS[end]
    name = end.rsplit("/", 1)[-1]
    assert path == folder if end in ("", "/", "/deep") else path.endswith(name)
    assert with_urls(f"{path}: damaged") == f"{url + end}: damaged"
    for file in MEANINGS[end]:
        assert (Path(folder) / file).read_bytes().decode().endswith(file) or end.lower().endswith(".manifest")
    ObjectStore(url).delete(["list.manifest", "list.MANIFEST"])


WRONG = {
    "/a.json": "there is no such object, and none below it; did you mean 'a.jsonl'?",
    "/dep": "there is no such object, and none below it; did you mean 'deep'?",
    "/*.csv": "no object matches the pattern",
    "/a.jsonl?versionId=3": "a query is not supported",
    "-other/x": "there is no such object, and none below it",
}


@pytest.mark.parametrize("end", WRONG)
def test_a_url_that_means_nothing_is_one_line_and_leaves_nothing(bucket, cache, end):
    url = f"{bucket}/wrong"
    put(url, *KEYS)
    with pytest.raises(StoreError) as error:
        local_copy(url + end)
    assert str(error.value) == f"{url + end}: {WRONG[end]}"
    assert not cache.exists()


LISTED = {"/etc/passwd": "1", "s3://bucket/other/a": "1", "../a": "1", "a.jsonl\n x/../../b": "2"}


@pytest.mark.parametrize("entry", LISTED)
def test_a_list_in_a_bucket_names_only_objects_below_it(prefix, entry):
    put(prefix, "a.jsonl")
    put(prefix, "x.manifest", content=entry.encode())
    with pytest.raises(
        StoreError, match=rf"x\.manifest:{LISTED[entry]}: .*: in a bucket, a list names objects below its own"
    ):
        local_copy(f"{prefix}/x.manifest")


def test_a_name_that_exists_is_no_pattern(prefix):
    put(prefix, "a[1].jsonl", "a1.jsonl", "a?.jsonl")
    for name in ("a[1].jsonl", "a?.jsonl"):
        path = Path(local_copy(f"{prefix}/{name}"))
        assert (path.name, files(path.parent)) == (name, [name])


def test_a_cache_that_cannot_be_used_is_one_line(prefix, tmp_path, monkeypatch):
    put(prefix, "a")
    (tmp_path / "file").touch()
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        StoreError, match=r"a: the cache .*/file cannot be used \(.*\); MESHWRIGHT_CACHE names another folder"
    ):
        local_copy(f"{prefix}/a")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("x" * 256,), "has a name that no file can have"),
        (("a", "a/b"), "a is an object and a prefix of others, but cannot be a file and a folder"),
    ],
)
def test_objects_that_cannot_be_files_are_one_line(prefix, keys, message):
    put(prefix, *keys)
    with pytest.raises(StoreError, match=message):
        local_copy(prefix)


def test_only_what_has_changed_is_read_again(prefix, start_again, monkeypatch):
    put(prefix, "a", "b")
    first = local_copy(prefix)
    put(prefix, "b", content=b"new")
    assert local_copy(prefix) == first, "this process and its ranks go on with what they have begun with"
    start_again()
    second = local_copy(prefix)
    assert [(Path(path) / "b").read_bytes() for path in (first, second)] == [b"b", b"new"]
    start_again()
    monkeypatch.setattr(ObjectStore, "download", None)
    assert local_copy(prefix) == second, "no download"


def test_weights_are_read_only_where_they_are_needed(prefix):
    put(prefix, "config.json", "model.safetensors")
    assert files(local_copy(prefix, with_weights=False)) == ["config.json"]
    assert files(local_copy(prefix)) == ["config.json", "model.safetensors"]


def test_a_copy_that_was_changed_is_read_again(prefix):
    put(prefix, "a")
    path = Path(local_copy(prefix))
    (path / "a").write_bytes(b"edited")
    assert Path(local_copy(prefix), "a").read_bytes() == b"a"


def test_a_changed_copy_that_others_read_is_not_removed(prefix):
    put(prefix, "a")
    path = Path(local_copy(prefix))
    with start(prefix) as reader:
        assert reader.stdout.readline().strip() == str(path)
        (path / "a").write_bytes(b"edited")
        with pytest.raises(StoreError, match="were changed, and other processes use them"):
            local_copy(prefix)
        reader.communicate()


def test_a_copy_in_another_cache_is_used(prefix, tmp_path, monkeypatch):
    put(prefix, "a")
    path = local_copy(prefix)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "other"))
    assert local_copy(prefix) == path


def test_a_download_that_was_cut_off_continues(prefix, cache, start_again, monkeypatch):
    put(prefix, *map(str, range(20)))
    download, done = ObjectStore.download, []

    def cut_off(self, key, *args, **options):
        if len(done) == 10:
            raise StoreError("cut off", "unreachable")
        download(self, key, *args, **options)
        done.append(key)

    monkeypatch.setattr(remote_files, "_WORKERS", 1)
    monkeypatch.setattr(ObjectStore, "download", cut_off)
    with pytest.raises(StoreError, match="cut off"):
        local_copy(prefix)
    assert [folder.suffix for folder in cache.iterdir()] == [".part"]
    first, done = done, []
    assert len(files(local_copy(prefix))) == 20
    assert len(done) == 10 and not set(done) & set(first)


def test_objects_that_change_during_the_download_are_an_error(prefix, cache, monkeypatch):
    put(prefix, "a", "b")
    download = ObjectStore.download

    def download_and_add(self, *args, **options):
        download(self, *args, **options)
        put(prefix, "c")

    monkeypatch.setattr(ObjectStore, "download", download_and_add)
    with pytest.raises(StoreError, match=r"the objects have changed during the download; start again$"):
        local_copy(prefix)
    assert not [folder for folder in cache.iterdir() if not folder.name.endswith(".part")]


def test_an_object_that_is_replaced_after_it_was_listed_is_an_error(prefix, monkeypatch):
    put(prefix, "a")
    resolve = remote_files.resolve

    def resolve_and_replace(*args):
        found = resolve(*args)
        put(prefix, "a", content=b"b")
        return found

    monkeypatch.setattr(remote_files, "resolve", resolve_and_replace)
    with pytest.raises(StoreError, match="has been changed by another writer"):
        local_copy(prefix)


EMPTY_LIST = b"<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
DENIED = says(403, "AccessDenied")
FAULTS: dict[str, tuple[str, Act, int, int, str]] = {
    "slow": ("GET .*big", slow(0.2), 0, 9, ""),
    "503": ("GET .*big", says(503, "SlowDown"), 0, 2, ""),
    "503 with Retry-After": ("GET .*big", says(503, "SlowDown", Retry_After="1"), 0, 1, ""),
    "reset": ("GET .*big", resets, 0, 2, ""),
    "cut off": ("GET .*big", cut_at(3 * 2**20), 0, 3, ""),
    "flipped once": ("GET .*big", flipped, 0, 1, ""),
    "truncated once": ("GET .*big", truncated, 0, 1, ""),
    "flipped": ("GET .*big", flipped, 0, 99, "/big: does not match its MD5 (if the bucket is encrypted with keys of KMS, set"),
    "flipped in parts": ("GET .*parts", flipped, 0, 1, ""),
    "truncated": ("GET .*small", truncated, 0, 99, "/small: has 3 bytes, expected 10"),
    "missing": ("GET .*small", says(404, "NoSuchKey"), 0, 99, "/small: cannot be read: there is no such object"),
    "denied": ("GET .*small", DENIED, 0, 99, "/small: cannot be read: access is denied to AWS_ACCESS_KEY_ID"),
    "listing denied": ("list-type", DENIED, 0, 99, "cannot be listed: access is denied to AWS_ACCESS_KEY_ID"),
    "expired": ("GET .*big", says(400, "ExpiredToken"), 0, 99, "/big: cannot be read: the credentials of AWS_ACCESS_KEY_ID"),
    "500": ("GET .*small", says(500, "InternalError"), 0, 99, "/small: cannot be read: the store fails with status 500"),
    "stale listing": ("list-type", replaced_by(EMPTY_LIST), 1, 1, "the objects have changed during the download"),
    "no listing": ("list-type", replaced_by(b"<html>"), 0, 99, "cannot be listed: "),
}  # fmt: skip
"""Fault -> pattern of the requests, what happens, how many pass, how many fail, text of the error. "": the content is right."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_during_a_download(prefix, cache, monkeypatch, fault):
    put(prefix, "small", content=b"0123456789")
    put(prefix, "big", content=bytes(range(256)) * 2**14 + b"end")
    whole = cache.parent / "whole"
    whole.write_bytes(bytes(range(256)) * (9 * 2**12 + 1))
    ObjectStore(prefix).upload(whole, "parts")
    with s3_proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy, impatient():
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        proxy.pattern, proxy.fault, proxy.skip, proxy.times, text = FAULTS[fault]
        if text:
            with pytest.raises(StoreError, match=re.escape(text)) as error:
                local_copy(prefix)
            assert "\n" not in str(error.value) and SECRET not in str(error.value)
            assert not [folder for folder in cache.glob("data-*") if not folder.name.endswith(".part")]
            proxy.pattern = "(?!)"
        path = Path(local_copy(prefix))
    assert proxy.faults
    assert files(path) == ["big", "parts", "small"]
    assert (path / "big").read_bytes() == bytes(range(256)) * 2**14 + b"end"
    assert (path / "parts").read_bytes() == whole.read_bytes()
    assert (path / "small").read_bytes() == b"0123456789"


LOAD = """
import sys
from trainer.base.system.remote_files import local_copy
path = local_copy(sys.argv[1])
print(path, flush=True)
sys.stdin.read()
"""


def start(url):
    """Start a process that makes a local copy, and uses it until its stdin is closed."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", LOAD, url], stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT
    )


def test_processes_share_the_cache(prefix, cache):
    for i in range(50):
        put(prefix, f"{i:03}.txt", content=os.urandom(1000))
    processes = [start(prefix) for _ in range(3)]
    results = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, results
    assert len({out for out, _ in results}) == 1
    assert sum("downloading 50 files" in err for _, err in results) == 1
    assert len(files(results[0][0].strip())) == 50


def test_what_was_used_least_recently_is_removed_unless_it_is_in_use(prefix, cache, start_again, monkeypatch):
    paths = {}
    for i, name in enumerate("abc"):
        put(prefix, f"{name}/x", content=os.urandom(2**20))
        paths[name] = Path(local_copy(f"{prefix}/{name}"))
        used = time.time() - 1000 + i
        os.utime(paths[name].parent / "entry.json", (used, used))
    (cache / "data-0.part" / "files").mkdir(parents=True)
    os.utime(cache / "data-0.part", (0, 0))
    start_again()
    with start(f"{prefix}/a") as reader:
        assert reader.stdout.readline().strip() == str(paths["a"])
        os.utime(paths["a"].parent / "entry.json", (0, 0))
        monkeypatch.setenv("MESHWRIGHT_CACHE_GIB", str(3.5 / 1024))
        put(prefix, "d/x", content=os.urandom(2**20))
        local_copy(f"{prefix}/d")
        reader.communicate()
    assert {name: path.exists() for name, path in paths.items()} == {"a": True, "b": False, "c": True}
    assert not (cache / "data-0.part").exists()


def test_a_full_disk_is_one_line(prefix, cache, monkeypatch):
    put(prefix, "x", content=bytes(2 * 10**6))
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    with pytest.raises(StoreError) as error:
        local_copy(f"{prefix}/x")
    assert str(error.value) == (
        f"{prefix}/x: 2.0 MB must be downloaded to {cache}, which has 1.0 MB free; MESHWRIGHT_CACHE names another folder"
    )


def test_a_wrong_limit_is_one_line(prefix, monkeypatch):
    put(prefix, "x")
    monkeypatch.setenv("MESHWRIGHT_CACHE_GIB", "10G")
    with pytest.raises(StoreError, match=r"^MESHWRIGHT_CACHE_GIB=10G: expected a size in GiB$"):
        local_copy(prefix)


def test_of_a_run_folder_the_newest_checkpoint_is_meant(prefix):
    put(prefix, "config.toml", "checkpoints/step-00000002/a", "checkpoints/step-00000010/a")
    assert files(local_copy(prefix)) == ["checkpoints/step-00000010/a", "config.toml"]
    best = local_copy(f"{prefix}@best")
    assert best.endswith("/files@best")
    assert len(files(best.removesuffix("@best"))) == 3


def test_of_a_mirrored_run_the_newest_or_the_best_checkpoint_is_meant(prefix):

    store = ObjectStore(prefix)
    names = ["step-00000002-aaaaaaaaaaaa", "step-00000004-bbbbbbbbbbbb"]
    for name in names:
        store.write(key_of(name, "manifest.json"), name.encode(), None)
        store.write(key_of(name, "run-1/config.toml"), b"x", None)
        of = RemoteFile(len(name), hashlib.sha256(name.encode()).hexdigest())
        run_files = {"config.toml": RemoteFile(1, hashlib.sha256(b"x").hexdigest())}
        create_save(store, Save(name=name, epoch=1, files={"manifest.json": of}, run_files=run_files))
    Lineage(1, tuple(names), (), 2).write(store, True)
    for end, step in (("", 4), ("@best", 2)):
        path = local_copy(prefix + end)
        assert path.endswith(end)
        assert files(path.removesuffix("@best")) == [f"checkpoints/step-{step:08}/manifest.json", "config.toml"]
    best = local_copy(f"{prefix}@best").removesuffix("@best")
    assert with_urls(f"{best}/checkpoints/step-2/a") == f"{prefix}/checkpoints/step-2/a"
    named = local_copy(f"{prefix}/checkpoints/step-00000002")
    assert files(named) == ["manifest.json"] and named.endswith("/files/checkpoints/step-00000002")
    assert local_copy(f"{prefix}/checkpoints/step-00000002/manifest.json") == f"{named}/manifest.json"
    with pytest.raises(StoreError, match="the run has no checkpoint step-00000003"):
        local_copy(f"{prefix}/checkpoints/step-00000003")
    store.write(key_of(names[1], "manifest.json"), names[0].encode(), None)
    remote = json.loads(os.environ["MESHWRIGHT_URLS"])
    shutil.rmtree(Path(remote[prefix]).parent)
    with pytest.raises(StoreError, match="does not match its SHA-256"):
        local_copy(prefix)


def test_a_run_may_be_mirrored_to_a_whole_bucket(bucket):
    import boto3

    boto3.client("s3").create_bucket(Bucket="whole")
    store, name = ObjectStore("s3://whole"), "step-00000002-aaaaaaaaaaaa"
    store.write(key_of(name, "manifest.json"), b"x", None)
    of = RemoteFile(1, hashlib.sha256(b"x").hexdigest())
    create_save(store, Save(name=name, epoch=1, files={"manifest.json": of}, run_files={}))
    Lineage(1, (name,)).write(store, True)
    assert files(local_copy("s3://whole")) == ["checkpoints/step-00000002/manifest.json"]

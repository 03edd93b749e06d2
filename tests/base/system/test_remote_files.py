"""Local copies of URLs: what a URL means, and the cache that processes share."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.object_stores import s3_server

pytest.importorskip("obstore")
pytest.importorskip("moto")

from trainer.base.system import remote_files
from trainer.base.system.object_store import ObjectStore, StoreError
from trainer.base.system.remote_files import local_copy
from trainer.base.system.urls import with_urls


@pytest.fixture(scope="module")
def server():
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(server, request):
    return f"{server}/{request.node.name.replace('[', '-').rstrip(']')}"


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
    "/list.manifest": ["a.jsonl", "deep/c.jsonl", "deep/er/d.jsonl", "list.manifest"],
}


@pytest.mark.parametrize("end", MEANINGS)
def test_a_url_means_a_file_a_prefix_a_pattern_or_a_manifest(server, end):
    url = f"{server}/meanings"
    put(url, *KEYS)
    if end.endswith(".manifest"):
        put(url, "list.manifest", content=b"# some\na.jsonl\n\n./deep\n")
    path = local_copy(url + end, beside=["*.idx"])
    folder = path.partition("/files")[0] + "/files"
    assert files(folder) == MEANINGS[end]
    name = end.rsplit("/", 1)[-1]
    assert path == folder if end in ("", "/", "/deep") else path.endswith(name)
    assert with_urls(f"{path}: damaged") == f"{url + end}: damaged"
    for file in MEANINGS[end]:
        assert (Path(folder) / file).read_bytes().decode().endswith(file) or end.endswith(".manifest")
    ObjectStore(url).delete(["list.manifest"])


WRONG = {
    "/a.json": "there is no such object, and none below it; did you mean 'a.jsonl'?",
    "/dep": "there is no such object, and none below it; did you mean 'deep'?",
    "/*.csv": "no object matches the pattern",
    "-other/x": "there is no such object, and none below it",
}


@pytest.mark.parametrize("end", WRONG)
def test_a_url_that_means_nothing_is_one_line_and_leaves_nothing(server, cache, end):
    url = f"{server}/wrong"
    put(url, *KEYS)
    with pytest.raises(StoreError) as error:
        local_copy(url + end)
    assert str(error.value) == f"{url + end}: {WRONG[end]}"
    assert not cache.exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("x" * 256,), "has a name that no file can have"),
        (("a", "a/b"), "a is an object and a prefix of others, but cannot be a file and a folder"),
    ],
)
def test_objects_that_cannot_be_files_are_one_line(bucket, keys, message):
    put(bucket, *keys)
    with pytest.raises(StoreError, match=message):
        local_copy(bucket)


def test_only_what_has_changed_is_read_again(bucket, start_again, monkeypatch):
    put(bucket, "a", "b")
    first = local_copy(bucket)
    put(bucket, "b", content=b"new")
    assert local_copy(bucket) == first, "this process and its ranks go on with what they have begun with"
    start_again()
    second = local_copy(bucket)
    assert [(Path(path) / "b").read_bytes() for path in (first, second)] == [b"b", b"new"]
    start_again()
    monkeypatch.setattr(ObjectStore, "download", None)
    assert local_copy(bucket) == second, "no download"


def test_weights_are_read_only_where_they_are_needed(bucket):
    put(bucket, "config.json", "model.safetensors")
    assert files(local_copy(bucket, with_weights=False)) == ["config.json"]
    assert files(local_copy(bucket)) == ["config.json", "model.safetensors"]


def test_a_copy_that_was_changed_is_read_again(bucket, start_again):
    put(bucket, "a")
    path = Path(local_copy(bucket))
    (path / "a").write_bytes(b"edited")
    start_again()
    assert Path(local_copy(bucket), "a").read_bytes() == b"a"


def test_a_download_that_was_cut_off_continues(bucket, cache, start_again, monkeypatch):
    put(bucket, *map(str, range(20)))
    download, done = ObjectStore.download, []

    def cut_off(self, key, *args, **options):
        if len(done) == 10:
            raise StoreError("cut off", "unreachable")
        download(self, key, *args, **options)
        done.append(key)

    monkeypatch.setattr(remote_files, "_WORKERS", 1)
    monkeypatch.setattr(ObjectStore, "download", cut_off)
    with pytest.raises(StoreError, match="cut off"):
        local_copy(bucket)
    assert [folder.suffix for folder in cache.iterdir()] == [".part"]
    first, done = done, []
    assert len(files(local_copy(bucket))) == 20
    assert len(done) == 10 and not set(done) & set(first)


def test_objects_that_change_during_the_download_are_an_error(bucket, cache, monkeypatch):
    put(bucket, "a", "b")
    download = ObjectStore.download

    def download_and_add(self, *args, **options):
        download(self, *args, **options)
        put(bucket, "c")

    monkeypatch.setattr(ObjectStore, "download", download_and_add)
    with pytest.raises(StoreError, match=r"the objects have changed during the download; start again$"):
        local_copy(bucket)
    assert not [folder for folder in cache.iterdir() if not folder.name.endswith(".part")]


def test_an_object_that_is_replaced_after_it_was_listed_is_an_error(bucket, monkeypatch):
    put(bucket, "a")
    resolve = remote_files._resolve

    def resolve_and_replace(*args):
        found = resolve(*args)
        put(bucket, "a", content=b"b")
        return found

    monkeypatch.setattr(remote_files, "_resolve", resolve_and_replace)
    with pytest.raises(StoreError, match="has been changed by another writer"):
        local_copy(bucket)


LOAD = """
import sys
from trainer.base.system.remote_files import local_copy
path = local_copy(sys.argv[1])
print(path)
sys.stdin.read()
"""


def start(url):
    """Start a process that makes a local copy, and uses it until its stdin is closed."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", LOAD, url], stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT
    )


def test_processes_share_the_cache(bucket, cache):
    for i in range(50):
        put(bucket, f"{i:03}.txt", content=os.urandom(1000))
    processes = [start(bucket) for _ in range(3)]
    results = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, results
    assert len({out for out, _ in results}) == 1
    assert sum("downloading 50 files" in err for _, err in results) == 1
    assert len(files(results[0][0].strip())) == 50


def test_what_was_used_least_recently_is_removed_unless_it_is_in_use(bucket, cache, start_again, monkeypatch):
    paths = {}
    for i, name in enumerate("abc"):
        put(bucket, f"{name}/x", content=os.urandom(2**20))
        paths[name] = Path(local_copy(f"{bucket}/{name}"))
        used = time.time() - 1000 + i
        os.utime(paths[name].parent / "entry.json", (used, used))
    (cache / "data-0.part" / "files").mkdir(parents=True)
    start_again()
    with start(f"{bucket}/a") as reader:
        assert reader.stdout.readline().strip() == str(paths["a"])
        os.utime(paths["a"].parent / "entry.json", (0, 0))
        monkeypatch.setenv("MESHWRIGHT_CACHE_GIB", str(3.5 / 1024))
        put(bucket, "d/x", content=os.urandom(2**20))
        local_copy(f"{bucket}/d")
        reader.communicate()
    assert {name: path.exists() for name, path in paths.items()} == {"a": True, "b": False, "c": True}


def test_a_full_disk_is_one_line(bucket, cache, monkeypatch):
    put(bucket, "x", content=bytes(2 * 10**6))
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    with pytest.raises(StoreError) as error:
        local_copy(f"{bucket}/x")
    assert str(error.value) == (
        f"{bucket}/x: 2.0 MB must be downloaded to {cache}, which has 1.0 MB free; MESHWRIGHT_CACHE names another folder"
    )


def test_a_wrong_limit_is_one_line(bucket, monkeypatch):
    put(bucket, "x")
    monkeypatch.setenv("MESHWRIGHT_CACHE_GIB", "10G")
    with pytest.raises(StoreError, match=r"^MESHWRIGHT_CACHE_GIB=10G: expected a size in GiB$"):
        local_copy(bucket)


def test_of_a_run_folder_the_newest_checkpoint_is_meant(bucket):
    put(bucket, "config.toml", "checkpoints/step-00000002/a", "checkpoints/step-00000010/a")
    assert files(local_copy(bucket)) == ["checkpoints/step-00000010/a", "config.toml"]
    best = local_copy(f"{bucket}@best")
    assert best.endswith("/files@best")
    assert len(files(best.removesuffix("@best"))) == 3


def test_of_a_mirrored_run_the_newest_or_the_best_checkpoint_is_meant(bucket):
    import hashlib

    from trainer.base.system.remote_run import Lineage, RemoteFile, Save, create_save, key_of

    store = ObjectStore(bucket)
    names = ["step-00000002-aaaaaaaaaaaa", "step-00000004-bbbbbbbbbbbb"]
    for name in names:
        store.write(key_of(name, "manifest.json"), name.encode(), None)
        store.write(key_of(name, "run-1/config.toml"), b"x", None)
        of = RemoteFile(len(name), hashlib.sha256(name.encode()).hexdigest())
        run_files = {"config.toml": RemoteFile(1, hashlib.sha256(b"x").hexdigest())}
        create_save(store, Save(name=name, epoch=1, files={"manifest.json": of}, run_files=run_files))
    Lineage(1, tuple(names), (), 2).write(store, True)
    for end, step in (("", 4), ("@best", 2)):
        assert files(local_copy(bucket + end)) == [f"checkpoints/step-{step:08}/manifest.json", "config.toml"]
    store.write(key_of(names[1], "manifest.json"), names[0].encode(), None)
    ObjectStore(bucket).delete(["x"])
    remote = json.loads(os.environ["MESHWRIGHT_URLS"])
    shutil.rmtree(Path(remote[bucket]).parent)
    with pytest.raises(StoreError, match="does not match its SHA-256"):
        local_copy(bucket)

"""A run whose data, tokenizer, model and checkpoints are in a bucket, killed at random requests. The disk is lost each time.

BUCKET_KILLS=20 python -m pytest tests/faults/test_bucket.py -s      # more than the suite tries; prints each moment
"""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.faults.harness import FaultHarness, SeededRandom, TrialRun, digests, kill
from tests.object_stores import environment
from tests.s3_proxy import S3Proxy, s3_proxy
from tests.training_runs import records
from trainer.base.system.object_store import ObjectStore
from trainer.data.tokenizer.backends import DEFAULT_FILE

TRIALS = int(os.environ.get("BUCKET_KILLS", "1"))
STEPS, INTERVAL = 8, 2
MOMENTS = {
    "data": "GET /bucket/corpus/.*txt",
    "model": "GET /bucket/model/",
    "upload": "PUT .*/checkpoints/.*/(rank-|train_state|config|manifest)",
    "commit": "PUT .*/(mirror|lineage).json",
    "removal": "POST .*[?]delete",
    "lease": "PUT .*/lease.json",
    "fetch": "GET .*/checkpoints/.*/(rank-|train_state|config|manifest|run-)",
}
"""What the run does -> requests of it."""


def upload(url: str, folder: Path) -> None:
    store = ObjectStore(url)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        store.upload(path, path.relative_to(folder).as_posix())


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    harness = FaultHarness(tmp_path_factory.mktemp("bucket"), steps=STEPS, interval=INTERVAL)
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def proxy(harness, bucket, hf_model):
    with s3_proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        upload(f"{bucket}/corpus", harness.folder / "corpus")
        upload(f"{bucket}/model", hf_model)
        ObjectStore(bucket).upload(DEFAULT_FILE, "tokenizer/own.tiktoken")
        yield proxy


def flags(corpus: str, model: str, tokenizer: str) -> list[str]:
    """Flags with two saves in the store, so that old ones are removed."""
    given = {
        "data.path": corpus,
        "model.huggingface": model,
        "checkpoint.init_from": model,
        "tokenizer.path": tokenizer,
    }
    given |= {"checkpoint.keep": 1, "model.overrides": "{}"}
    return [word for key, value in given.items() for word in (f"--{key}", str(value))]


def in_bucket(mirror: str) -> list[str]:
    settings = ["--checkpoint.mirror_keep", "2", "--checkpoint.mirror_lease_s", "1"]
    urls = flags("s3://bucket/corpus", "s3://bucket/model", "s3://bucket/tokenizer/own.tiktoken")
    return [*urls, "--checkpoint.mirror", f"s3://bucket/{mirror}", *settings]


def start(harness: FaultHarness, proxy: S3Proxy, name: str) -> TrialRun:
    """Start the run on an empty disk."""
    for folder in ("runs", "cache", "stores"):
        shutil.rmtree(harness.folder / folder / (name if folder == "runs" else ""), ignore_errors=True)
    proxy.requests.clear()
    variables = environment(proxy.address) | {"MESHWRIGHT_CACHE": str(harness.folder / "cache")}
    return harness.run(name, 2, in_bucket(name), **variables)


def kill_at_request(run: TrialRun, proxy: S3Proxy, pattern: str, count: int) -> str:
    """Kill all processes of a run at a request, and return it, or "" if the run ends before.

    Args:
        run: The run.
        proxy: The proxy through which it makes its requests.
        pattern: Of the request.
        count: Number of requests with this pattern.
    """
    matching: list[str] = []

    def on_request(request: str) -> None:
        if re.search(pattern, request):
            matching.append(request)
            if len(matching) == count:
                for pid in run.pids():
                    kill(pid, signal.SIGKILL)

    proxy.on_request = on_request
    run.wait()
    proxy.on_request = lambda request: None
    return matching[count - 1] if len(matching) >= count else ""


def result_of(harness: FaultHarness, name: str) -> tuple[str, list]:
    """Digest of the last checkpoint, and the curves."""
    folder = harness.folder / "runs" / name
    rows = [(row["step"], row["loss"], row["grad_norm"]) for row in records(folder)]
    return digests(folder)[STEPS], rows


def test_a_killed_run_without_a_disk_ends_with_the_same_bits(harness, proxy, hf_model):
    local = flags(str(harness.folder / "corpus"), str(hf_model), str(DEFAULT_FILE))
    done = harness.run("local", 2, local).wait()
    assert done.code == 0, done.err
    whole = start(harness, proxy, "whole").wait()
    assert whole.code == 0, whole.err
    expected, requests = result_of(harness, "local"), [*proxy.requests]
    assert result_of(harness, "whole") == expected

    for trial in range(TRIALS):
        rng, name, moments = SeededRandom(0, 46, trial), f"killed-{trial}", []
        for moment in (rng.choice(["upload", "commit", "removal", "lease"]), rng.choice(["data", "model", "fetch"])):
            pattern = MOMENTS[moment]
            most = 8 if moment == "fetch" else sum(re.search(pattern, request) is not None for request in requests)
            run = start(harness, proxy, name)
            killed = kill_at_request(run, proxy, pattern, rng.randint(1, most))
            assert killed or moment in ("fetch", "lease"), f"the run made no request {pattern} that often"
            moments.append(f"{moment} {killed}")
        done = start(harness, proxy, name).wait()
        assert done.code == 0, (moments, done.err)
        assert result_of(harness, name) == expected, moments
        print(f"trial {trial}: {', '.join(moments)}")

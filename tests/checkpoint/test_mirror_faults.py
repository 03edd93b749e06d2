"""Faults between a run and its bucket: the run ends with the same weights, or one line says why. After a line, the same command
ends with the same weights as soon as the fault is over."""

import os
import re
import shutil
from collections.abc import Iterator

import pytest

from tests.mirrored_runs import losses, train, train_or_error, variables
from tests.s3_proxy import (
    Act,
    S3Proxy,
    cut_at,
    flipped,
    loses_answer,
    replaced_by,
    resets,
    s3_proxy,
    says,
    slow,
    truncated,
)
from tests.training_runs import in_folder
from trainer.base.system import remote_run
from trainer.base.system.object_store import ObjectStore
from trainer.base.system.remote_run import Lineage

ALWAYS = 10**9
WEIGHTS, NEWEST = "rank-00000.safetensors", "step-00000004"
DENIED, EXPIRED = says(403, "AccessDenied"), says(400, "ExpiredToken")


@pytest.fixture
def proxy(bucket) -> Iterator[S3Proxy]:
    with s3_proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        yield proxy


def through(proxy: S3Proxy) -> dict[str, str]:
    return variables() | {"AWS_ENDPOINT_URL": proxy.address}


def steps_of(store: ObjectStore) -> list[int]:
    """Steps of the intact checkpoints in the store."""
    saves = [remote_run.read_save(store, name) for name in Lineage.read(store).saves]
    return [save.step for save in saves if save is not None and not remote_run.find_damage(store, save)]


UPLOADS: dict[str, tuple[str, Act, int, int, str]] = {
    "slow": (f"PUT .*{WEIGHTS}", slow(0.2), 0, ALWAYS, ""),
    "reset": (f"PUT .*{WEIGHTS}", resets, 0, 2, ""),
    "lost answer to a file": (f"PUT .*{WEIGHTS}", loses_answer, 1, 1, ""),
    "lost answer to a commit": ("PUT .*mirror.json", loses_answer, 1, 1, ""),
    "lost answer to the history": ("PUT .*lineage.json", loses_answer, 1, 1, ""),
    "lost answer to the lease": ("PUT .*lease.json", loses_answer, 0, 1, ""),
    "500": ("PUT .*checkpoints", says(500, "InternalError"), 3, 5, ""),
    "503": ("PUT .*checkpoints", says(503, "SlowDown"), 0, 5, ""),
    "503 with Retry-After": ("PUT .*checkpoints", says(503, "SlowDown", Retry_After="1"), 0, 2, ""),
    "429": ("PUT .*checkpoints", says(429, "TooManyRequests"), 0, 2, ""),
    "a conflict that is none": ("PUT .*mirror.json", says(412, "PreconditionFailed"), 0, 1, ""),
    "a conflict of the history that is none": ("PUT .*lineage.json", says(412, "PreconditionFailed"), 1, 1, ""),
    "500 forever": ("PUT .*checkpoints", says(500, "InternalError"), 9, ALWAYS, "the store fails with status 500"),
    "reset forever": ("PUT .*checkpoints", resets, 9, ALWAYS, "cannot be written"),
    "denied": ("PUT .*checkpoints", DENIED, 9, ALWAYS, "access is denied to AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "expired": ("/bucket/", EXPIRED, 30, ALWAYS, "the credentials of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY have expired"),
    "unknown key": ("/bucket/", says(403, "InvalidAccessKeyId"), 30, ALWAYS, "the store does not know the access key of"),
    "wrong secret": ("/bucket/", says(403, "SignatureDoesNotMatch"), 30, ALWAYS, "does not belong to the access key of"),
    "clock": ("/bucket/", says(403, "RequestTimeTooSkewed"), 30, ALWAYS, "the clock of this machine differs"),
    "bucket deleted": ("/bucket/", says(404, "NoSuchBucket"), 30, ALWAYS, "there is no such bucket"),
    "removal denied": ("delete", DENIED, 0, ALWAYS, "old checkpoints stay in the store"),
}  # fmt: skip
"""Fault during a run -> pattern of the requests, what happens, how many pass, how many fail, text of the warning. "": all
checkpoints are mirrored at the end."""


@pytest.mark.parametrize("fault", UPLOADS)
def test_a_fault_during_the_run(ranks, argv, store, proxy, undisturbed, tmp_path, fault):
    proxy.pattern, proxy.fault, proxy.skip, proxy.times, text = UPLOADS[fault]
    argv = [*argv, "--checkpoint.mirror_timeout_s", "3" if text else "60", *in_folder(tmp_path / "run")]
    argv += ["--checkpoint.mirror_keep", "2"] if "removal" in fault else []
    whole, expected = undisturbed(1)
    assert ranks(1).run(train, argv, through(proxy)) == expected
    log = (tmp_path / "run" / "log.txt").read_text()
    warnings = [line for line in log.splitlines() if "warning" in line]
    if text:
        assert any(text in line for line in warnings), log
        assert (steps_of(store) == [6, 8]) == ("removal" in fault)
    else:
        assert steps_of(store) == [2, 4, 6, 8], log
    assert proxy.faults
    proxy.pattern = "(?!)"
    if text and "removal" not in fault:  # the same disk goes on, as does an empty one
        shutil.rmtree(tmp_path / "run")
        assert ranks(1).run(train, argv, through(proxy)) == expected
        assert losses(tmp_path / "run") == losses(whole)


STARTS: dict[str, tuple[str, Act, int, int, str]] = {
    "slow": (f"GET .*{WEIGHTS}", slow(0.3), 0, ALWAYS, ""),
    "503": ("GET .*lineage.json", says(503, "SlowDown"), 0, 2, ""),
    "500 for HEAD": ("HEAD", says(500), 0, 2, ""),
    "reset": (f"GET .*{WEIGHTS}", resets, 0, 2, ""),
    "cut off": (f"GET .*{WEIGHTS}", cut_at(1000), 0, 1, ""),
    "cut off again and again": (f"GET .*{WEIGHTS}", cut_at(3000), 0, 3, ""),
    "flipped": (f"GET .*{NEWEST}.*{WEIGHTS}", flipped, 0, ALWAYS, ""),
    "flipped once": (f"GET .*{WEIGHTS}", flipped, 0, 1, ""),
    "truncated": (f"GET .*{NEWEST}.*{WEIGHTS}", truncated, 0, ALWAYS, ""),
    "missing": (f"GET .*{NEWEST}.*{WEIGHTS}", says(404, "NoSuchKey"), 0, ALWAYS, ""),
    "missing commit": (f"GET .*{NEWEST}.*mirror.json", says(404, "NoSuchKey"), 0, 1, ""),
    "flipped commit": (f"GET .*{NEWEST}.*mirror.json", flipped, 0, 1, ""),
    "empty commit": (f"GET .*{NEWEST}.*mirror.json", replaced_by(b""), 0, 1, ""),
    "flipped curves": ("GET .*run-.*metrics", flipped, 0, ALWAYS, ""),
    "parts denied": ("GET .*[?]uploads", DENIED, 0, ALWAYS, ""),
    "all truncated": (f"GET .*{WEIGHTS}", truncated, 0, ALWAYS, "all 2 checkpoints are damaged"),
    "history missing": ("GET .*lineage.json", says(404, "NoSuchKey"), 0, ALWAYS, "changed by another writer"),
    "history is a page": ("GET .*lineage.json", replaced_by(b"<html>"), 0, ALWAYS, "is not the history of a run"),
    "lease missing": ("GET .*lease.json", says(404, "NoSuchKey"), 0, ALWAYS, "another run has just started there"),
    "denied": ("GET .*checkpoints", DENIED, 0, ALWAYS, "access is denied to AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "expired": ("/bucket/", EXPIRED, 0, ALWAYS, "have expired"),
    "500 forever": (f"GET .*{WEIGHTS}", says(500, "InternalError"), 0, ALWAYS, "the store fails with status 500"),
    "bucket deleted": ("/bucket/", says(404, "NoSuchBucket"), 0, ALWAYS, "there is no such bucket"),
}  # fmt: skip
"""Fault at the start on an empty disk -> as above. Text: of the line that the start ends with. "": it goes on."""


@pytest.mark.parametrize("fault", STARTS)
def test_a_fault_at_the_start_on_an_empty_disk(ranks, argv, store, proxy, undisturbed, tmp_path, fault):
    proxy.pattern, proxy.fault, proxy.skip, proxy.times, text = STARTS[fault]
    argv = [*argv, *in_folder(tmp_path / "run")]
    ranks(1).run(train, argv, variables(), 4)
    shutil.rmtree(tmp_path / "run")
    whole, expected = undisturbed(1)
    (ended,) = ranks(1).run(train_or_error, argv, through(proxy))
    assert proxy.faults
    if text:
        assert isinstance(ended, str) and text in ended and "\n" not in ended, ended
        proxy.pattern = "(?!)"
        (ended,) = ranks(1).run(train_or_error, argv, through(proxy))
    assert [ended] == expected
    if "curves" not in fault:
        assert losses(tmp_path / "run") == losses(whole)
    assert steps_of(store) == [2, 4, 6, 8]


ADDRESSES = {
    "https://127.0.0.1:{port}": "the TLS connection to 127.0.0.1:{port} fails",
    "http://127.0.0.1:9": "127.0.0.1:9 cannot be reached",
    "http://host.invalid": "the name of the host host.invalid cannot be resolved",
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_that_is_wrong_is_one_line(ranks, argv, proxy, tmp_path, address):
    port = re.sub(".*:", "", proxy.address)
    given = variables() | {"AWS_ENDPOINT_URL": address.format(port=port)}
    (line,) = ranks(1).run(train_or_error, [*argv, *in_folder(tmp_path / "run")], given)
    assert line.endswith(ADDRESSES[address].format(port=port))
    assert not list((tmp_path / "run" / "checkpoints").glob("*-*"))

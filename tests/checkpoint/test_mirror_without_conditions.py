"""A mirror in a store that ignores conditions: a real one, which overwrites what must not exist."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.mirrored_runs import losses, renewed, train, train_or_error, variables
from tests.object_stores import environment
from tests.ports import free_port
from tests.training_runs import in_folder
from trainer.base.system import remote_run
from trainer.base.system.object_store import ObjectStore
from trainer.base.system.remote_run import Lineage
from trainer.base.system.store_errors import StoreError
from trainer.checkpoint.lease import Lease, LeaseLost, honours_conditions

pytest.importorskip("nanio")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("nanio")
    (folder / "bucket").mkdir()
    port = free_port()
    given = environment(f"http://127.0.0.1:{port}")
    keys = {"NANIO_ACCESS_KEY": given["AWS_ACCESS_KEY_ID"], "NANIO_SECRET_KEY": given["AWS_SECRET_ACCESS_KEY"]}
    words = ["serve", "--data-dir", str(folder), "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    command = [
        sys.executable,
        "-c",
        "import sys; from nanio.cli import main; sys.exit(main())",
        *words,
        "--no-access-log",
    ]
    with mock.patch.dict(os.environ, given), subprocess.Popen(command, env={**os.environ, **keys}) as server:
        wait_for(ObjectStore("s3://bucket/start"))
        yield "s3://bucket"
        server.terminate()


def wait_for(store: ObjectStore) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            store.write("x", b"", None)
            return
        except StoreError:
            if time.monotonic() > end:
                raise


def test_the_store_is_named_and_the_run_continues_on_an_empty_disk(ranks, argv, store, undisturbed, tmp_path):
    argv = [*argv, *in_folder(tmp_path / "run")]
    whole, expected = undisturbed(1)
    ranks(1).run(train, argv, variables(), 4)
    shutil.rmtree(tmp_path / "run")
    assert ranks(1).run(train, argv, variables()) == expected
    assert losses(tmp_path / "run") == losses(whole)
    assert f"warning: {store.url} ignores conditions" in (tmp_path / "run" / "log.txt").read_text()


def test_a_second_run_is_stopped_by_a_live_lease(ranks, argv, store, tmp_path):
    assert not honours_conditions(store)
    first = Lease.acquire(store, 1.0, False, "")
    with renewed(first):
        (line,) = ranks(1).run(train_or_error, [*argv, *in_folder(tmp_path / "run")], variables())
    assert f"{store.url} is in use by process" in line


def test_of_two_runs_that_start_at_once_one_loses_its_lease(ranks, argv, store, undisturbed, tmp_path):
    first = Lease.acquire(store, 0.5, False, "")
    argv = [*argv, *in_folder(tmp_path / "run")]
    assert ranks(1).run(train, argv, variables()) == undisturbed(1)[1]
    with pytest.raises(LeaseLost, match=f"{store.url} was taken over by process"):
        first.renew()
    saves = [remote_run.read_save(store, name) for name in Lineage.read(store).saves]
    assert [remote_run.find_damage(store, save) for save in saves] == [""] * 4


def test_wrong_keys_are_one_line(ranks, argv, tmp_path):
    given = variables() | {"AWS_SECRET_ACCESS_KEY": "wrong"}
    (line,) = ranks(1).run(train_or_error, [*argv, *in_folder(tmp_path / "run")], given)
    assert "the secret key does not belong to the access key of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in line
    given = variables() | {"AWS_ACCESS_KEY_ID": "wrong"}
    (line,) = ranks(1).run(train_or_error, [*argv, *in_folder(tmp_path / "run")], given)
    assert "the store does not know the access key of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in line

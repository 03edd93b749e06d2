"""A run whose checkpoints are mirrored to a real S3 server, and that loses its disk."""

import json
import shutil

import pytest

from tests.mirrored_runs import losses, renewed, train, train_or_error, variables
from tests.object_stores import SECRET
from tests.training_runs import error_line, in_folder
from trainer.base.config import ConfigError
from trainer.base.config.checkpoints import resolve_checkpoint
from trainer.base.system import remote_run
from trainer.base.system.object_store import ObjectStore
from trainer.base.system.remote_run import Lineage
from trainer.checkpoint import lease
from trainer.checkpoint.lease import Lease, LeaseLost
from trainer.checkpoint.manifest import find_damage


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_loses_its_disk_ends_with_the_same_bits(ranks, argv, store, undisturbed, tmp_path, size):
    argv = [*argv, *in_folder(tmp_path / "run")]
    whole, expected = undisturbed(size)
    ranks(size).run(train, argv, variables(), 4)
    shutil.rmtree(tmp_path / "run")
    assert ranks(size).run(train, argv, variables()) == expected
    assert losses(tmp_path / "run") == losses(whole)
    assert [remote_run.step_of_name(name) for name in Lineage.read(store).saves] == [2, 4, 6, 8]
    assert not [item.key for item in store.list() if SECRET.encode() in store.read(item.key)[0]]
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(written) > 10 and not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_a_folder_can_be_the_mirror(ranks, plain, undisturbed, tmp_path):
    argv = [*plain, "--checkpoint.mirror", f"file://{tmp_path}/mirror", *in_folder(tmp_path / "run")]
    ranks(1).run(train, argv, {}, 4)
    shutil.rmtree(tmp_path / "run")
    assert ranks(1).run(train, argv, {}) == undisturbed(1)[1]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "fetching step-00000004" in log and "warning" not in log
    assert_intact(ObjectStore(f"file://{tmp_path}/mirror"))


TWO_NODES = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def test_each_node_uploads_the_files_of_its_ranks(ranks, argv, store, undisturbed, tmp_path):
    argv = [*argv, *in_folder(tmp_path / "run")]
    ranks(2).run(train, argv, variables() | TWO_NODES, 4)
    names = Lineage.read(store).saves
    shares = [json.loads(store.read(remote_run.key_of(name, "shares/1-of-2.json"))[0]) for name in names]
    assert [list(share) for share in shares] == [["rank-00001.safetensors"]] * 2
    shutil.rmtree(tmp_path / "run")
    assert ranks(2).run(train, argv, variables() | TWO_NODES) == undisturbed(2)[1]
    assert_intact(store)


def test_rank_0_uploads_what_an_earlier_start_of_several_nodes_has_left(
    ranks, plain, argv, store, undisturbed, tmp_path
):
    folder = in_folder(tmp_path / "run")
    ranks(2).run(train, [*plain, *folder], TWO_NODES, 4)
    assert ranks(2).run(train, [*argv, *folder], variables() | TWO_NODES) == undisturbed(2)[1]
    saves = [remote_run.read_save(store, name) for name in Lineage.read(store).saves]
    assert [save.step for save in saves] == [4, 6, 8]
    assert [remote_run.find_damage(store, save) for save in saves] == [""] * 3


def test_parts_of_an_upload_that_was_cut_off_are_removed(ranks, argv, store, tmp_path):
    import boto3

    client, key = boto3.client("s3"), f"{store.url.removeprefix('s3://bucket/')}/checkpoints/x/rank-00000.safetensors"
    upload = client.create_multipart_upload(Bucket="bucket", Key=key)["UploadId"]
    client.upload_part(Bucket="bucket", Key=key, UploadId=upload, PartNumber=1, Body=b"part")
    ranks(1).run(train, [*argv, *in_folder(tmp_path / "run")], variables(), 2)
    assert "Uploads" not in client.list_multipart_uploads(Bucket="bucket", Prefix=key)
    assert "removed the parts of 1 upload that were cut off" in (tmp_path / "run" / "log.txt").read_text()


def test_the_best_checkpoint_is_fetched_when_it_is_asked_for(ranks, argv, store, tmp_path):
    flags = ["--evaluation.interval_steps", "2", "--evaluation.keep_best_on", "held_out", "--optimizer.lr", "1"]
    argv = [*argv, *flags, "--checkpoint.keep", "1", *in_folder(tmp_path / "run")]
    ranks(1).run(train, argv, variables())
    best = Lineage.read(store).best_step
    assert 0 < best < 8, "the loss rises with this learning rate"
    shutil.rmtree(tmp_path / "run")
    ranks(1).run(train, [*argv, "--training.steps", "9"], variables())
    checkpoints = tmp_path / "run" / "checkpoints"
    assert not (checkpoints / f"step-{best:08}").exists()
    chosen = resolve_checkpoint(f"{tmp_path}/run@best")
    assert chosen == checkpoints / f"step-{best:08}" and not find_damage(chosen)


def test_old_checkpoints_are_removed_in_the_store_and_on_the_disk(ranks, argv, store, tmp_path):
    flags = ["--checkpoint.keep", "1", "--checkpoint.mirror_keep", "2", "--checkpoint.keep_interval_steps", "4"]
    ranks(1).run(train, [*argv, *flags, *in_folder(tmp_path / "run")], variables())
    assert [remote_run.step_of_name(name) for name in Lineage.read(store).saves] == [4, 6, 8]
    folders = {item.key.split("/")[1].rpartition("-")[0] for item in store.list("checkpoints/")}
    assert folders == {f"step-{step:08}" for step in (4, 6, 8)}
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == [
        "step-00000004",
        "step-00000008",
    ]


def test_a_damaged_checkpoint_in_the_store_is_not_resumed_from(ranks, argv, store, undisturbed, tmp_path):
    argv = [*argv, *in_folder(tmp_path / "run")]
    ranks(1).run(train, argv, variables(), 4)
    shutil.rmtree(tmp_path / "run")
    key = remote_run.key_of(Lineage.read(store).saves[-1], "rank-00000.safetensors")
    content = bytearray(store.read(key)[0])
    content[-1] ^= 1
    store.write(key, bytes(content), None)
    assert ranks(1).run(train, argv, variables()) == undisturbed(1)[1]
    assert "ignoring a damaged checkpoint" in (tmp_path / "run" / "log.txt").read_text()
    assert_intact(store)


def assert_intact(store):
    saves = [remote_run.read_save(store, name) for name in Lineage.read(store).saves]
    assert [remote_run.find_damage(store, save) for save in saves] == [""] * 4


def test_a_damaged_manifest_of_the_store_is_not_believed(ranks, argv, store, undisturbed, tmp_path):
    argv = [*argv, *in_folder(tmp_path / "run")]
    ranks(1).run(train, argv, variables(), 4)
    shutil.rmtree(tmp_path / "run")
    store.write(remote_run.key_of(Lineage.read(store).saves[-1]), b"{}", None)
    assert ranks(1).run(train, argv, variables()) == undisturbed(1)[1]
    assert "ignoring a damaged checkpoint" in (tmp_path / "run" / "log.txt").read_text()
    assert_intact(store)


def test_a_discarded_history_never_comes_back(ranks, argv, store, tmp_path):
    argv = [*argv, *in_folder(tmp_path / "run")]
    ranks(1).run(train, argv, variables())
    back = [*argv, "--checkpoint.load_step", "4", "--optimizer.lr", "1e-3"]
    before = Lineage.read(store).saves
    ranks(1).run(train, back, variables(), 6)
    names = Lineage.read(store).saves
    assert [remote_run.step_of_name(name) for name in names] == [2, 4, 6]
    assert names[:2] == before[:2] and names[2] != before[2]
    shutil.rmtree(tmp_path / "run")
    ranks(1).run(train, back, variables())
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "(step 6, saved by 1 rank)" in log, "it does not roll back again"


def test_histories_that_differ_are_one_line(ranks, argv, plain, store, tmp_path):
    ranks(1).run(train, [*argv, *in_folder(tmp_path / "a")], variables(), 4)
    ranks(1).run(train, [*plain, *in_folder(tmp_path / "b")], {}, 6)
    line = error_of(ranks, [*argv, *in_folder(tmp_path / "b")])
    assert line == (
        f"--checkpoint.mirror {store.url}: {store.url} has checkpoints that this disk never had (step 4), and "
        f"{tmp_path}/b/checkpoints has others (step 6): two runs wrote them. Remove or rename one of the two"
    )


def error_of(ranks, argv):
    (line,) = ranks(1).run(train_or_error, argv, variables())
    return line


def test_an_old_disk_that_comes_back_continues_from_the_store(ranks, argv, undisturbed, tmp_path):
    argv = [*argv, *in_folder(tmp_path / "run")]
    ranks(1).run(train, argv, variables(), 2)
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    ranks(1).run(train, argv, variables(), 6)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "old").rename(tmp_path / "run")
    assert ranks(1).run(train, argv, variables()) == undisturbed(1)[1]
    assert "step-00000006" in (tmp_path / "run" / "log.txt").read_text()


# ---------------------------------------------------------------- the lease


def test_a_live_lease_stops_a_second_run(store):
    first = Lease.acquire(store, 2.0, True, "")
    with renewed(first), pytest.raises(ConfigError, match="is in use by process"):
        Lease.acquire(store, 2.0, True, "")
    first.release()
    second = Lease.acquire(store, 60.0, True, "")
    assert second.owner != first.owner


def test_a_dead_lease_is_taken_over_and_its_owner_writes_no_more(store):
    dead = Lease.acquire(store, 0.5, True, "")
    Lease.acquire(store, 0.5, True, "")
    with pytest.raises(LeaseLost, match="was taken over by process"):
        dead.require()
    with pytest.raises(LeaseLost):
        dead.renew()


def test_the_lease_of_a_dead_process_of_this_disk_is_taken_over_at_once(store):
    dead = Lease.acquire(store, 1e6, True, "")
    assert Lease.acquire(store, 1e6, True, dead.owner).owner != dead.owner


def test_a_store_that_ignores_conditions_is_noticed(store, monkeypatch):
    assert lease.honours_conditions(store)
    original = ObjectStore.write
    monkeypatch.setattr(ObjectStore, "write", lambda self, key, content, version: original(self, key, content, None))
    assert not lease.honours_conditions(store)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--checkpoint.mirror", "s3:/b"], "expected a URL such as s3://BUCKET/PREFIX"),
        (["--checkpoint.mirror", "s3a://b/x"], "is a URL of another program; write s3://BUCKET/PREFIX"),
        (["--checkpoint.mirror", "runs/mirror"], "expected a URL such as s3://BUCKET/PREFIX"),
        (["--checkpoint.mirror", "s3://b/*"], "must contain none of *, ? and [, and must not end in @best"),
        (["--checkpoint.mirror", "s3://b/x@best"], "must contain none of *, ? and [, and must not end in @best"),
        (["--checkpoint.mirror", "s3://b/../x"], "must not contain the names . and .."),
        (["--checkpoint.mirror_keep", "2"], "has an effect only with [checkpoint] mirror"),
    ],
)
def test_a_wrong_setting_is_one_line(ranks, tiny, tmp_path, flags, message):
    (line,) = ranks(1).run(error_line, [*tiny, *flags, *in_folder(tmp_path / "run")])
    assert message in line and line.startswith(flags[0])


def test_a_place_that_holds_something_else_is_named(ranks, argv, store, tmp_path):
    argv = [*argv, *in_folder(tmp_path / "run")]
    store.write("notes.txt", b"mine", "")
    ranks(1).run(train, argv, variables(), 2)
    assert f"{store.url} holds other objects, such as notes.txt" in (tmp_path / "run" / "log.txt").read_text()
    at_object = [*argv, "--checkpoint.mirror", f"{store.url}/notes.txt"]
    assert error_of(ranks, at_object).endswith("notes.txt: is an object; choose another prefix")
    store.write("lease.json", b"garbage", None)
    assert error_of(ranks, argv).endswith("lease.json is not the lease of a run; choose another prefix")


def test_a_missing_bucket_is_one_line(ranks, argv, tmp_path):
    argv = [*argv, "--checkpoint.mirror", "s3://no-bucket/x", *in_folder(tmp_path / "run")]
    assert "cannot be written: there is no such bucket" in error_of(ranks, argv)


def test_the_manifest_of_the_store_names_every_file_with_its_hash(ranks, argv, store, tmp_path):
    ranks(1).run(train, [*argv, *in_folder(tmp_path / "run")], variables(), 2)
    (name,) = Lineage.read(store).saves
    content = json.loads(store.read(remote_run.key_of(name))[0])
    local = {path.name for path in (tmp_path / "run" / "checkpoints" / "step-00000002").iterdir()}
    assert content["files"].keys() == local
    assert all(len(file["sha256"]) == 64 for file in content["files"].values())
    assert {"config.toml", "metrics.jsonl", "environment.json"} <= content["run_files"].keys()

"""Commits, retention and loading of checkpoints."""

import errno
import json
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from trainer.checkpoint import commit, manifest, resume, tensor_files
from trainer.checkpoint.commit import SaveFailed, SaveRequest
from trainer.tools.testing.ranks import RankError

STATE = {"step": 0, "cursor": 0, "tokens_seen": 0, "world_size": 1, "fingerprint": {"seed": 0}}
STATE |= {"skipped_samples": [[3, 5]], "rollbacks": 0, "rng": [], "mixture": [], "best": []}
TENSORS = {"model/w": torch.full((4,), 0.0), "model/b": torch.arange(3)}


def save(folder, step, value=1.0, keep=0, keep_interval_steps=0, tensors=None, keep_best=0):
    """Save on all ranks, as the trainer does."""
    tensors = tensors or TENSORS | {"model/w": torch.full((4,), float(value))}
    state = STATE | {"step": step}
    files = {"train_state.json": json.dumps(state).encode(), "config.toml": b"[run]\n"}
    request = SaveRequest(folder, step, files, {"step": step}, keep, keep_interval_steps, keep_best)
    staging_dir = commit.make_staging_dir(request.final)
    single_rank = dist.get_world_size() == 1
    plan = tensor_files.local_save_plan(tensors)
    commit.save(request, staging_dir, plan, tensors, None if single_rank else dist.group.WORLD)
    return request.final


def load(path, tensors=None):
    tensors = tensors or {name: torch.zeros_like(t) for name, t in TENSORS.items()}
    commit.load(path, tensors, {"model/w", "model/b"})
    return {name: t.tolist() for name, t in tensors.items()}


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def damage(path, file="rank-00000.safetensors"):
    content = bytearray((path / file).read_bytes())
    content[-1] ^= 1
    (path / file).write_bytes(content)


def saved_and_loaded(folder):
    path = save(folder, 3, 7)
    return path.name, names(folder), load(path), resume.find_resume_point(folder)


@pytest.mark.parametrize("size", [1, 2])
def test_load_returns_what_was_saved_and_no_other_file_remains(ranks, tmp_path, size):
    folder = tmp_path / "c"
    for name, files, loaded, point in ranks(size).run(saved_and_loaded, folder):
        assert (name, files) == ("step-00000003", ["step-00000003"])
        assert loaded == {"model/w": [7.0] * 4, "model/b": [0, 1, 2]}
        assert point.path == folder / name and point.state.step == 3 and not point.rollback
    files = set(manifest.read(folder / name).files)
    assert files == {"index.json", "train_state.json", "config.toml"} | {
        f"rank-{r:05d}.safetensors" for r in range(size)
    }


def test_rank_files_are_plain_safetensors(ranks, tmp_path):
    path = ranks(1).run(save, tmp_path, 3, 7)[0]
    assert {n: t.tolist() for n, t in load_file(path / "rank-00000.safetensors").items()} == {
        "model/w": [7.0] * 4,
        "model/b": [0, 1, 2],
    }


def fails(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device", "shard")


def with_failing(name, folder, step):
    """Save while a function of the checkpoint modules fails on the last rank; return the error."""
    module = {"write_safetensors": tensor_files}.get(name, manifest)
    original = getattr(module, name)
    if dist.get_rank() == dist.get_world_size() - 1:
        setattr(module, name, fails)
    try:
        save(folder, step)
    except SaveFailed as error:
        return str(error)
    finally:
        setattr(module, name, original)


@pytest.mark.parametrize("size", [1, 2])
def test_failure_on_one_rank_is_raised_on_all_ranks_and_keeps_earlier_checkpoints(ranks, tmp_path, size):
    ranks(size).run(save, tmp_path, 3)
    errors = ranks(size).run(with_failing, "write_safetensors", tmp_path, 6)
    assert errors == [f"step 6 could not be saved: rank {size - 1}: shard: No space left on device"] * size
    assert names(tmp_path) == ["step-00000003"]
    ranks(size).run(save, tmp_path, 6)
    assert names(tmp_path) == ["step-00000003", "step-00000006"]


def test_failure_to_write_the_manifest_leaves_no_checkpoint(ranks, tmp_path):
    assert "No space left" in ranks(1).run(with_failing, "write", tmp_path, 6)[0]
    assert names(tmp_path) == []


def transient_failures(folder):
    """Fail the first two writes of a rank's file with a transient error, and skip the delays."""
    original, sleep = tensor_files.write_safetensors, tensor_files.time.sleep
    tries = []

    def write(*args):
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.EIO, "Input/output error", "shard")
        return original(*args)

    tensor_files.write_safetensors, tensor_files.time.sleep = write, lambda s: None
    try:
        return load(save(folder, 3, 5))["model/w"], len(tries)
    finally:
        tensor_files.write_safetensors, tensor_files.time.sleep = original, sleep


def test_transient_errors_are_retried(ranks, tmp_path):
    assert ranks(1).run(transient_failures, tmp_path) == [([5.0] * 4, 3)]


def test_folders_of_interrupted_saves_are_ignored_and_removed(ranks, tmp_path):
    for name in ("step-00000006.tmp-0a1b2c3d", "step-00000003.tmp-1b2c3d4e"):
        (tmp_path / name).mkdir()
    assert ranks(1).run(resume.find_resume_point, tmp_path) == [None]
    ranks(1).run(save, tmp_path, 9)
    assert names(tmp_path) == ["step-00000009"]


# ------------------------------------------------------------ saving a step again


def test_saving_a_step_again_replaces_it(ranks, tmp_path):
    ranks(1).run(save, tmp_path, 6, 1)
    path = ranks(1).run(save, tmp_path, 6, 2)[0]
    assert names(tmp_path) == ["step-00000006"]
    assert ranks(1).run(load, path)[0]["model/w"] == [2.0] * 4


def test_replaced_checkpoint_is_used_if_the_replacement_was_interrupted(ranks, tmp_path):
    ranks(1).run(save, tmp_path, 3)
    path = ranks(1).run(save, tmp_path, 6, 1)[0]
    path.rename(tmp_path / "step-00000006.old")
    assert ranks(1).run(resume.find_resume_point, tmp_path)[0].path.name == "step-00000006.old"
    ranks(1).run(save, tmp_path, 6, 2)
    assert names(tmp_path) == ["step-00000003", "step-00000006"]


def test_new_checkpoint_is_preferred_to_the_replaced_one(ranks, tmp_path):
    path = ranks(1).run(save, tmp_path, 6, 1)[0]
    shutil.copytree(path, tmp_path / "step-00000006.old")
    assert ranks(1).run(resume.find_resume_point, tmp_path)[0].path == path
    ranks(1).run(save, tmp_path, 6, 2)
    assert names(tmp_path) == ["step-00000006"]


# ------------------------------------------------------------ retention


def test_newest_checkpoints_and_multiples_of_the_interval_are_kept(ranks, tmp_path):
    (tmp_path / "notes").mkdir()
    for step in range(1, 10):
        ranks(1).run(save, tmp_path, step, 1, 2, 4)
    assert names(tmp_path) == ["notes", "step-00000004", "step-00000008", "step-00000009"]


def test_incomplete_checkpoints_do_not_count_towards_keep(ranks, tmp_path):
    for step in (1, 2, 3):
        ranks(1).run(save, tmp_path, step)
    for step in (2, 3):
        (tmp_path / f"step-{step:08d}" / "index.json").unlink()
    ranks(1).run(save, tmp_path, 4, 1, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003", "step-00000004"]
    ranks(1).run(save, tmp_path, 5, 1, 2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]


def test_new_checkpoint_is_kept_and_found_although_damaged_ones_are_newer(ranks, tmp_path):
    """The checkpoint of step 30 is damaged; the run resumed from step 20 and saved step 25."""
    for step in (10, 20, 30):
        ranks(1).run(save, tmp_path, step)
    damage(tmp_path / "step-00000030")
    ranks(1).run(save, tmp_path, 25, 1, 1)
    assert names(tmp_path) == ["step-00000025", "step-00000030"]
    assert ranks(1).run(resume.find_resume_point, tmp_path)[0].path.name == "step-00000025"


def test_failed_removal_is_a_warning(monkeypatch, tmp_path):
    messages = []
    monkeypatch.setattr(commit.console, "warning", messages.append)
    monkeypatch.setattr(commit, "latest_per_step", fails)
    commit.prune(SaveRequest(tmp_path, 9, {}, {}, 1, 0, 0))
    assert messages == ["old checkpoints were not removed: shard: No space left on device"]


# ------------------------------------------------------------ loading


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"model/w": torch.zeros(4), "model/c": torch.zeros(1)}, "model/c is missing"),
        ({"model/w": torch.zeros(5)}, r"model/w has shape \[4\], expected \[5\]"),
        ({"model/w": torch.zeros(4).bfloat16()}, "model/w has dtype torch.float32, expected torch.bfloat16"),
    ],
)
def test_mismatched_tensors_are_rejected_by_name(ranks, tmp_path, tensors, problem):
    path = ranks(1).run(save, tmp_path, 1)[0]
    with pytest.raises(RankError, match=f"cannot load {path}: {problem}"):
        ranks(1).run(load, path, tensors)


def test_unexpected_tensors_are_rejected_by_name(ranks, tmp_path):
    path = ranks(1).run(save, tmp_path, 1, 1, 0, 0, {"model/w": torch.zeros(4), "model/x/moment": torch.zeros(2)})[0]
    with pytest.raises(RankError, match="model/x/moment is not a tensor of this run"):
        ranks(1).run(load, path, {"model/w": torch.zeros(4)})

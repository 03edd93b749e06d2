"""Committed or not there at all."""

import json

import pytest
import torch

from trainer import checkpoint
from trainer.config import ConfigError


def save(folder, step, value):
    tensors = {"model/w": torch.full((4,), float(value)), "model/b": torch.arange(3)}
    return checkpoint.save(folder, step, tensors, {"step": step}, "[run]\n")


def load(path):
    tensors = {"model/w": torch.zeros(4), "model/b": torch.zeros(3, dtype=torch.int64)}
    checkpoint.load(path, tensors)
    return tensors["model/w"].tolist(), tensors["model/b"].tolist()


def saved_and_loaded(folder):
    path = save(folder, 3, 7)
    names = sorted(p.name for p in folder.iterdir())
    manifest = json.loads((path / "manifest.json").read_text())
    return path.name, names, load(path), manifest["files"], checkpoint.keys(path)


def test_what_was_saved_is_loaded_and_nothing_else_is_left(ranks, tmp_path):
    name, names, loaded, files, keys = ranks(1).run(saved_and_loaded, tmp_path / "c")[0]
    assert name == "step-00000003"
    assert names == [name]
    assert loaded == ([7.0] * 4, [0, 1, 2])
    assert files == {p.name: p.stat().st_size for p in (tmp_path / "c" / name).iterdir() if p.name != "manifest.json"}
    assert {"train_state.json", "config.toml", ".metadata"} < set(files)
    assert keys == {"model/w", "model/b"}


def interrupted(folder):
    """The end of a save fails; then it is tried again."""
    save(folder, 3, 1)
    original, checkpoint._sync = checkpoint._sync, fail
    try:
        save(folder, 6, 2)
    except OSError:
        pass
    finally:
        checkpoint._sync = original
    after_failure = checkpoint.newest(folder).name, sorted(p.name for p in folder.iterdir())
    save(folder, 6, 3)
    return after_failure, checkpoint.newest(folder).name, load(checkpoint.newest(folder))[0]


def fail(folder):
    raise OSError("the disk is gone")


def test_an_interrupted_save_is_not_there_and_does_not_stand_in_the_way(ranks, tmp_path):
    after_failure, newest, weights = ranks(1).run(interrupted, tmp_path)[0]
    assert after_failure == ("step-00000003", ["step-00000003", "step-00000006.saving"])
    assert (newest, weights) == ("step-00000006", [3.0] * 4)


def saved_twice(folder):
    save(folder, 3, 1)
    save(folder, 3, 2)
    return sorted(p.name for p in folder.iterdir()), load(checkpoint.newest(folder))[0]


def test_a_step_can_be_saved_again(ranks, tmp_path):
    assert ranks(1).run(saved_twice, tmp_path)[0] == (["step-00000003"], [2.0] * 4)


def commit(folder, name, **files):
    (folder / name).mkdir()
    for file, size in files.items():
        (folder / name / file).write_bytes(bytes(size))
    (folder / name / "manifest.json").write_text(json.dumps({"version": 1, "files": files}))


def test_other_folders_are_ignored(tmp_path):
    assert checkpoint.newest(tmp_path / "none") is None
    for name in ("step-00000009-backup", "step-x", "step-00000012.saving", "step-7"):
        commit(tmp_path, name)
    (tmp_path / "notes.txt").touch()
    assert checkpoint.newest(tmp_path) is None
    for step in (8, 100_000_000):
        commit(tmp_path, f"step-{step:08d}", shard=5)
    assert checkpoint.newest(tmp_path).name == "step-100000000"
    assert checkpoint.passed_over(tmp_path) == []


def test_an_incomplete_checkpoint_is_passed_over_and_told(tmp_path):
    for step in (1, 2, 3, 4):
        commit(tmp_path, f"step-{step:08d}", shard=5)
    (tmp_path / "step-00000002" / "shard").write_bytes(bytes(4))
    (tmp_path / "step-00000003" / "shard").unlink()
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    assert checkpoint.newest(tmp_path).name == "step-00000001"
    assert checkpoint.passed_over(tmp_path) == [
        f"{tmp_path}/step-00000004: no readable manifest.json",
        f"{tmp_path}/step-00000003: shard is missing",
        f"{tmp_path}/step-00000002: shard has 4 bytes of 5",
    ]


def test_differences_are_told_all_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        checkpoint.require_same(tmp_path, {"a": 1, "b": "x", "c": None}, {"a": 2, "b": "x", "d": True})
    assert error.value.rule == (
        f"cannot resume from {tmp_path}: a was 1, is 2; d was null, is true; another --run.name starts a new run"
    )
    checkpoint.require_same(tmp_path, {"a": [1, 2]}, {"a": [1, 2]})

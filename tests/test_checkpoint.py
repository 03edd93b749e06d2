"""Committed or not there at all."""

import json

import pytest
import torch

from scripts.gloo_pool import RankError
from trainer import checkpoint
from trainer.config import ConfigError


def save(folder, step, value):
    tensors = {"model/w": torch.full((4,), float(value)), "model/b": torch.arange(3)}
    return checkpoint.save(folder, step, tensors, {"step": step, "cursor": 0, "identity": {}}, "[run]\n")


def load(path):
    tensors = {"model/w": torch.zeros(4), "model/b": torch.zeros(3, dtype=torch.int64)}
    checkpoint.load(path, tensors)
    return tensors["model/w"].tolist(), tensors["model/b"].tolist()


def saved_and_loaded(folder):
    path = save(folder, 3, 7)
    names = sorted(p.name for p in folder.iterdir())
    manifest = json.loads((path / "manifest.json").read_text())
    return path.name, names, load(path), manifest["files"], checkpoint.find(folder)


@pytest.mark.parametrize("size", [1, 2])
def test_what_was_saved_is_loaded_and_nothing_else_is_left(ranks, tmp_path, size):
    folder = tmp_path / "c"
    for name, names, loaded, files, found in ranks(size).run(saved_and_loaded, folder):
        assert name == "step-00000003"
        assert names == [name]
        assert loaded == ([7.0] * 4, [0, 1, 2])
        assert files == {p.name: p.stat().st_size for p in (folder / name).iterdir() if p.name != "manifest.json"}
        assert {"train_state.json", "config.toml", ".metadata"} < set(files)
        assert found == checkpoint.Saved(folder / name, {"step": 3, "cursor": 0, "identity": {}})


def interrupted(folder):
    """The end of a save fails; then another step is saved."""
    save(folder, 3, 1)
    original, checkpoint.write_durably = checkpoint.write_durably, fail
    try:
        save(folder, 6, 2)
    except OSError:
        pass
    finally:
        checkpoint.write_durably = original
    after_failure = checkpoint.find(folder).path.name, sorted(p.name for p in folder.iterdir())
    save(folder, 9, 3)
    return after_failure, sorted(p.name for p in folder.iterdir()), load(checkpoint.find(folder).path)[0]


def fail(path, text):
    raise OSError("the disk is gone")


def test_an_interrupted_save_is_not_there_and_is_cleared_by_the_next(ranks, tmp_path):
    after_failure, names, weights = ranks(1).run(interrupted, tmp_path)[0]
    assert after_failure == ("step-00000003", ["step-00000003", "step-00000006.saving"])
    assert (names, weights) == (["step-00000003", "step-00000009"], [3.0] * 4)


def broken_and_saved_again(folder):
    save(folder, 3, 1)
    path = save(folder, 6, 1)
    (path / "train_state.json").unlink()
    found = checkpoint.find(folder).path.name
    save(folder, 6, 2)
    return found, sorted(p.name for p in folder.iterdir()), load(checkpoint.find(folder).path)[0]


def test_a_broken_checkpoint_is_replaced_when_its_step_comes_again(ranks, tmp_path):
    expected = ("step-00000003", ["step-00000003", "step-00000006"], [2.0] * 4)
    assert ranks(1).run(broken_and_saved_again, tmp_path)[0] == expected


def test_a_run_whose_checkpoints_are_all_broken_does_not_start_afresh(ranks, tmp_path):
    for step in (1, 2):
        commit(tmp_path, f"step-{step:08d}")
        (tmp_path / f"step-{step:08d}" / "manifest.json").unlink()
    with pytest.raises(RankError) as error:
        ranks(2).run(checkpoint.find, tmp_path)
    assert f"{tmp_path}: none of 2 checkpoints is complete; another --run.name starts a new run" in str(error.value)


def commit(folder, name, **files):
    (folder / name).mkdir()
    for file, size in files.items():
        (folder / name / file).write_bytes(bytes(size))
    (folder / name / "train_state.json").write_text('{"step": 1, "cursor": 0, "identity": {}}')
    (folder / name / "manifest.json").write_text(json.dumps({"version": 1, "files": files}))


def test_other_folders_are_ignored(ranks, tmp_path):
    assert ranks(1).run(checkpoint.find, tmp_path / "none") == [None]
    for name in ("step-00000009-backup", "step-x", "step-00000012.saving", "step-7"):
        commit(tmp_path, name)
    (tmp_path / "notes.txt").touch()
    assert ranks(1).run(checkpoint.find, tmp_path) == [None]
    for step in (8, 100_000_000):
        commit(tmp_path, f"step-{step:08d}", shard=5)
    assert [found.path.name for found in ranks(2).run(checkpoint.find, tmp_path)] == ["step-100000000"] * 2


def found_and_told(folder):
    told = []
    original, checkpoint.logging.warning = checkpoint.logging.warning, told.append
    try:
        return checkpoint.find(folder).path.name, told
    finally:
        checkpoint.logging.warning = original


def test_an_incomplete_checkpoint_is_passed_over_and_told(ranks, tmp_path):
    for step in (1, 2, 3, 4):
        commit(tmp_path, f"step-{step:08d}", shard=5)
    (tmp_path / "step-00000002" / "shard").write_bytes(bytes(4))
    (tmp_path / "step-00000003" / "shard").unlink()
    (tmp_path / "step-00000004" / "manifest.json").write_text("[]")
    commit(tmp_path, "step-00000005")
    (tmp_path / "step-00000005" / "train_state.json").write_text("[]")
    assert ranks(1).run(found_and_told, tmp_path)[0] == (
        "step-00000001",
        [
            f"passed over {tmp_path}/step-00000005: train_state.json lacks the state of the run",
            f"passed over {tmp_path}/step-00000004: no readable manifest.json",
            f"passed over {tmp_path}/step-00000003: shard is missing",
            f"passed over {tmp_path}/step-00000002: shard has 4 bytes of 5",
        ],
    )


def test_differences_are_told_all_at_once(tmp_path):
    saved = checkpoint.Saved(tmp_path, {"identity": {"a": 1, "b": "x", "c": [1, 2]}})
    with pytest.raises(ConfigError) as error:
        checkpoint.require_same(saved, {"a": 2, "b": "x", "d": True})
    assert error.value.rule == (
        f"cannot resume from {tmp_path}: a was 1, is 2; d was null, is true; another --run.name starts a new run"
    )
    checkpoint.require_same(saved, {"b": "x", "c": (1, 2)})

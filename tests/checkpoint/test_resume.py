"""Selection of the checkpoint to resume from, and rollbacks."""

import json
import shutil

import pytest

from tests.checkpoint.test_commit import STATE, damage, names, save
from trainer.base.config import ConfigError
from trainer.checkpoint import resume
from trainer.runtime.distributed import run_on_rank_0
from trainer.state import TrainState
from trainer.tools.testing.ranks import RankError

# ------------------------------------------------------------ finding


def find_with_warnings(folder, *args):
    messages = []
    original, resume.console.warning = resume.console.warning, messages.append
    try:
        return resume.find_resume_point(folder, *args), messages
    finally:
        resume.console.warning = original


@pytest.mark.parametrize("size", [1, 2])
def test_damaged_checkpoints_are_ignored_with_a_warning_on_every_rank(ranks, tmp_path, size):
    for step in (1, 2, 3, 4, 5):
        ranks(size).run(save, tmp_path, step)
    damage(tmp_path / "step-00000002", f"rank-{size - 1:05d}.safetensors")
    (tmp_path / "step-00000003" / "index.json").unlink()
    (tmp_path / "step-00000004" / "manifest.json").write_text("[]")
    (tmp_path / "step-00000005" / "notes.txt").touch()
    for point, messages in ranks(size).run(find_with_warnings, tmp_path):
        assert point.path.name == "step-00000001"
        assert messages == [
            f"ignoring damaged checkpoint {tmp_path}/step-00000005: notes.txt is not in the manifest",
            f"ignoring damaged checkpoint {tmp_path}/step-00000004: manifest.json is not a valid manifest",
            f"ignoring damaged checkpoint {tmp_path}/step-00000003: index.json is missing",
            f"ignoring damaged checkpoint {tmp_path}/step-00000002: rank-{size - 1:05d}.safetensors does not match its hash",
        ]


def test_a_checkpoint_under_the_name_of_another_step_is_ignored(ranks, tmp_path):
    ranks(1).run(save, tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000009")
    point, messages = ranks(1).run(find_with_warnings, tmp_path)[0]
    assert point.path.name == "step-00000001"
    assert messages == [
        f"ignoring damaged checkpoint {tmp_path}/step-00000009: train_state.json contains the state of step 1"
    ]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_scratch(ranks, tmp_path):
    for step in (1, 2):
        damage(ranks(1).run(save, tmp_path, step)[0])
    with pytest.raises(RankError) as error:
        ranks(2).run(resume.find_resume_point, tmp_path)
    assert f"{tmp_path}: all 2 checkpoints are damaged; set another --run.name for a new run" in str(error.value)


def test_unreadable_folder_is_an_error(ranks, tmp_path):
    """Otherwise the run would start from scratch and delete its metrics."""
    (tmp_path / "checkpoints").write_text("")  # root may read any folder
    for size in (1, 2):
        with pytest.raises(RankError, match=r"checkpoints cannot be read \(Not a directory\)"):
            ranks(size).run(resume.find_resume_point, tmp_path / "checkpoints")


def test_other_names_are_ignored(ranks, tmp_path):
    assert ranks(1).run(resume.find_resume_point, tmp_path / "none") == [None]
    path = ranks(1).run(save, tmp_path, 8)[0]
    for name in ("step-00000009-backup", "step-x", "step-00000012.tmp-0a1b2c3d", "step-9", "discarded-1"):
        shutil.copytree(path, tmp_path / name)
    (tmp_path / "step-00000010").touch()
    (tmp_path / "notes.txt").touch()
    assert [point.path.name for point in ranks(2).run(resume.find_resume_point, tmp_path)] == ["step-00000008"] * 2


# ------------------------------------------------------------ rolling back


def rolled_back(folder, step):
    saved = resume.find_resume_point(folder, step)
    if saved.rollback:
        run_on_rank_0(lambda: resume.discard_newer(saved))
    return saved.path.name, saved.rollback


def test_rollback_discards_newer_checkpoints_once(ranks, tmp_path):
    for step in (2, 4, 6, 8):
        ranks(2).run(save, tmp_path, step)
    assert ranks(2).run(rolled_back, tmp_path, 4) == [("step-00000004", True)] * 2
    assert names(tmp_path) == ["discarded-1", "lineage.json", "step-00000002", "step-00000004"]
    assert names(tmp_path / "discarded-1") == ["step-00000006", "step-00000008"]
    ranks(1).run(save, tmp_path, 5)
    # The same command resumes the newest checkpoint, as after a crash.
    assert ranks(1).run(rolled_back, tmp_path, 4) == [("step-00000005", False)]
    assert ranks(1).run(rolled_back, tmp_path, 2) == [("step-00000002", True)]
    assert names(tmp_path / "discarded-2") == ["step-00000004", "step-00000005"]


def test_rollback_to_a_missing_or_damaged_step_is_rejected(ranks, tmp_path):
    with pytest.raises(RankError, match=r"checkpoint.load_step: .* has no such checkpoint; available steps: none"):
        ranks(1).run(resume.find_resume_point, tmp_path, 4)
    for step in (2, 4):
        ranks(1).run(save, tmp_path, step)
    with pytest.raises(RankError, match=r"checkpoint.load_step: .* has no such checkpoint; available steps: 2, 4"):
        ranks(1).run(resume.find_resume_point, tmp_path, 3)
    damage(tmp_path / "step-00000002")
    with pytest.raises(
        RankError, match=r"checkpoint.load_step: .*step-00000002: rank-00000.safetensors does not match"
    ):
        ranks(1).run(resume.find_resume_point, tmp_path, 2)


def test_rollback_discards_replaced_checkpoints_too(ranks, tmp_path):
    for step in (2, 4):
        ranks(1).run(save, tmp_path, step)
    shutil.copytree(tmp_path / "step-00000004", tmp_path / "step-00000004.old")
    assert ranks(1).run(rolled_back, tmp_path, 2) == [("step-00000002", True)]
    assert names(tmp_path) == ["discarded-1", "lineage.json", "step-00000002"]
    assert names(tmp_path / "discarded-1") == ["step-00000004", "step-00000004.old"]


def test_unreadable_lineage_file_can_be_removed(ranks, tmp_path):
    for step in (2, 4):
        ranks(1).run(save, tmp_path, step)
    ranks(1).run(rolled_back, tmp_path, 2)
    ranks(1).run(save, tmp_path, 3)
    (tmp_path / "lineage.json").write_text("{")
    with pytest.raises(
        RankError,
        match=r"lineage\.json cannot be read, so earlier rollbacks are unknown; remove this file and start the run again",
    ):
        ranks(1).run(resume.find_resume_point, tmp_path, 2)
    (tmp_path / "lineage.json").unlink()
    assert ranks(1).run(rolled_back, tmp_path, 2) == [("step-00000002", True)]
    assert names(tmp_path / "discarded-2") == ["step-00000003"]


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"cursor": "0"},
            {"step": True},
            {"fingerprint": []},
            {"skipped_samples": [3]},
            {"skipped_samples": [[1, 2, 3]]},
        ),
        *({"skipped_samples": [["a", "b"]]}, {"rng": None}, {"rollbacks": 0.5}),
    ],
)
def test_state_with_wrong_types_is_damaged(tmp_path, wrong):
    path = tmp_path / "step-00000000"
    path.mkdir()
    (path / "train_state.json").write_text(json.dumps(STATE))
    assert resume.check_train_state(path) == ""
    (path / "train_state.json").write_text(json.dumps(STATE | wrong))
    assert resume.check_train_state(path) == "train_state.json is not a valid training state"


def test_all_differences_are_in_one_error(tmp_path):
    saved = resume.ResumePoint(tmp_path, TrainState(fingerprint={"a": 1, "b": "x", "c": [1, 2]}))
    with pytest.raises(ConfigError) as error:
        resume.require_compatible(saved, {"a": 2, "b": "x", "d": True})
    assert error.value.message == (
        f"cannot resume from {tmp_path}: a was 1, is 2; d was null, is true; set another --run.name for a new run"
    )
    resume.require_compatible(saved, {"b": "x", "c": (1, 2)})


def test_a_checkpoint_that_is_older_than_a_setting_was_saved_with_its_default(tmp_path):
    saved = resume.ResumePoint(tmp_path, TrainState(fingerprint={}))
    resume.require_compatible(saved, {"lora.base_dtype": "keep", "lora.targets": ("*",)})
    with pytest.raises(ConfigError, match=r'lora\.base_dtype was "keep", is "nf4"'):
        resume.require_compatible(saved, {"lora.base_dtype": "nf4"})

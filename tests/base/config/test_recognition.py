"""What a folder is: the checkpoints of this trainer, and uses for which a folder of another kind is no help. The messages about
folders of other programs are tested with every reader in tests/checkpoint/formats/test_foreign_folders.py."""

import json
from typing import get_args

import pytest

from trainer.base.config import ConfigError
from trainer.base.config.recognition import (
    ADAPTER,
    CHECKPOINT,
    FOLDERS,
    MODEL,
    PEFT,
    Folder,
    Use,
    is_adapter,
    recognise,
    recognise_published,
    require,
)

NEITHER = "contains neither manifest.json of a checkpoint nor config.json of a Hugging Face model"
NOT_PUBLISHED = "is no model in Hugging Face's format, because it has no config.json"
NO_ADAPTER = "contains no adapter, but is the checkpoint of a complete model; use it as checkpoint.init_from"
ONLY_ADAPTER = (
    "contains only an adapter; write a complete model (scripts/convert_hf.py merge {path} FOLDER), or continue with "
    "--from {base} --lora.init_from {path}"
)
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")


def folder_with(path, *names, model=None):
    path.mkdir()
    for name in names:
        (path / name).write_text("{}")
    if model is not None:
        (path / "model.json").write_text(json.dumps(model))
    return path


@pytest.mark.parametrize("base", ["/the/base", ""])
def test_a_checkpoint_of_an_adapter_is_an_adapter_and_no_complete_model(tmp_path, base):
    path = folder_with(tmp_path / "c", "manifest.json", model={"lora": {"base": base, "rank": 4}})
    for use in ("dimensions", "adapter", "text"):
        assert recognise(path, use) == Folder(ADAPTER)
    assert is_adapter(path)
    problem = ONLY_ADAPTER.format(path=path, base=base or "BASE")
    assert recognise(path, "model") == recognise(path, "pretrained") == Folder(ADAPTER, problem)
    with pytest.raises(ConfigError) as error:
        require(path, "model")
    assert error.value.message == f"{path} {problem}"


@pytest.mark.parametrize("model", [{"family": "llama3"}, {"lora": {}}])
def test_any_other_checkpoint_is_a_complete_model_and_no_adapter(tmp_path, model):
    path = folder_with(tmp_path / "c", "manifest.json", model=model)
    for use in ("pretrained", "dimensions", "model", "text"):
        assert recognise(path, use) == Folder(CHECKPOINT)
    assert not is_adapter(path)
    assert recognise(path, "adapter") == Folder(CHECKPOINT, NO_ADAPTER)
    assert recognise(path, "huggingface").problem == NOT_PUBLISHED


@pytest.mark.parametrize("model", [None, {}, []])
def test_what_opens_a_checkpoint_names_the_damage_of_its_model_json(tmp_path, model):
    path = folder_with(tmp_path / "c", "manifest.json", model=model)
    for use in ("pretrained", "dimensions", "model", "adapter", "text"):
        assert recognise(path, use) == Folder(CHECKPOINT)
    assert not is_adapter(path)


def test_a_model_whose_weights_are_not_downloaded_gives_its_other_parts(tmp_path):
    path = folder_with(tmp_path / "m", "config.json")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 9\n"
    (path / "model.safetensors").write_bytes(pointer)
    assert recognise(path, "pretrained") == Folder(MODEL)
    assert recognise(path, "model").problem.startswith("contains Git LFS pointers instead of files (model.safetensors)")


def test_a_model_folder_serves_every_use_but_that_of_an_adapter(tmp_path):
    path = folder_with(tmp_path / "m", "config.json", "model.safetensors")
    for use in ("pretrained", "dimensions", "model", "huggingface", "weights", "text"):
        assert recognise(path, use) == Folder(MODEL)
    assert recognise(path, "adapter").problem.startswith("contains a complete model, not an adapter")


def test_a_folder_with_a_model_and_an_adapter_serves_both_uses(tmp_path):
    path = folder_with(tmp_path / "m", "config.json", "model.safetensors", *PEFT_FILES)
    assert require(path, "adapter") == PEFT and require(path, "weights") == MODEL


def test_a_snapshot_is_named_for_each_folder_of_the_cache(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1a2b"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    for path in (snapshot.parent, snapshot.parent.parent):
        assert recognise(path, "model").problem == f"is a folder of Hugging Face's cache; use its snapshot {snapshot}"


def test_a_folder_with_other_files_is_described_by_what_it_lacks(tmp_path):
    path = folder_with(tmp_path / "x", "README.md")
    problems = {use: recognise(path, use).problem for use in get_args(Use)}
    assert problems == {
        "pretrained": NEITHER,
        "dimensions": NEITHER,
        "model": NEITHER,
        "huggingface": NOT_PUBLISHED,
        "weights": NOT_PUBLISHED,
        "adapter": "contains neither adapter_config.json nor a checkpoint of an adapter",
        "text": "",  # the reader names the file that it looks for
    }


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for name, problem in (("file", "is a file, not a folder"), ("flie", "no such folder; did you mean")):
        with pytest.raises(ConfigError) as error:
            recognise(tmp_path / name, "model")
        assert error.value.message.startswith(f"{tmp_path / name}: {problem}")


def test_published_files_are_recognised_by_their_names():
    assert recognise_published(["config.json", "model.safetensors.index.json"], "weights") == Folder(MODEL)
    assert recognise_published(["a.gguf"], "huggingface").kind == "GGUF"
    assert recognise_published([".gitattributes"], "weights").problem == "is empty"


def test_each_row_that_is_wrong_for_a_use_says_what_is_wrong():
    for kind in FOLDERS:
        assert kind.what or kind.concerns == kind.serves, kind.name
        assert kind.serves <= kind.concerns, kind.name

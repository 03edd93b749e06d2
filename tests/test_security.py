"""What is loaded cannot run code, lead elsewhere, or fill the memory."""

import ast
import json
import os
import pickle
import shutil

import pytest
import torch

from scripts.gloo_pool import RankError
from tests.test_checkpoint import TENSORS, load, save
from tests.test_layering import SOURCES, name_of
from trainer import checkpoint, manifest
from trainer.manifest import File, Manifest

FORBIDDEN = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_unpickles_or_evaluates_a_file(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + ([node.module] if isinstance(node, ast.ImportFrom) else [])
            assert not FORBIDDEN & {name.partition(".")[0] for name in names if name}
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "torch.load", "compile"), called
            assert not any(k.arg in ("weights_only", "allow_pickle", "trust_remote_code") for k in node.keywords)


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def plain(path, bomb):
    path.write_bytes(pickle.dumps(bomb))


def by_torch(path, bomb):
    with path.open("wb") as file:
        torch.save({"model": bomb}, file)


def by_old_torch(path, bomb):
    with path.open("wb") as file:
        torch.save({"model": bomb}, file, _use_new_zipfile_serialization=False)


def behind_a_header(path, bomb):
    """As a safetensors file whose header says little."""
    path.write_bytes(len(b"{}").to_bytes(8, "little") + b"{}" + pickle.dumps(bomb))


def agree(folder):
    """A manifest that says that everything is as it was written."""
    files = {p.name: File(p.stat().st_size, manifest.digest_of(p)) for p in folder.iterdir() if p.name != manifest.NAME}
    manifest.write(folder, Manifest(files, {}))


def found_and_loaded(folder):
    found = checkpoint.find(folder)
    return load(found.path)


@pytest.mark.parametrize("payload", [plain, by_torch, by_old_torch, behind_a_header])
@pytest.mark.parametrize(
    "file", ["rank-00000.safetensors", "index.json", "train_state.json", "manifest.json", ".metadata", "config.toml"]
)
def test_no_payload_is_run_from_any_file(ranks, tmp_path, payload, file):
    path = ranks(1).run(save, tmp_path / "c", 3)[0]
    payload(path / file, Bomb(tmp_path / "mark"))
    if file != manifest.NAME:
        agree(path)
    try:
        loaded = ranks(1).run(found_and_loaded, tmp_path / "c")[0]
    except RankError as error:
        assert "ConfigError" in str(error)
    else:  # what is not read does no harm
        assert file in (".metadata", "config.toml") and loaded["model/w"] == [1.0] * 4
    assert not (tmp_path / "mark").exists()


def with_index(ranks, folder, change):
    path = ranks(1).run(save, folder, 3)[0]
    index = json.loads((path / "index.json").read_text())
    change(index, path)
    (path / "index.json").write_text(json.dumps(index))
    agree(path)


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/etc/passwd", "..", "", ".", "a/../../b"])
def test_an_index_that_leads_out_of_its_folder_is_refused(ranks, tmp_path, file):
    def change(index, path):
        shutil.copy(path / "rank-00000.safetensors", path.parent / "elsewhere.safetensors")
        index["model/w"]["parts"][0]["file"] = file

    with_index(ranks, tmp_path / "c", change)
    with pytest.raises(RankError, match=r"index\.json is not an index of tensors"):
        ranks(1).run(found_and_loaded, tmp_path / "c")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape", [2**62]),
        ("shape", [-4]),
        ("shape", [True]),
        ("shape", "4"),
        ("shape", [4.0]),
        ("shape", [2**70]),
        ("dtype", "object"),
        ("dtype", ["float32"]),
        ("parts", []),
        ("parts", [None]),
        ("parts", [{"file": 3, "offsets": [0], "shape": [4]}]),
        ("parts", [{"file": "x", "offsets": [0, 0], "shape": [4, 1]}]),
    ],
)
def test_an_index_that_is_none_is_refused(ranks, tmp_path, key, value):
    with_index(ranks, tmp_path / "c", lambda index, path: index["model/w"].update({key: value}))
    with pytest.raises(RankError, match=r"ConfigError: .*index\.json is not an index of tensors"):
        ranks(1).run(found_and_loaded, tmp_path / "c")


def test_a_part_that_is_not_in_its_file_is_refused(ranks, tmp_path):
    def change(index, path):
        index["model/w"]["parts"][0]["file"] = "index.json"

    with_index(ranks, tmp_path / "c", change)
    with pytest.raises(RankError, match=r"ConfigError: .*index\.json: "):
        ranks(1).run(found_and_loaded, tmp_path / "c")


def test_a_shape_that_is_not_that_of_the_run_takes_no_memory(ranks, tmp_path):
    def change(index, path):
        index["model/w"].update({"shape": [2**60], "parts": [{"file": "x", "offsets": [0], "shape": [2**60]}]})

    with_index(ranks, tmp_path / "c", change)
    with pytest.raises(RankError, match=rf"model/w is \[{2**60}\] there, \[{len(TENSORS['model/w'])}\] here"):
        ranks(1).run(found_and_loaded, tmp_path / "c")


@pytest.mark.parametrize("file", ["manifest.json", "train_state.json"])
def test_a_huge_file_is_not_read(ranks, tmp_path, file):
    path = ranks(1).run(save, tmp_path / "c", 3)[0]
    with (path / file).open("r+b") as opened:
        opened.truncate(2**31)  # a hole: it takes no disk
    if file != manifest.NAME:
        agree(path)
    with pytest.raises(RankError, match="all 1 checkpoints are damaged"):
        ranks(1).run(checkpoint.find, tmp_path / "c")


def test_links_in_a_checkpoint_are_refused(ranks, tmp_path):
    path = ranks(1).run(save, tmp_path / "c", 3)[0]
    shutil.move(path / "rank-00000.safetensors", tmp_path / "elsewhere")
    (path / "rank-00000.safetensors").symlink_to(tmp_path / "elsewhere")
    assert manifest.problem(path) == "rank-00000.safetensors is a link, which may lead anywhere"

"""Loaded files cannot run code, reach other paths, or exhaust memory."""

import ast
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.test_commit import TENSORS, load, save
from tests.conftest import ROOT
from tests.ports import free_port
from tests.test_layering import SOURCES, name_of
from tests.training_runs import train
from trainer.base.config import CheckpointConfig, ConfigError
from trainer.base.system.run_files import MANIFEST
from trainer.checkpoint import manifest, resume
from trainer.checkpoint.formats.export import export_run
from trainer.checkpoint.manifest import CorruptError, File, Manifest
from trainer.checkpoint.tensor_files import Chunk, TensorMetadata, read_index, read_regions
from trainer.tools.testing.ranks import RankError

LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""
FORBIDDEN = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_module_unpickles_or_evaluates_a_file(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + ([node.module] if isinstance(node, ast.ImportFrom) else [])
            assert not FORBIDDEN & {name.partition(".")[0] for name in names if name}
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "torch.load", "compile"), called
            options = {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert not {"weights_only", "trust_remote_code"} & options.keys()
            assert options.get("allow_pickle", "False") == "False"


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def by_pickle(path, bomb):
    path.write_bytes(pickle.dumps(bomb))


def by_torch(path, bomb):
    with path.open("wb") as file:
        torch.save({"model": bomb}, file)


def by_old_torch(path, bomb):
    with path.open("wb") as file:
        torch.save({"model": bomb}, file, _use_new_zipfile_serialization=False)


def after_a_header(path, bomb):
    """A safetensors file with an empty header."""
    path.write_bytes(len(b"{}").to_bytes(8, "little") + b"{}" + pickle.dumps(bomb))


def update_manifest(folder):
    """Write a manifest that agrees with the files."""
    files = {p.name: File(p.stat().st_size, manifest.digest_of(p)) for p in folder.glob("[!.]*") if p.name != MANIFEST}
    manifest.write(folder, Manifest(files, {}))


def find_and_load(folder):
    return load(resume.find_resume_point(folder).path)


@pytest.fixture(scope="module")
def trained(ranks, tiny, tmp_path_factory):
    """The folder of a run with one checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    ranks(1).run(train, [*tiny, *run_settings(folder / "run"), "--training.steps", "1"])
    return folder / "run"


def run_settings(run):
    return ["--run.output_folder", str(run.parent), "--run.name", run.name]


def errors_of_every_use(argv, runs):
    """For each run: the errors of exporting it, resuming it, and starting another run from its weights."""
    return [errors_of(argv, run) for run in runs]


def errors_of(argv, run):
    messages = []
    init = ["--checkpoint.init_from", str(run / "checkpoints" / "step-00000001")]
    for use in (
        lambda: export_run(run, CheckpointConfig(export_huggingface=True)),
        lambda: train([*argv, *run_settings(run), "--training.steps", "2"]),
        lambda: train([*argv, *run_settings(run.with_name("fresh")), *init]),
    ):
        try:
            use()
        except ConfigError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("payload", [by_pickle, by_torch, by_old_torch, after_a_header])
def test_no_payload_in_any_file_is_executed(ranks, tiny, trained, tmp_path, payload):
    names = sorted(p.name for p in (trained / "checkpoints" / "step-00000001").iterdir())
    assert {"rank-00000.safetensors", "index.json", "config.toml", "model.json", "tokenizer.tiktoken"} < set(names)
    runs = {name: tmp_path / name.strip(".") / "run" for name in [*names, ".metadata"]}
    for name, run in runs.items():
        shutil.copytree(trained, run)
        path = run / "checkpoints" / "step-00000001"
        payload(path / name, Bomb(tmp_path / "executed"))
        if name != MANIFEST:
            update_manifest(path)
    (errors,) = ranks(1).run(errors_of_every_use, tiny, list(runs.values()))
    expected = {".metadata": 0, "config.toml": 0, "tokenizer.tiktoken": 1, "generation_config.json": 2}
    expected["train_state.json"] = 1
    for name, messages in zip(runs, errors, strict=True):
        assert len(messages) == expected.get(name, 3), (name, messages)
    assert not (tmp_path / "executed").exists()


def test_a_file_outside_the_checkpoint_is_not_exported(ranks, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    path = run / "checkpoints" / "step-00000001"
    (tmp_path / "secret").write_text("secret")
    (path / ".x").symlink_to(tmp_path / "secret")
    for name, problem in (
        (".x", "names '.x', which is not a plain file name"),
        ("y", "names y, which is not in the manifest"),
    ):
        model = json.loads((path / "model.json").read_text()) | {"tokenizer": "", "tokenizer_files": [name]}
        (path / "model.json").write_text(json.dumps(model))
        (path / ".x").unlink(missing_ok=True)
        update_manifest(path)
        (path / ".x").symlink_to(tmp_path / "secret")
        with pytest.raises(RankError, match=problem):
            ranks(1).run(export_run, run, CheckpointConfig(export_huggingface=True))


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A checkpoint of two tensors."""
    return ranks(1).run(save, tmp_path_factory.mktemp("saved"), 3)[0]


def with_index(saved, folder, change):
    """Copy a checkpoint to a folder and change its index."""
    path = shutil.copytree(saved, folder / saved.name)
    index = json.loads((path / "index.json").read_text())
    change(index, path)
    (path / "index.json").write_text(json.dumps(index))
    update_manifest(path)


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/etc/passwd", "..", "", ".", "a/../../b", 3, None])
def test_an_index_that_names_a_path_outside_its_folder_is_refused(ranks, saved, tmp_path, file):
    def change(index, path):
        shutil.copy(path / "rank-00000.safetensors", path.parent / "elsewhere.safetensors")
        index["model/w"]["chunks"][0]["file"] = file

    with_index(saved, tmp_path / "c", change)
    with pytest.raises(RankError, match=r"ConfigError: .*index\.json names .*, which is not a plain file name"):
        ranks(1).run(find_and_load, tmp_path / "c")


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
        ("chunks", []),
        ("chunks", [None]),
        ("chunks", [{"file": "x", "offsets": [0, 0], "shape": [4, 1]}]),
    ],
)
def test_an_invalid_index_is_refused(ranks, saved, tmp_path, key, value):
    with_index(saved, tmp_path / "c", lambda index, path: index["model/w"].update({key: value}))
    with pytest.raises(RankError, match=r"ConfigError: .*index\.json is not a valid index of tensors"):
        ranks(1).run(find_and_load, tmp_path / "c")


def boxes(*boxes):
    return [{"file": "x", "offsets": offsets, "shape": shape} for offsets, shape in boxes]


@pytest.mark.parametrize(
    ("shape", "chunks", "valid"),
    [
        ([4, 4], boxes(([0, 0], [2, 4]), ([2, 0], [2, 4])), True),
        ([4, 4], boxes(([0, 0], [3, 1]), ([0, 1], [1, 3]), ([1, 1], [3, 3]), ([3, 0], [1, 1])), True),
        ([4, 4], boxes(([0, 0], [2, 4]), ([0, 0], [2, 4])), False),
        ([4, 4], boxes(([0, 0], [3, 4]), ([2, 0], [1, 4])), False),
        ([4, 4], boxes(([0, 0], [2, 4]), ([3, 0], [2, 4])), False),
        ([4, 4], boxes(([0, 0], [3, 1]), ([0, 1], [1, 3]), ([1, 1], [3, 3]), ([2, 0], [1, 1])), False),
        ([0, 4], boxes(([0, 0], [0, 4])), True),
        ([0, 4], [], True),
        ([], boxes(([], [])), True),
        ([], boxes(([], []), ([], [])), False),
        ([1] * 9, boxes(([0] * 9, [1] * 9)), False),
    ],
)
def test_the_chunks_of_an_index_cover_the_tensor_exactly_once(tmp_path, shape, chunks, valid):
    (tmp_path / "index.json").write_text(json.dumps({"w": {"dtype": "float32", "shape": shape, "chunks": chunks}}))
    with nullcontext() if valid else pytest.raises(CorruptError, match=r"index\.json is not a valid index of tensors"):
        assert read_index(tmp_path)["w"].shape == tuple(shape)


@pytest.mark.parametrize("stored", [torch.zeros(4, 2).long(), torch.zeros(4, 1), torch.zeros(2, 2), torch.zeros(8)])
def test_a_file_whose_tensor_differs_from_the_index_is_refused(tmp_path, stored):
    save_file({"w": stored}, tmp_path / "x")
    index = {"w": TensorMetadata(torch.float32, (4, 2), (Chunk("x", (0, 0), (4, 2)),))}
    for rows in (4, 2):
        with pytest.raises(CorruptError, match=r"^x: "):
            read_regions(tmp_path, index, {"w": (torch.zeros(rows, 2), (slice(4 - rows, 4), slice(0, 2)))})


def test_a_chunk_that_is_missing_in_its_file_is_refused(ranks, saved, tmp_path):
    def change(index, path):
        index["model/w"]["chunks"][0]["file"] = "index.json"

    with_index(saved, tmp_path / "c", change)
    with pytest.raises(RankError, match=r"ConfigError: .*index\.json: "):
        ranks(1).run(find_and_load, tmp_path / "c")


def test_a_shape_that_differs_from_the_model_allocates_no_memory(ranks, saved, tmp_path):
    def change(index, path):
        index["model/w"].update({"shape": [2**60], "chunks": [{"file": "x", "offsets": [0], "shape": [2**60]}]})

    with_index(saved, tmp_path / "c", change)
    with pytest.raises(RankError, match=rf"model/w has shape \[{2**60}\], expected \[{len(TENSORS['model/w'])}\]"):
        ranks(1).run(find_and_load, tmp_path / "c")


@pytest.mark.parametrize("file", ["manifest.json", "train_state.json", "index.json"])
def test_a_huge_file_is_not_read(ranks, saved, tmp_path, file):
    path = shutil.copytree(saved, tmp_path / "c" / saved.name)
    with (path / file).open("r+b") as opened:
        opened.truncate(2**30 + 1)  # a sparse file: it takes no disk
    if file != MANIFEST:
        update_manifest(path)
    with pytest.raises(RankError, match=r"its only checkpoint is damaged|is larger than the limit of 1073741824 bytes"):
        ranks(1).run(find_and_load, tmp_path / "c")


def test_links_in_a_checkpoint_are_refused(saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / saved.name)
    shutil.move(path / "rank-00000.safetensors", tmp_path / "elsewhere")
    (path / "rank-00000.safetensors").symlink_to(tmp_path / "elsewhere")
    assert manifest.find_damage(path) == "rank-00000.safetensors is a symbolic link"


def listening_addresses(group):
    """Return the local addresses, in hexadecimal, on which the processes of a process group listen for TCP connections."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            local, state = fields[1], fields[3]
            if state == LISTENING:
                sockets[f"socket:[{fields[9]}]"] = local.partition(":")[0]
    addresses = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            if os.getpgid(int(process.name)) == group:
                links = [os.readlink(file) for file in (process / "fd").iterdir()]
                addresses |= {sockets[link] for link in links if link in sockets}
    return addresses


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("chooses_port", [False, True])
def test_a_run_on_one_node_listens_on_loopback_only(tiny, tmp_path, chooses_port):
    command = [sys.executable, "trainer/launch.py", *tiny, "--training.steps", "1000000"]
    command += ["--run.output_folder", str(tmp_path)]
    variables = {k: v for k, v in os.environ.items() if k not in ("NNODES", "MASTER_PORT", "GLOO_SOCKET_IFNAME")}
    variables |= {"NGPU": "2"} | ({"MASTER_PORT": free_port()} if chooses_port else {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(command, cwd=ROOT, env=variables, **pipes) as run:
        try:
            for line in run.stdout:
                if "step" in line and "loss" in line:
                    break
            addresses = listening_addresses(run.pid)
        finally:
            os.killpg(run.pid, signal.SIGKILL)
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert addresses and addresses <= loopback

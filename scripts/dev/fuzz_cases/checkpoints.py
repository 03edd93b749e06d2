"""Checkpoints. A damaged one is found, and a forged one, whose hashes are right, never gives tensors of another shape."""

import json
import shutil
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import train
from scripts.dev.fuzz_cases.damage import SAMPLES, damage_file, damage_json_file, require
from trainer.checkpoint import manifest
from trainer.checkpoint.commit import load
from trainer.checkpoint.export import HfExport
from trainer.checkpoint.manifest import CorruptError
from trainer.checkpoint.resume import find_resume_point
from trainer.config import ConfigError
from trainer.config.load import load_config
from trainer.runtime.device import DTYPES
from trainer.system.files import digest_of

_SIZES = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "hidden_dim": 16, "vocab_size": 4352}


def make_fixtures(folder: Path) -> None:
    """Train two steps and keep both checkpoints."""
    (folder / "corpus.txt").write_text("".join(SAMPLES) * 200)
    values = {
        "run.name": "run",
        "run.output_folder": folder,
        "data.dataset": "text",
        "data.path": folder / "corpus.txt",
        "data.held_out_fraction": 0,
        "data.store_folder": folder / "stores",
        "evaluation.interval_steps": 0,
        "training.steps": 2,
        "training.seq_len": 8,
        "training.local_batch_size": 1,
        "training.global_batch_size": 1,
        "checkpoint.interval_steps": 1,
        "metrics.tensorboard": "false",
        **{f"model.overrides.{name}": size for name, size in _SIZES.items()},
    }
    words = [str(word) for key, value in values.items() for word in (f"--{key}", value)]
    assert train.run(load_config(words)) == 0


def _forge(checkpoint: Path) -> None:
    """Write the sizes and hashes of the files into the manifest."""
    path = checkpoint / manifest.NAME
    content = json.loads(path.read_text())
    files = [file for file in checkpoint.iterdir() if file.is_file() and file != path]
    content["files"] = {file.name: {"size": file.stat().st_size, "digest": digest_of(file)} for file in files}
    path.write_text(json.dumps(content))


def run(random: Random, fixtures: Path, folder: Path) -> str:
    steps = shutil.copytree(fixtures / "run" / "checkpoints", folder / "checkpoints")
    first, last = sorted(steps.glob("step-*"))
    path = random.choice(sorted(last.iterdir()))
    (damage_json_file if path.suffix == ".json" else damage_file)(random, path)
    forged = path.name != manifest.NAME and random.random() < 0.5
    if forged:
        _forge(last)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = find_resume_point(steps)
    require(found is not None, "no checkpoint was found")
    assert found is not None
    unchanged = all((fixtures / "run" / "checkpoints" / last.name / f.name).read_bytes() == f.read_bytes() for f in last.iterdir() if f.is_file())
    original = load_file(fixtures / "run" / "checkpoints" / found.path.name / "rank-00000.safetensors")
    targets = {name: torch.zeros_like(tensor) for name, tensor in original.items()}
    refusal = ""
    try:
        load(found.path, targets, set(original))
        equal = all(torch.equal(targets[name], tensor) for name, tensor in original.items())
        require(equal or (forged and found.path == last), "the loaded tensors have other values")
    except ConfigError as error:
        require(forged and found.path == last, f"an intact checkpoint was refused: {error}")
        refusal = str(error)
    require(unchanged or forged or found.path == first, "a damaged checkpoint was accepted")
    try:
        HfExport(last, DTYPES["bf16"]).write(folder / "exported", 2**30, lambda count: None)
    except CorruptError as damage:
        return str(damage)
    return refusal or ("" if found.path == last else "ignored the damaged checkpoint")

"""Checkpoints. A damaged one is found, and a forged one, whose hashes are right, never gives tensors of another shape."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import train
from scripts.dev.fuzz_cases.damage import SAMPLES, damage_file, damage_json_file, require
from trainer.checkpoint import manifest
from trainer.checkpoint.commit import load
from trainer.checkpoint.export import HfExport
from trainer.checkpoint.manifest import CorruptError, File, Manifest
from trainer.checkpoint.resume import find_resume_point
from trainer.checkpoint.weights import resolve_checkpoint
from trainer.config import ConfigError
from trainer.config.load import load_config
from trainer.runtime.device import DTYPES
from trainer.system.files import digest_of
from trainer.system.signals import SignalListener, end_before_training
from trainer.testing.layouts import flags

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
        "metrics.sinks": "console,jsonl",
        **{f"model.overrides.{name}": size for name, size in _SIZES.items()},
    }
    listener = SignalListener(end_before_training)
    assert train.run(load_config(flags({key: str(value) for key, value in values.items()})), listener) == 0


def _forge(checkpoint: Path, metadata: Mapping[str, Any]) -> None:
    """Write the sizes and hashes of the files to the manifest."""
    files = [file for file in checkpoint.iterdir() if file.is_file() and file.name != manifest.NAME]
    contents = {file.name: File(file.stat().st_size, digest_of(file)) for file in files}
    manifest.write(checkpoint, Manifest(contents, metadata))


def run(random: Random, fixtures: Path, folder: Path) -> str:
    intact = fixtures / "run" / "checkpoints"
    first, last = sorted(intact.glob("step-*"))
    copies = shutil.copytree(intact, folder / "checkpoints")
    damaged = copies / last.name
    path = random.choice(sorted(damaged.iterdir()))
    (damage_json_file if path.suffix == ".json" else damage_file)(random, path)
    unchanged = path.is_file() and path.read_bytes() == (last / path.name).read_bytes()
    forged = path.name != manifest.NAME and random.random() < 0.5
    if forged:
        _forge(damaged, manifest.read(last).metadata)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = find_resume_point(copies)
    require(found is not None and found.path.name in (first.name, last.name), "the intact checkpoint was not found")
    assert found is not None
    fell_back = found.path.name == first.name
    require(fell_back or unchanged or forged, "a damaged checkpoint was accepted")
    require(not (fell_back and unchanged), "an intact checkpoint was ignored")
    original = load_file(intact / found.path.name / "rank-00000.safetensors")
    targets = {name: torch.zeros_like(tensor) for name, tensor in original.items()}
    try:
        load(found.path, targets, set(original))
    except ConfigError:
        require(forged and not fell_back, "an intact checkpoint was refused")
        raise
    equal = all(torch.equal(targets[name], tensor) for name, tensor in original.items())
    require(equal or (forged and not fell_back), "the loaded tensors have other values")
    try:
        HfExport.open(resolve_checkpoint(damaged), DTYPES["fp32"]).write(folder / "exported", 2**30, lambda count: None)
    except CorruptError as damage:
        return str(damage)
    require(unchanged or forged, "a damaged checkpoint was exported")
    return "the damaged checkpoint was ignored" if fell_back else ""

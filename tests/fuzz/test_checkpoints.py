"""Checkpoints. A damaged one is found, and a forged one, whose hashes are right, never gives tensors of another shape."""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.fuzz.check import limits, may_refuse, refusal_of
from tests.fuzz.strategies import Changed, Missing, Replaced, file_change
from trainer.base.config.checkpoints import resolve_checkpoint
from trainer.base.system.files import digest_of
from trainer.base.system.run_files import MANIFEST
from trainer.checkpoint import manifest
from trainer.checkpoint.commit import load
from trainer.checkpoint.formats.folders import open_weights
from trainer.checkpoint.formats.huggingface_writer import write_huggingface
from trainer.checkpoint.manifest import CorruptError, File, Manifest
from trainer.checkpoint.resume import find_resume_point
from trainer.runtime.device import DTYPES

_TENSORS = "rank-00000.safetensors"
_FILES = [
    _TENSORS,
    MANIFEST,
    "index.json",
    "model.json",
    "train_state.json",
    "config.toml",
    "generation_config.json",
]
_FILES += ["tokenizer.tiktoken"]


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@dataclass(frozen=True)
class Case:
    file: str
    change: Changed | Missing | Replaced
    is_forged: bool
    """Whether the manifest has the hash of the changed file."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(_FILES))
    return Case(name, draw(file_change(name)), name != MANIFEST and draw(st.booleans()))


def _forge(checkpoint: Path, metadata: Mapping[str, Any]) -> None:
    """Write the sizes and hashes of the files to the manifest."""
    files = [file for file in checkpoint.iterdir() if file.is_file() and file.name != MANIFEST]
    contents = {file.name: File(file.stat().st_size, digest_of(file)) for file in files}
    manifest.write(checkpoint, Manifest(contents, metadata))


def _check_loading(found: Path, original: Mapping[str, torch.Tensor], may_differ: bool) -> bool:
    """Load the tensors of the checkpoint that was found. Return whether it was refused.

    Args:
        may_differ: Whether the checkpoint is forged, so that it may be refused, or hold other values.
    """
    targets = {name: torch.zeros_like(tensor) for name, tensor in original.items()}
    with may_refuse(expected=may_differ) as refusals:
        load(found, targets, set(original))
    if refusals:
        return True
    assert may_differ or all(torch.equal(targets[name], tensor) for name, tensor in original.items())
    return False


@given(cases())
def test_a_changed_checkpoint_is_ignored_or_refused_or_has_the_saved_tensors(trained_run, case):
    intact = trained_run / "checkpoints"
    first, last = sorted(intact.glob("step-*"))
    assert sorted(os.listdir(last)) == sorted(_FILES)
    with limits() as folder:
        copies = shutil.copytree(intact, folder / "checkpoints")
        damaged = copies / last.name
        path = damaged / case.file
        case.change.write(path)
        is_unchanged = path.is_file() and path.read_bytes() == (last / case.file).read_bytes()
        if case.is_forged:
            _forge(damaged, manifest.read(last).metadata)
        found = find_resume_point(copies)
        assert found is not None and found.path.name in (first.name, last.name)
        fell_back = found.path.name == first.name
        assert fell_back or is_unchanged or case.is_forged, "a damaged checkpoint was accepted"
        assert not (fell_back and is_unchanged), "an intact checkpoint was ignored"
        original = load_file(intact / found.path.name / _TENSORS)
        if _check_loading(found.path, original, may_differ=case.is_forged and not fell_back):
            return
        try:
            with may_refuse(expected=not is_unchanged):
                write_huggingface(open_weights(resolve_checkpoint(damaged), alone=True), folder / "out", DTYPES["fp32"])
                assert is_unchanged or case.is_forged, "a damaged checkpoint was exported"
        except CorruptError as damage:
            refusal_of(damage)
            assert not is_unchanged

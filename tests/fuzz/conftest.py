import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.fuzz import check
from tests.fuzz.strategies import SAMPLES
from trainer.tools.testing.layouts import flags

_SIZES = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "hidden_dim": 16, "vocab_size": 4352}


@pytest.fixture(scope="module", autouse=True)
def accepts_and_refuses() -> Iterator[None]:
    """Require that the cases of a module are of both kinds: otherwise, its strategies would test half of what they should."""
    check.outcomes.clear()
    yield
    assert set(check.outcomes) in (set(), {"accepted", "refused"}), check.outcomes


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory) -> Path:
    """The folder of a run of two steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("trained")
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
    words = flags({key: str(value) for key, value in values.items()})
    subprocess.run([sys.executable, ROOT / "train.py", *words], check=True, capture_output=True)
    return folder / "run"

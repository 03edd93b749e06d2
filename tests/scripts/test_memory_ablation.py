"""scripts/dev/memory_ablation.py: rungs on top of each other, measured or planned."""

import subprocess
import sys

import pytest

from scripts.dev.memory_ablation import RUNGS, rungs
from tests.conftest import ROOT
from trainer.config.load import load_config

SMALL = ["--config", "train_configs/debug.toml", "--model.overrides.n_layers", "2", "--training.seq_len", "512"]


def ladder(*words):
    command = [sys.executable, str(ROOT / "scripts" / "ladder.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_every_rung_is_a_run_that_has_what_the_ones_before_have():
    configs = [load_config(argv, check_files=False) for _, argv in rungs(list(RUNGS), ["--training.seq_len", "256"])]
    assert len(configs) == len(RUNGS) + 1
    assert all(config.training.seq_len == 256 and config.training.local_batch_size == 4 for config in configs)
    assert [c.activation_checkpoint.offload_inputs for c in configs] == [False] * 3 + [True] * 5
    assert configs[-1].optimizer.offload == "state_and_gradients" and not configs[-1].optimizer.in_backward


@pytest.mark.parametrize("where", [[], ["--device", "h100", "--world", "2", "--training.global_batch_size", "8"]])
def test_a_rung_has_its_memory_the_change_and_its_speed(where):
    ended = ladder(*where, *SMALL, "--rungs", "loss in chunks", "blocks computed again")
    assert ended.returncode == 0, ended.stderr
    header, *rows = [line for line in ended.stdout.splitlines() if line and not line.startswith("USDT")]
    assert [row.split("  ")[0] for row in rows] == ["nothing", "+ loss in chunks", "+ blocks computed again"]
    assert header.split()[-1] == "tokens/s" and all(float(row.split()[-1].replace(",", "")) > 0 for row in rows)
    assert "%" not in rows[0] and rows[2].split("%")[0].split()[-1].startswith("-")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--rungs", "inputs of blocks on the host"],
            "rung 'inputs of blocks on the host': --activation_checkpoint.offload_inputs true: needs mode = full",
        ),
        (["--rungs", "less"], "argument --rungs: invalid choice: 'less'"),
        (["--world", "2"], "--world 2: of a plan; needs --device"),
        (["--training.stpes", "2"], "--training.stpes: unknown setting; did you mean '--training.steps'?"),
    ],
)
def test_a_wrong_word_is_one_line(words, line):
    ended = ladder(*words)
    assert ended.returncode == 2 and ended.stderr.startswith(line) and ended.stdout == ""

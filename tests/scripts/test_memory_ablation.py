"""scripts/dev/memory_ablation.py: techniques on top of each other, measured or planned."""

import pytest

from scripts.dev.memory_ablation import cumulative
from tests.commands import run_script
from trainer.tools.testing.techniques import TECHNIQUES

SMALL = ["--config", "train_configs/debug.toml", "--model.overrides.n_layers", "2", "--training.seq_len", "256"]


def memory_ablation(*argv):
    return run_script("scripts/dev/memory_ablation.py", *argv)


def test_every_technique_is_on_top_of_those_before_it():
    configs = [config for _, _, config in cumulative(list(TECHNIQUES), ["--training.seq_len", "256"])]
    assert len(configs) == len(TECHNIQUES) + 1
    assert all(config.training.seq_len == 256 and config.training.local_batch_size == 4 for config in configs)
    assert [c.activation_checkpoint.offload_inputs for c in configs] == [False] * 3 + [True] * 5
    assert configs[-1].optimizer.offload == "state_and_gradients" and not configs[-1].optimizer.in_backward


@pytest.mark.parametrize("device", [[], ["--device", "h100", "--world-size", "2", "--training.global_batch_size", "8"]])
def test_a_technique_has_memory_change_and_speed(device):
    ended = memory_ablation(*device, *SMALL, "--techniques", "chunked loss", "activation checkpointing")
    assert ended.returncode == 0, ended.stderr
    header, *rows = [line for line in ended.stdout.splitlines() if line and not line.startswith("USDT")]
    assert [row.split("  ")[0] for row in rows] == ["baseline", "+ chunked loss", "+ activation checkpointing"]
    assert header.endswith("tokens per second") and all(float(row.split()[-1].replace(",", "")) > 0 for row in rows)
    assert "%" not in rows[0] and rows[2].split("%")[0].split()[-1].startswith("-")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["--techniques", "block inputs in host memory"],
            "technique 'block inputs in host memory': --activation_checkpoint.offload_inputs true: has an effect only "
            "with [activation_checkpoint] mode = full",
        ),
        (["--techniques", "less"], "argument --techniques: invalid choice: 'less'"),
        (["--world-size", "2"], "--world-size 2: has no effect without --device"),
        (["--training.stpes", "2"], "--training.stpes: unknown setting; did you mean '--training.steps'?"),
    ],
)
def test_an_invalid_argument_is_one_line(argv, line):
    ended = memory_ablation(*argv)
    assert ended.returncode == 2 and ended.stderr.startswith(line) and ended.stdout == ""

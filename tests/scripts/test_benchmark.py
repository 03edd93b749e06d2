"""scripts/dev/benchmark.py runs; the figures are not checked."""

import json
import math
import sys

import pytest
import torch

from models import MODELS as FAMILIES
from models.llama import LlamaSizes
from models.moe import Experts
from scripts.dev import benchmark
from scripts.dev.benchmark import main
from scripts.dev.contenders import Task
from scripts.dev.expert_layer import LoopOverExperts
from scripts.dev.peers import MODELS, TOLERANCES, require_equal_losses, seconds_to_first_loss
from tests.commands import run_script
from trainer.base.config import ConfigError
from trainer.base.config.load import load_config
from trainer.run.resolve import resolve


@pytest.fixture
def tiny_model(monkeypatch):
    """A model whose steps take milliseconds."""
    sizes = LlamaSizes(dim=64, n_layers=2, n_heads=4, n_kv_heads=4, hidden_dim=176, vocab_size=2048)
    monkeypatch.setitem(MODELS, "tiny", ("llama3", sizes, 1, 8))


def lines_of(monkeypatch, capsys, *argv) -> list[list[str]]:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *map(str, argv)])
    main()
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_saves_are_measured_in_every_mode(monkeypatch, capsys, tmp_path):
    _, *table = lines_of(monkeypatch, capsys, "checkpoint", "--gib", "0.02", "--repeats", "1", "--folder", tmp_path)
    assert [line[0] for line in table] == ["off", "thread"]
    assert all(float(line[1]) > 0 for line in table)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--gib", "1e18"], "--gib 1e+18: must be less than the free memory of "),
        (["--folder", "no/such"], "argument --folder: no/such: no such folder"),
    ],
)
def test_errors_of_the_command_line_are_one_line(words, line):
    done = run_script("scripts/dev/benchmark.py", "checkpoint", *words)
    assert done.returncode == 2 and done.stderr.startswith(line) and len(done.stderr.splitlines()) == 1


def test_preparing_and_loading_are_compared_with_a_baseline(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "LOADED_TOKENS", 2**14)
    small = ("--mib", "1", "--seq", "64", "--local-batch", "4", "--repeats", "1")
    _, *table = lines_of(monkeypatch, capsys, "data", *small)
    assert [line[-1] for line in table] == ["%"] * 5
    assert table[0][-2] == table[2][-2] == "100"


def test_the_parts_of_a_layer_with_experts_are_measured(monkeypatch, capsys):
    sizes = FAMILIES["olmoe"].by_size
    monkeypatch.setitem(sizes, "7b-a1b", sizes["debug"])
    _, *table = lines_of(monkeypatch, capsys, "experts", "--tokens", "8", "--repeats", "1", "--dtype", "bf16")
    assert table[0][0] == "layer" and table[0][-1] == "100.0%" and table[-1][0] == "dispatch" and len(table) == 6


def test_a_loop_over_the_experts_computes_the_same():
    loop, grouped = LoopOverExperts(3, 8, 16, 2), Experts(3, 8, 16, 2)
    for p in grouped.parameters():
        torch.nn.init.normal_(p)
    loop.load_state_dict(grouped.state_dict())
    rows, counts = torch.randn(5, 8), torch.tensor([2, 0, 3])
    torch.testing.assert_close(loop(rows, counts), grouped(rows, counts))


def test_contenders_train_in_turn_with_equal_losses(monkeypatch, capsys, tmp_path, tiny_model):
    results = tmp_path / "results.json"
    contenders = ["plain", "meshwright", "kernels"]
    words = ("--contenders", *contenders, "--steps", "2", "--repeats", "1", "--threads", "1")
    first, _, *table = lines_of(monkeypatch, capsys, "peers", "--model", "tiny", *words, "--json", results)
    assert first[:7] == ["the", "losses", "of", "all", "contenders", "agree", "within"]
    assert float(first[7]) <= 1e-4
    assert [line[0] for line in table] == contenders
    times = json.loads(results.read_text())["step_time_s"]
    assert {name: len(of_steps) for name, of_steps in times.items()} == dict.fromkeys(contenders, 2)


def test_times_to_the_first_loss_are_compared(monkeypatch, capsys, tiny_model):
    _, *table = lines_of(monkeypatch, capsys, "start", "--model", "tiny", "--repeats", "1", "--threads", "1")
    assert [line[0] for line in table] == ["plain", "meshwright"]
    assert all(float(line[1]) > 0 for line in table)


def test_a_command_without_a_loss_is_an_error():
    with pytest.raises(ConfigError, match="printed no loss: no such model"):
        seconds_to_first_loss([sys.executable, "-c", "print('no such model')"])


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_other_packages_have_the_losses_of_the_plain_loop(monkeypatch, capsys, tiny_model, name):
    pytest.importorskip("accelerate")
    words = ("--contenders", "plain", name, "--steps", "2", "--repeats", "1", "--threads", "1")
    _, _, *table = lines_of(monkeypatch, capsys, "peers", "--model", "tiny", *words)
    assert [line[0] for line in table] == ["plain", name]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["plain", "plain"], "--contenders plain: is given twice\n"),
        (["kernels"], "--contenders kernels: needs a training loop to compare with\n"),
        (["plain", "--json", "."], "argument --json: .: is a folder\n"),
        (["plain", "--json", "no/such.json"], "argument --json: no: no such folder\n"),
        (["plain", "kernels", "--device", "gpu"], "--contenders kernels: can only replay the kernels of a CPU\n"),
    ],
)
def test_impossible_contenders_are_an_error_of_one_line(words, line):
    done = run_script("scripts/dev/benchmark.py", "peers", "--contenders", *words)
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.parametrize("model", MODELS)
def test_the_trainer_gets_the_sizes_of_the_other_contenders(model, tmp_path):
    family, sizes, batch, seq = MODELS[model]
    task = Task(family, sizes, batch, seq, 1, "fp32", compiled=False, device="cpu", folder=tmp_path)
    (tmp_path / "tokens.npy").touch()
    assert resolve(load_config(task.flags()), 1).sizes == sizes


def test_no_time_counts_if_the_losses_differ():
    assert require_equal_losses({"a": [2.0, 1.0], "b": [2.0, 1.0001]}, 1e-3) == pytest.approx(1e-4)
    # Measured for 58m in bf16 on a CPU with AMX, at step 26.
    assert require_equal_losses({"a": [7.0], "b": [7.0 * (1 + 2.7e-3)]}, TOLERANCES["bf16"]) == pytest.approx(2.7e-3)
    for other in (1.1, math.nan):
        with pytest.raises(ConfigError, match=r"b has another loss than a at step 2: .* and 1.0; no time counts"):
            require_equal_losses({"a": [2.0, 1.0], "b": [2.0, other]}, 1e-3)

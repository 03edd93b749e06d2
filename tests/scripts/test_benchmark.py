"""scripts/dev/benchmark.py runs; the figures are not checked."""

import json
import math
import sys

import pytest

from scripts.dev import benchmark, peers
from scripts.dev.benchmark import main
from scripts.dev.contenders import Task
from scripts.dev.peers import MODELS, median_difference, require_equal_losses, seconds_to_first_loss
from tests.commands import run_script
from trainer.config import ConfigError
from trainer.config.load import load_config
from trainer.run.resolve import resolve
from trainer.runtime import device as devices


def lines_of(monkeypatch, capsys, *argv) -> list[list[str]]:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *map(str, argv)])
    main()
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_saves_are_measured_in_every_mode(monkeypatch, capsys, tmp_path):
    _, *table = lines_of(monkeypatch, capsys, "checkpoint", "--gib", "0.02", "--repeats", "1", "--folder", tmp_path)
    assert [line[0] for line in table] == ["off", "thread", "process"]
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
    assert [line[-1] for line in table] == ["%"] * 4
    assert table[0][-2] == table[2][-2] == "100"


@pytest.mark.parametrize(
    ("ranks", "contenders"),
    [(1, ["plain", "meshwright", "kernels"]), (2, ["fsdp2", "meshwright", "ddp", "meshwright-replicate"])],
)
def test_contenders_train_in_turn_with_equal_losses(monkeypatch, capsys, tmp_path, ranks, contenders):
    results = tmp_path / "results.json"
    words = ("--contenders", *contenders, "--ranks", ranks, "--steps", "2", "--repeats", "1", "--threads", "1")
    first, _, *table = lines_of(monkeypatch, capsys, "peers", "--model", "host-2", *words, "--json", results)
    assert first[:7] == ["the", "losses", "of", "all", "contenders", "agree", "within"]
    assert float(first[7]) <= 1e-4
    assert [line[0] for line in table] == contenders
    times = json.loads(results.read_text())["step_time_s"]
    assert {name: len(of_steps) for name, of_steps in times.items()} == dict.fromkeys(contenders, 2)


def test_times_to_the_first_loss_are_compared(monkeypatch, capsys):
    _, *table = lines_of(monkeypatch, capsys, "start", "--model", "host-2", "--repeats", "1", "--threads", "1")
    assert [line[0] for line in table] == ["plain", "meshwright"]
    assert all(float(line[1]) > 0 for line in table)


def test_a_command_without_a_loss_is_an_error():
    with pytest.raises(ConfigError, match="printed no loss: no such model"):
        seconds_to_first_loss([sys.executable, "-c", "print('no such model')"])


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_other_packages_have_the_losses_of_the_plain_loop(monkeypatch, capsys, name):
    pytest.importorskip("accelerate")
    words = ("--contenders", "plain", name, "--steps", "2", "--repeats", "1", "--threads", "1")
    _, _, *table = lines_of(monkeypatch, capsys, "peers", "--model", "host-2", *words)
    assert [line[0] for line in table] == ["plain", name]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["plain", "plain"], "--contenders plain: is given twice\n"),
        (["kernels"], "--contenders kernels: needs a training loop to compare with\n"),
        (["ddp"], "--contenders ddp: cannot run with --ranks 1\n"),
        (["plain", "--ranks", "2"], "--contenders plain: cannot run with --ranks 2\n"),
        (["plain", "--json", "."], "argument --json: .: is a folder\n"),
        (["plain", "--json", "no/such.json"], "argument --json: no: no such folder\n"),
        (["plain", "kernels", "--device", "gpu"], "--contenders kernels: can only replay the kernels of a CPU\n"),
    ],
)
def test_impossible_contenders_are_an_error_of_one_line(words, line):
    done = run_script("scripts/dev/benchmark.py", "peers", "--contenders", *words)
    assert (done.returncode, done.stderr) == (2, line)


def test_every_rank_needs_a_gpu(monkeypatch, capsys):
    for module in (peers, devices):
        monkeypatch.setattr(module, "gpu_count", lambda: 1)
    with pytest.raises(ConfigError, match="--ranks 2: every rank needs a GPU, and this node has 1"):
        lines_of(monkeypatch, capsys, "peers", "--contenders", "ddp", "--ranks", "2", "--device", "gpu")


@pytest.mark.parametrize("model", MODELS)
def test_the_trainer_gets_the_sizes_of_the_other_contenders(model, tmp_path):
    sizes, batch, seq = MODELS[model]
    task = Task(sizes, batch, seq, 1, 1, "fp32", compiled=False, device="cpu", log=False, folder=tmp_path)
    (tmp_path / "tokens.npy").touch()
    assert resolve(load_config(task.flags()), 1).sizes == sizes


def test_the_added_time_is_compared_within_each_turn():
    baseline = [1.0, 1.0, 5.0, 5.0, 9.0, 9.0]  # the machine slows down from turn to turn
    assert median_difference([1.5, 1.5, 5.25, 5.75, 9.0, 10.0], baseline, steps=2) == 0.5
    assert median_difference(baseline, baseline, steps=2) == 0.0


def test_no_time_counts_if_the_losses_differ():
    assert require_equal_losses({"a": [2.0, 1.0], "b": [2.0, 1.0001]}, 1e-3) == pytest.approx(1e-4)
    for other in (1.1, math.nan):
        with pytest.raises(ConfigError, match=r"b has another loss than a at step 2: .* and 1.0; no time counts"):
            require_equal_losses({"a": [2.0, 1.0], "b": [2.0, other]}, 1e-3)

"""scripts/plan.py, as users call it."""

import json
import subprocess
import sys

import pytest
import tomli

from tests.conftest import ROOT
from trainer.planning.recorder import KINDS


def plan(*words):
    command = [sys.executable, str(ROOT / "scripts" / "plan.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_a_run_is_planned_where_its_files_are_not():
    ended = plan("--config", "train_configs/llama3_8b.toml", "--model.overrides.n_layers", "2", "--tokens", "1e12")
    assert ended.returncode == 0, ended.stderr
    assert "\nfits: " in ended.stdout and "% MFU" in ended.stdout and "1e+12 tokens: " in ended.stdout
    assert "8 x h100 (dp_shard 8)" in ended.stdout


def test_a_picture_shows_every_kind_of_memory(tmp_path):
    picture = tmp_path / "memory.svg"
    ended = plan("--config", "train_configs/debug.toml", "--world", "2", "--picture", str(picture))
    assert ended.returncode == 0, ended.stderr
    drawn = picture.read_text()
    for words in (*KINDS, "peak", "grey: backward"):
        assert words in drawn, words


def test_what_goes_to_host_memory_has_a_verdict_of_its_own():
    words = ["--model.overrides.n_layers", "2", "--optimizer.offload", "state", "--host-memory-gib", "4"]
    ended = plan("--config", "train_configs/llama3_8b.toml", *words, "--world", "4")
    assert ended.returncode == 1, ended.stderr
    on_device, on_host = ended.stdout.splitlines()[-2:]
    assert on_device.startswith("fits: ") and on_host.startswith("host memory: does not fit: ")
    assert on_host.endswith("more than 4 GiB, a device's share")
    assert "the update there" in ended.stdout


def test_a_run_that_does_not_fit_ends_with_one():
    words = ["--config", "train_configs/llama3_8b.toml", "--model.overrides.n_layers", "2", "--memory-gib", "10"]
    ended = plan(*words, "--world", "4", "--json")
    assert ended.returncode == 1, ended.stderr
    told = json.loads(ended.stdout)
    assert told["fits"] is False and told["left_bytes"] < 0
    (rank,) = told["ranks"]
    assert sum(rank["by_kind"].values()) == rank["peak_bytes"]
    assert sum(size for kinds in rank["by_module"].values() for size in kinds.values()) == rank["peak_bytes"]
    # Parameters, two averages: 12 bytes each, and a counter for each parameter.
    assert told["checkpoint_bytes"] == pytest.approx(12 * told["parameters"], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--world", "6", "--parallel.tp", "4"], "--parallel.tp 4: must divide the 6 ranks of this run"),
        (["--picture", "memory.gif"], "--picture memory.gif: expected a name that ends in .png, .svg, .pdf"),
        (["--picture", "no/memory.png"], "--picture no/memory.png: there is no folder no"),
        (["--search", "--json"], "--search prints a table: not with --json, --tokens or --picture"),
        (["--picture", "/proc/memory.png"], "--picture /proc/memory.png: cannot be written ("),
        (["--reserve-gib", "500"], "--reserve-gib 500: more than the 79.1 GiB that there are"),
        (
            ["--search", "--world", "5", "--training.global_batch_size", "32"],
            "--training.global_batch_size 32: must be a multiple of local_batch_size 4 x 5 data-parallel ranks = 20",
        ),
        (["--rows", "3"], "--rows 3: of a table; needs --search"),
        (
            ["--device", "cpu", "--host-link-gbs", "3"],
            "--host-link-gbs: not with --device cpu, which has no other memory",
        ),
        (["--device", "h101"], "argument --device: invalid choice: 'h101'"),
        (["--training.stpes", "4"], "--training.stpes: unknown setting; did you mean '--training.steps'?"),
        (
            ["--compile.enabled", "true", "--activation_checkpoint.mode", "budget"],
            "--activation_checkpoint.mode budget: cannot be planned: the compiler chooses what is kept",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(words, line):
    ended = plan(*words)
    assert ended.returncode == 2 and ended.stderr.startswith(line) and len(ended.stderr.splitlines()) == 1


def test_a_search_ranks_what_fits_and_says_how_to_set_it():
    small = ["--config", "train_configs/llama3_8b.toml", "--model.overrides.n_layers", "2", "--training.seq_len", "512"]
    words = [*small, "--training.global_batch_size", "8", "--world", "4", "--search", "--rows", "4"]
    ended = plan(*words, "--memory-gib", "16", "--device", "a100")
    assert ended.returncode == 0, ended.stderr
    count, rows, settings, words_too = ended.stdout.split("\n\n")
    assert count == f"4 of {count.split()[2]} layouts simulated"
    told = [line.split() for line in rows.splitlines()[1:]]
    fitting = [float(words[0].replace(",", "")) for words in told if "no" not in words[4]]
    assert fitting == sorted(fitting, reverse=True) and "(as configured)" in rows
    tomli.loads(settings)
    said = words_too.split()
    assert said[0] == "or:" and said[1:] == flags(tomli.loads(settings))
    again = [*small, "--training.global_batch_size", "8", "--world", "4"]
    best = plan(*again, "--memory-gib", "16", "--device", "a100", *said[1:])
    assert best.returncode == 0 and f"{fitting[0]:,.0f} tokens per second" in best.stdout


def flags(settings):
    values = ((f"--{section}.{name}", value) for section, names in settings.items() for name, value in names.items())
    return [
        word for flag, value in values for word in (flag, str(value).lower() if isinstance(value, bool) else str(value))
    ]

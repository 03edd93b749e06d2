"""scripts/plan.py, as users call it."""

import json
import re
import shlex
import sys
from argparse import Namespace
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import tomli

from models import MODELS
from models.huggingface_config import write_config
from scripts import plan as script
from tests.commands import run_script
from trainer.base.config import ConfigError
from trainer.checkpoint.formats.folders import read_architecture
from trainer.runtime.accelerators import SHORT_NAMES
from trainer.tools.planner.recorded import MEMORY_CATEGORIES


def plan(*flags):
    return run_script("scripts/plan.py", *flags)


def number(text):
    return float(text.replace(",", ""))


def test_a_run_is_planned_without_its_files():
    price = ["--price-per-gpu-hour", "2.5"]
    ended = plan(
        "--config", "train_configs/llama3_8b.toml", "--model.overrides.n_layers", "2", "--tokens", "1e12", *price
    )
    assert ended.returncode == 0, ended.stderr
    assert "\nfits: " in ended.stdout and "% MFU" in ended.stdout
    rate, per_device = re.search(r" ([\d,]+) tokens per second \(([\d,]+) per device\)", ended.stdout).groups()
    assert number(per_device) == pytest.approx(number(rate) / 8, abs=1)
    pattern = r"  1e\+12 tokens: at least ([\d,.]+) days on 8 devices, ([\d,.e+]+) device hours, price ([\d,.]+)\n"
    days, hours, price = map(number, re.search(pattern, ended.stdout).groups())
    assert days == pytest.approx(1e12 / number(rate) / 86400, abs=0.1)
    assert hours == pytest.approx(24 * 8 * days, rel=1e-2) and price == pytest.approx(2.5 * hours, rel=1e-3)
    assert re.search(r"\n  20,000 steps \(2\.1e\+10 tokens\): at least [\d.]+ (days|hours) on 8 devices", ended.stdout)
    assert re.search(r"\n  rank 0 has its peak in (forward|backward) of [\w ]+, because of ", ended.stdout)
    assert "8 x h100 (dp_shard 8)" in ended.stdout


def test_a_plot_shows_every_category_of_memory_and_the_device_memory(tmp_path):
    plot_file = tmp_path / "memory.svg"
    ended = plan("--config", "train_configs/debug.toml", "--world-size", "2", "--plot", str(plot_file))
    assert ended.returncode == 0, ended.stderr
    drawn = plot_file.read_text()
    for text in (*MEMORY_CATEGORIES, "peak", "grey: backward", "device memory: 79.1 GiB"):
        assert text in drawn, text


def test_host_memory_has_its_own_verdict():
    flags = ["--model.overrides.n_layers", "2", "--optimizer.offload", "state", "--host-memory-gib", "4"]
    ended = plan("--config", "train_configs/llama3_8b.toml", *flags, "--world-size", "4")
    assert ended.returncode == 1, ended.stderr
    on_device, on_host = ended.stdout.splitlines()[-2:]
    assert on_device.startswith("fits: ") and on_host.startswith("host memory: does not fit: ")
    assert on_host.endswith("more than 4 GiB, the share of one device")
    assert "update in host memory" in ended.stdout


def test_a_model_in_hugging_faces_format_is_planned(tmp_path):
    spec = MODELS["gemma2"]
    (tmp_path / "config.json").write_text(json.dumps(write_config(spec.huggingface, spec.by_size["2b"], 8192)))
    flags = ["--model.huggingface", tmp_path, "--model.overrides.n_layers", "2", "--training.seq_len", "8192", "--json"]
    ended = plan(*flags, "--training.global_batch_size", "8", "--training.local_batch_size", "1")
    assert ended.returncode in (0, 1), ended.stderr
    assert json.loads(ended.stdout)["parameters"] == 256_000 * 2304 + 2304 + 2 * (
        4 * 2304 + 2304 * (2 * 2048 + 2 * 1024 + 3 * 9216)
    )


def test_a_run_in_epochs_has_no_duration_before_its_data_are_prepared():
    flags = ["--config", "train_configs/debug.toml", "--training.epochs", "2", "--world-size", "1"]
    flags += ["--training.batch_schedule.9", "64"]
    ended = plan(*flags, "--price-per-gpu-hour", "2", "--tokens", "1e6")
    assert "  2 epochs: the length in steps is known only when the data are prepared\n  1e+06 tokens: " in ended.stdout
    assert (
        "64 samples of 128 tokens per step (the largest batch, of which memory, traffic and step time are), 16 microbatches on "
        "each rank\n" in ended.stdout
    )
    assert ended.stdout.count("price") == 1 and " steps (" not in ended.stdout
    assert json.loads(plan(*flags, "--json").stdout)["run_s"] is None


def test_a_configuration_may_be_named_by_a_link(tmp_path):
    spec = MODELS["qwen3"]
    (tmp_path / "config.json").write_text(json.dumps(write_config(spec.huggingface, spec.by_size["debug"], 128)))
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "config.json"
    link.symlink_to(tmp_path / "config.json")
    assert read_architecture(link) == ("qwen3", spec.by_size["debug"])
    with pytest.raises(ConfigError, match="is a symbolic link to a path outside the folder"):
        read_architecture(link.parent)


def test_a_run_that_does_not_fit_exits_with_code_1():
    flags = ["--config", "train_configs/llama3_8b.toml", "--model.overrides.n_layers", "2", "--memory-gib", "10"]
    flags += ["--activation_checkpoint.mode", "selective"]
    ended = plan(*flags, "--world-size", "4", "--json")
    assert ended.returncode == 1, ended.stderr
    report = json.loads(ended.stdout)
    assert report["fits"] is False and report["free_bytes"] < 0
    assert report["is_tight"] is False and report["margin_bytes"] == 2**30
    assert report["tokens_per_second_per_device"] == pytest.approx(report["tokens_per_second"] / 4)
    assert report["run_s"] == pytest.approx(20_000 * report["step_time_s"])
    (rank,) = report["ranks"]
    assert sum(rank["by_category"].values()) == rank["peak_bytes"]
    assert sum(n for categories in rank["by_module"].values() for n in categories.values()) == rank["peak_bytes"]
    # Parameter and two moments: 12 bytes, and a step counter for each tensor.
    assert report["checkpoint_bytes"] == pytest.approx(12 * report["parameters"], rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--world-size", "6", "--parallel.tp", "4"], "--parallel.tp 4: must divide the number of ranks, 6"),
        (["--plot", "memory.gif"], "--plot memory.gif: the file name must end in .png or .svg or .pdf"),
        (["--plot", "no/memory.png"], "--plot no/memory.png: folder no does not exist"),
        (["--search", "--json"], "--search prints a table: it cannot be combined with --json, --tokens or --plot"),
        (["--plot", "/proc/memory.png"], "--plot /proc/memory.png: cannot be written ("),
        (["--memory-gib", "1e300"], "argument --memory-gib: 1e300: expected a number from 1e-18 to 1e+18"),
        (["--world-size", "1000000"], "argument --world-size: 1000000: expected an integer from 1 to 100000"),
        (["--reserve-gib", "500"], "--reserve-gib 500: must be less than the device's memory of 79.1 GiB"),
        (
            ["--search", "--world-size", "5", "--training.global_batch_size", "32"],
            "--training.global_batch_size 32: must be a multiple of local_batch_size 4 x 5 data-parallel ranks = 20",
        ),
        (["--json", "--price-per-gpu-hour", "2"], "--price-per-gpu-hour: cannot be combined with --json"),
        (
            ["--expert-imbalance", "0.5", "--parallel.tp", "2"],
            "--expert-imbalance 0.5: has no effect, because llama3/debug has no experts",
        ),
        (
            ["--expert-imbalance", "0.5", "--model.name", "mixtral"],
            "--expert-imbalance 0.5: has no effect with parallel.ep 1: a rank computes the experts of its own tokens",
        ),
        (
            ["--expert-imbalance", "3", "--model.name", "mixtral", "--parallel.ep", "2"],
            "--expert-imbalance 3: must be at most parallel.ep - 1 = 1: then one rank gets all rows",
        ),
        (
            ["--search", "--expert-imbalance", "0.5"],
            "--expert-imbalance 0.5: has no effect, because llama3/debug has no experts",
        ),
        (["--max-candidates", "3"], "--max-candidates 3: requires --search"),
        (
            ["--device", "cpu", "--pcie-gbs", "3"],
            "--device cpu: a CPU has no separate host memory; remove the flags for host memory and PCIe",
        ),
        (["--device", "h101"], f"--device h101: expected one of {', '.join(SHORT_NAMES)}, cpu; did you mean 'h100'?"),
        (["--training.stpes", "4"], "--training.stpes: unknown setting; did you mean '--training.steps'?"),
        (
            ["--compile.enabled", "true", "--activation_checkpoint.mode", "budget"],
            "--activation_checkpoint.mode budget: is incompatible with a plan: the compiler selects the activations to save",
        ),
    ],
)
def test_a_run_that_cannot_be_planned_is_one_line(flags, line):
    ended = plan(*flags)
    assert ended.returncode == 2 and ended.stderr.startswith(line) and len(ended.stderr.splitlines()) == 1


def test_a_full_disk_does_not_hide_the_plan(monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    result = SimpleNamespace(largest=None, fits=True)
    monkeypatch.setattr(script, "estimate", lambda *_: result)
    monkeypatch.setattr(script, "as_text", lambda *_: "the plan")
    monkeypatch.setattr(script, "headline", lambda *_: "")
    monkeypatch.setattr(
        script.Picture, "open", lambda *_: script.Picture(None, script.ROOT / "memory.png", "--plot memory.png")
    )
    monkeypatch.setattr(sys, "argv", ["plan.py", "--plot", "memory.png"])

    def full(*_, **__):
        raise ConfigError("", "--plot memory.png: cannot be written (No space left on device)")

    monkeypatch.setattr(script, "draw_memory", lambda *_: None)
    monkeypatch.setattr(script.Picture, "save", full)
    with pytest.raises(ConfigError):
        script.main()
    assert capsys.readouterr().out == "the plan\n"


def test_a_plot_without_matplotlib_leaves_no_file(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ended = plan("--plot", tmp_path / "memory.png")
    line = f"--plot {tmp_path}/memory.png: needs the package matplotlib: {sys.executable} -m pip install matplotlib\n"
    assert (ended.returncode, ended.stderr, list(tmp_path.iterdir())) == (2, line, [])


class Bar:
    """A bar of progress that keeps what it showed."""

    n, total = 0, None

    def __init__(self):
        self.shown = []

    def set_description(self, text):
        self.shown.append((text, self.n, self.total))

    def update(self, n):
        self.n += n


def test_a_search_ranks_layouts_and_prints_the_settings_of_the_best(tmp_path, monkeypatch):
    bar = Bar()
    monkeypatch.setattr("trainer.tools.planner.search.progress", lambda *_, **__: nullcontext(bar))
    small = ["--config", "train_configs/llama3_8b.toml", "--model.overrides.n_layers", "2", "--training.seq_len", "512"]
    hardware = ["--world-size", "4", "--memory-gib", "17", "--device", "a100", "--gpus-per-node", "1"]
    tight = ["--activation_checkpoint.mode", "selective", "--training.reduce_every_microbatch", "false"]
    batch = ["--training.global_batch_size", "8"]
    ended = plan(*small, *batch, *hardware, *tight, "--search", "--max-candidates", "3")
    assert ended.returncode == 0, ended.stderr
    count, table, *_, settings, command_line, duration = ended.stdout.split("\n\n")
    (first, *_), *batches = bar.shown
    assert first == f"measuring blocks for at most 3 of {count.split()[2]} layouts"
    assert batches[0][0].startswith("layouts 1 to ") and batches[0][0].endswith(" of at most 3")
    totals = [total for _, _, total in batches]
    assert 0 < batches[0][1] < bar.n <= totals[-1] and totals == sorted(totals, reverse=True)
    assert duration.startswith("20,000 steps (8.19e+07 tokens): at least ")
    assert count == f"3 of {count.split()[2]} layouts simulated"
    rows = [
        re.match(r" *([\d,]+) +[\d,]+ +[\d.]+% +[\d.]+ [GM]iB (      |tight |no fit) ", line)
        for line in table.splitlines()[1:]
    ]
    found = [({"      ": 0, "tight ": 1, "no fit": 2}[row[2]], -number(row[1])) for row in rows]
    assert found == sorted(found) and found[0][0] == 0 and "(as configured)" in table
    text, _, command = command_line.partition(": ")
    *words, redirection, name = shlex.split(command)
    assert (text, redirection, name) == ("or, to write a complete file", ">", "llama3_8b_4gpus.toml")
    expected = pairs([*small, *batch, *tight]) | flags(tomli.loads(settings))
    assert (words[:2], pairs(words[2:-1]), words[-1]) == (["python", "scripts/plan.py"], expected, "--print-config")
    (tmp_path / name).write_text(plan(*words[2:]).stdout)
    best = plan("--config", tmp_path / name, *hardware)
    assert best.returncode == 0 and f"{-found[0][1]:,.0f} tokens per second" in best.stdout
    assert "; tight: " not in best.stdout


def test_an_interrupted_search_prints_what_it_has_found(monkeypatch, capsys):
    def interrupted(*_):
        yield 5, ["one layout"]
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "search", interrupted)
    monkeypatch.setattr(
        script, "ranking", lambda count, found, *others: f"{len(found)} of {count} layouts, {others[-1]}"
    )
    with pytest.raises(KeyboardInterrupt):
        script.print_search(
            None, None, Namespace(max_candidates=None, price_per_gpu_hour=None, expert_imbalance=0.0), []
        )
    assert capsys.readouterr().out == "1 of 5 layouts, False\n"


def pairs(words):
    return dict(zip(words[::2], words[1::2], strict=True))


def flags(settings):
    values = {f"--{section}.{name}": value for section, names in settings.items() for name, value in names.items()}
    return {flag: str(value).lower() if isinstance(value, bool) else str(value) for flag, value in values.items()}

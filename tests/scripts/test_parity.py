"""scripts/parity.py: output and exit codes."""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from scripts import parity
from tests.conftest import ROOT
from trainer.base.config.exits import run_to_end
from trainer.tools.testing import parity as comparison
from trainer.tools.testing.bugs import BUGS
from trainer.tools.testing.layouts import Layout
from trainer.tools.testing.parity import Trained, deviations, within


def main(monkeypatch, *argv):
    steps = [] if "transformers" in argv else ["--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["parity.py", *steps, "--microbatches", "1", *argv])
    with pytest.raises(SystemExit) as exit:
        run_to_end(parity.main)
    return exit.value.code


def test_a_layout_passes_and_the_injected_error_is_caught(monkeypatch, tiny, capsys):
    assert main(monkeypatch, *tiny, "--layout", "tp=2", "--layout", "dp_shard=2 training.compute_dtype=bf16") == 0
    header, tp, bf16, *lines, summary = capsys.readouterr().out.splitlines()
    assert header.split() == ["layout", "ranks", "micro", "loss", "grad", "norm", "gradient", "time"]
    assert tp.startswith("tp=2 ") and tp.endswith("pass")
    assert " pass" in bf16
    controls = [line for line in lines if line.startswith("negative control: ")]
    assert len(controls) == 2 and all(line.endswith(" caught") for line in controls)
    assert summary.startswith("2 of 2 pass")


CONTROLS = {
    "qwen3 with windows": (
        ["--model.name", "qwen3", "--model.overrides.window", "10", "--model.overrides.layer_types", "full,sliding"],
        {
            "gradients averaged",
            "gradients of head norms",
            "gradients of replicated norms",
            "window off",
        },
    ),
    "conversations": (
        ["--config", str(ROOT / "train_configs" / "sft_debug.toml"), "--training.global_batch_size", "4"],
        {"gradients averaged", "gradients of replicated norms", "losses averaged", "documents visible"},
    ),
    "conversations with a hybrid model, tied, and multi-token prediction": (
        [
            *("--config", str(ROOT / "train_configs" / "sft_debug.toml"), "--training.global_batch_size", "4"),
            *("--model.name", "qwen3.5", "--model.overrides.layer_types", "linear,full"),
            *("--model.overrides.tied_embeddings", "true", "--model.overrides.prediction_layers", "1"),
            *("--training.prediction_weight", "0.3"),
            *("--layout", "cp=2", "--layout", "tp=2", "--layout", "pp=2"),  # those of the bugs
        ],
        {
            *("gradients averaged", "gradients of head norms", "gradients of replicated norms", "losses averaged"),
            *(
                "documents visible",
                "gradients of a shared table",
                "future tokens",
                "state of a recurrence",
                "convolution reads",
            ),
            *("convolution begins", "state before a part of a sequence is", "state before a part of a sequence has"),
            *("maps of chunks", "decay missing", "norm of a recurrence"),
        },
    ),
    "transformers": (
        ["--reference", "transformers", "--training.z_loss", "0.01"],
        {"z-loss of", "gradients averaged", "gradients of replicated norms", "neighbouring values"},
    ),
    "adapters": (
        ["--lora.rank", "4", "--checkpoint.init_from", "{hf_model}"],
        {"gradients averaged", "gradients of replicated adapter matrices"},
    ),
    "adapters on a base in 4 bits": (
        [
            *("--lora.rank", "4", "--lora.base_dtype", "nf4_double", "--checkpoint.init_from", "{hf_wide}"),
            *("--model.overrides.dim", "128", "--model.overrides.hidden_dim", "128"),
        ],
        {"gradients averaged", "gradients of replicated adapter matrices", "scales of quantized", "codes of quantized"},
    ),
    "adapters of experts": (
        ["--model.huggingface", "{hf_mixture}", "--lora.rank", "4", "--checkpoint.init_from", "{hf_mixture}"],
        {
            *("gradients averaged", "gradients of replicated adapter matrices", "gradients of experts", "rows sent"),
            *("gradients of a sequence's", "gradient norm without", "gradient norm of experts"),
            *("adapters of experts added", "adapters of experts shared", "adapters of experts without"),
        },
    ),
    "pairs": (
        [
            *("--preference.loss", "dpo", "--checkpoint.init_from", "{hf_model}", "--training.seq_len", "256"),
            *("--data.dataset", "preference", "--data.path", "", "--data.chat_template", "llama3"),
            *("--data.packing", "best-fit", "--data.document_mask", "true", "--data.long_documents", "drop"),
        ],
        {"gradients averaged", "gradients of replicated norms", "losses averaged", "answers not summed"},
    ),
    "muon and z-loss": (
        ["--optimizer.name", "muon", "--training.z_loss", "0.01"],
        {"gradients averaged", "gradients of replicated norms", "shards orthogonalized", "z-loss of"},
    ),
    "float8": (
        ["--training.float8", "rowwise", "--model.overrides.dim", "64"],
        {"gradients averaged", "gradients of replicated norms", "float8 scales"},
    ),
    "experts": (
        ["--model.name", "deepseek-v3", "--experts.balance_loss", "0.1", "--experts.bias_rate", "0.1"],
        {
            *("gradients averaged", "gradients of replicated norms", "gradients of routers", "gradients of experts"),
            *("rows sent", "gradients of a sequence's", "gradient norm without", "gradient norm of experts"),
            *("balance loss without", "balance loss not", "balance loss of", "load of experts", "corrections changed"),
        },
    ),
}


def saved_model(folder, name, **config):
    """Save a small model with random weights. name: of its class in transformers, without its task. Return the folder."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048}
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes, **config))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hf_mixture(tmp_path_factory):
    """A folder with a small Mixtral model, saved by transformers."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_local_experts": 4, "max_position_embeddings": 64}
    return saved_model(tmp_path_factory.mktemp("hf_mixture"), "Mixtral", **sizes)


@pytest.fixture(scope="module")
def hf_wide(tmp_path_factory):
    """A folder with a small Llama model whose rows are multiples of 64, also on two tensor-parallel ranks."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
    return saved_model(tmp_path_factory.mktemp("hf_wide"), "Llama", **sizes)


def test_every_injected_bug_has_a_run():
    expected = {start for _, starts in CONTROLS.values() for start in starts}
    assert [name for name in BUGS if not name.startswith(tuple(expected))] == []


@pytest.mark.parametrize("case", CONTROLS)
def test_every_injected_bug_is_caught_and_names_a_wrong_parameter(
    monkeypatch, tiny, hf_model, hf_mixture, hf_wide, tmp_path, capsys, case
):
    argv, expected = CONTROLS[case]
    argv = [word.format(hf_model=hf_model, hf_mixture=hf_mixture, hf_wide=hf_wide) for word in argv]
    base = [] if "--config" in argv else tiny
    layout = ["--run.output_folder", str(tmp_path), "--layout", "dp_shard=1"]
    assert main(monkeypatch, *base, *argv, *layout, "--model.overrides.n_layers", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    found = {}
    for line, below in itertools.pairwise(lines):
        if line.startswith("negative control: "):
            assert " s caught" in line, line
            found[line.removeprefix("negative control: ").split("  ")[0]] = below.split(":")[0].strip()
    assert {next(name for name in found if name.startswith(start)) for start in expected} == found.keys()
    for name in found:
        assert not BUGS[name].parameters or BUGS[name].parameters in found[name]
    assert sum(" pass" in line for line in lines) == 2 + argv.count(
        "--layout"
    )  # rows of correct runs, and the last line


def test_float8_in_stages_with_experts_equals_one_rank(monkeypatch, tiny, capsys):
    """Such runs are computed in double precision."""
    only = {name: bug for name, bug in BUGS.items() if name.startswith("float8")}
    monkeypatch.setattr(parity, "BUGS", only)
    model = ["--model.name", "mixtral", "--model.overrides.dim", "64", "--training.float8", "tensorwise"]
    assert main(monkeypatch, *tiny, *model, "--layout", "dp_shard=2 pp=2 ep=2") == 0
    _, row, control, *_ = capsys.readouterr().out.splitlines()
    assert " pass" in row and " caught" in control


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3"])
def test_models_with_experts_are_compared_with_transformers(monkeypatch, tiny, capsys, family):
    monkeypatch.setattr(
        parity, "BUGS", {name: bug for name, bug in BUGS.items() if name.startswith("gradients averaged")}
    )
    layout = ["--layout", "tp=2 ep=2"]
    assert main(monkeypatch, *tiny, "--model.name", family, "--reference", "transformers", *layout) == 0
    assert " pass" in capsys.readouterr().out.splitlines()[1]


def test_a_deviation_above_the_limit_fails(monkeypatch, tiny, capsys):
    monkeypatch.setattr(comparison, "LIMITS", {"fp32": {"loss": -1.0, "grad_norm": 1.0, "gradient": 1.0}})
    assert main(monkeypatch, *tiny, "--layout", "cp=2") == 1
    assert "FAIL" in capsys.readouterr().out


def test_a_control_that_is_not_caught_fails(monkeypatch, tiny, capsys):
    monkeypatch.setattr(comparison, "LIMITS", {"fp32": {"loss": 1.0, "grad_norm": 1.0, "gradient": 1.0}})
    assert main(monkeypatch, *tiny, "--layout", "dp_shard=1") == 1
    assert "NOT CAUGHT" in capsys.readouterr().out


def test_a_layout_that_does_not_fit_is_reported(monkeypatch, tiny, capsys):
    monkeypatch.setattr(parity, "PARITY_MATRIX", ["tp=16", "dp_shard=1"])
    assert main(monkeypatch, *tiny) == 0
    assert "tp=16" in (line := capsys.readouterr().out.splitlines()[1])
    assert line.endswith("does not fit: --parallel.tp 16: must divide n_heads 8 of llama3/debug")


LINES = {
    ("--layout", "tp=16"): "--layout 'tp=16': --parallel.tp 16: must divide n_heads 8 of llama3/debug",
    ("--layout", "tp"): "--layout 'tp': tp: expected name=value",
    ("--layout", "optimizer.offload=state_and_gradients"): (
        "--layout 'optimizer.offload=state_and_gradients': --optimizer.offload state_and_gradients: is incompatible with a "
        "comparison of gradients: none are left after a step"
    ),
    ("--layout", "ttp=2"): "--layout 'ttp=2': ttp: is not a setting of [parallel]; did you mean 'tp'?",
    (
        "--layout",
        "model.n_layers=2",
    ): "--layout 'model.n_layers=2': --model.n_layers: unknown setting; use '--model.overrides': n_layers; "
    "model.name and model.size choose a published model; an override changes one dimension of it",
    (
        "--layout",
        "dp_shard=3",
    ): "--layout 'dp_shard=3': training.global_batch_size: 8 must be a multiple of 3, the number of microbatches on all "
    "data-parallel ranks",
    ("--training.local_batch_size", "3", "--training.global_batch_size", "8"): (  # of the reference, before any row
        "--training.global_batch_size 8: must be a multiple of local_batch_size 3 x 1 data-parallel ranks = 3"
    ),
    ("--layout", "dp_shard=-1"): "--layout 'dp_shard=-1': dp_shard must be a number of ranks here (default: 1)",
    ("--training.stps", "5"): "--training.stps: unknown setting; did you mean '--training.steps'?",
    ("--layout", "tp=2 tp=4"): "--layout 'tp=2 tp=4': tp=4: tp is given twice",
    ("--layout", ""): "--layout '': : expected name=value",
    ("--layout", "=2"): "--layout '=2': =2: expected name=value",
    ("--parallel.tp", "2"): "--parallel.tp 2: only --layout 'name=value ...' can set [parallel]",
    ("--reference", "transformers", "--training.float8", "rowwise"): (
        "--training.float8 rowwise: is incompatible with --reference transformers: transformers has no float8"
    ),
    ("--steps", "3", "--reference", "transformers"): (
        "--steps 3 has no effect: --reference transformers compares the first step"
    ),
    ("--steps", "0"): "argument --steps: 0: expected an integer from 1 to 2147483648",
    ("--microbatches", "0"): "argument --microbatches: 0: expected an integer from 1 to 2147483648",
}


@pytest.mark.parametrize("argv", LINES, ids=str)
def test_an_invalid_argument_is_one_line(monkeypatch, tiny, capsys, argv):
    assert main(monkeypatch, *tiny, *argv) == 2
    assert capsys.readouterr().err.strip() == LINES[argv]


def test_a_file_with_a_parallel_layout_is_compared_with_one_rank(monkeypatch, tiny, tmp_path, capsys):
    layout = '[parallel]\ntp = 2\npp = 2\n[activation_checkpoint]\nmode = "full"\nsave = ["matmuls"]\n'
    (tmp_path / "layout.toml").write_text(Path(tiny[1]).read_text() + layout)
    assert main(monkeypatch, "--config", str(tmp_path / "layout.toml"), "--layout", "cp=2") == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:3] == ["cp=2", "2", "1"]


def test_an_odd_batch_has_a_negative_control(monkeypatch, tiny, capsys):
    batch = ["--training.global_batch_size", "3", "--training.local_batch_size", "1"]
    assert main(monkeypatch, *tiny, *batch, "--layout", "tp=2") == 0
    assert capsys.readouterr().out.splitlines()[2].endswith("caught")


def test_sigterm_ends_the_ranks(tiny, tmp_path):
    """SIGTERM reaches the script only, in the middle of a run."""
    command = [sys.executable, str(ROOT / "scripts" / "parity.py"), *tiny, "--steps", "100000", "--layout", "tp=2"]
    script = subprocess.Popen(
        command, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    while not list(tmp_path.glob("parity-*/*/metrics.jsonl")):
        assert script.poll() is None, script.stdout.read().decode()
        time.sleep(0.1)
    script.terminate()
    assert script.wait(60) == 143
    assert list(tmp_path.glob("parity-*")) == []


def test_deviations_are_relative_and_the_largest_over_all_steps():
    reference = [{"step": 1, "loss": 2.0, "grad_norm": 1.0}, {"step": 2, "loss": 4.0, "grad_norm": 1.0}]
    records = [{"step": 1, "loss": 2.0, "grad_norm": 1.5}, {"step": 2, "loss": 4.4, "grad_norm": 1.0}]
    a, b, zero = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), torch.tensor([1e-9, 0.0])
    expected = Trained(reference, ({"a": a, "zero": zero}, {"a": a, "zero": zero}))
    deviation = deviations(expected, Trained(records, ({"a": a, "zero": zero}, {"a": b, "zero": -zero})))
    # The gradient that is rounding error has the wrong sign.
    assert deviation == {key: pytest.approx(v) for key, v in {"loss": 0.1, "grad_norm": 0.5, "gradient": 0.1}.items()}
    assert not within(deviation, {"loss": 0.2, "grad_norm": 0.4, "gradient": 0.2})
    assert within(deviation, {"loss": 0.2, "grad_norm": 0.6, "gradient": 0.2})
    large = {"loss": 1.0, "grad_norm": 1.0, "gradient": 1.0}
    nan = [records[0], dict(records[1], loss=float("nan"))]
    assert not within(deviations(expected, Trained(nan, expected.gradients)), large)
    gradients = {"a": a * float("nan"), "zero": zero}
    assert not within(deviations(expected, Trained(records, (gradients, gradients))), large)


def test_the_run_on_one_rank_shares_the_settings_that_change_the_result():
    layout = Layout.parse("tp=2 compile.enabled=true model.overrides.n_layers=4 training.compute_dtype=bf16")
    assert layout.single_rank_settings == {"model.overrides.n_layers": "4", "training.compute_dtype": "bf16"}

"""The best checkpoint of a run, under every name and in every command that finds it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.commands import run_script
from tests.conftest import ROOT
from tests.test_python_page import OF_TORCHRUN
from tests.training_runs import checkpoint_of, combine, in_folder, records, train
from trainer.base.config import CheckpointConfig, ConfigError
from trainer.base.config.checkpoints import best_step, list_checkpoints, resolve_checkpoint
from trainer.base.config.load import load_config
from trainer.base.system.paths import split_best
from trainer.base.system.run_files import step_of
from trainer.checkpoint.formats.export import export_run, is_export_of
from trainer.inference import load_model

WORSENS = ["--training.steps", "8", "--optimizer.lr", "1.0", "--lr_schedule.warmup_steps", "8"]
"""The learning rate rises until it degrades the model."""
TRACKED = [
    "--evaluation.interval_steps",
    "2",
    "--evaluation.max_samples",
    "16",
    "--evaluation.keep_best_on",
    "held_out",
]


@pytest.fixture(scope="module")
def trained(ranks, tiny, tmp_path_factory):
    """The folder of a run whose best checkpoint is not its last one, with an export."""
    folder = tmp_path_factory.mktemp("best") / "run"
    export = ["--checkpoint.export_huggingface", "true"]
    ranks(1).run(train, [*tiny, *in_folder(folder), *WORSENS, *TRACKED, *export])
    return folder


@pytest.fixture(scope="module")
def best(trained):
    losses = {r["step"]: r["loss"] for r in records(trained, "eval")}
    step = min(losses, key=losses.get)
    assert step < 8
    return trained / "checkpoints" / f"step-{step:08}"


def at_best(folder):
    return folder.with_name(f"{folder.name}@best")


def test_a_path_that_ends_in_best_is_the_best_checkpoint(trained, best):
    assert resolve_checkpoint(at_best(trained)) == best
    assert split_best(f"{at_best(trained)}/") == (trained, True)
    assert resolve_checkpoint(trained) == checkpoint_of(trained)
    loaded, _ = load_model(at_best(trained))
    expected, _ = load_model(best)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), expected.parameters(), strict=True))


def test_a_run_begins_with_the_best_weights_of_another(tiny, trained, best):
    config = load_config([*tiny, "--from", str(at_best(trained))])
    assert resolve_checkpoint(Path(config.checkpoint.init_from)) == best
    assert Path(config.tokenizer.path).parent == best


def test_a_folder_with_such_a_name_is_meant_itself(trained, tmp_path):
    shutil.copytree(checkpoint_of(trained), tmp_path / "run@best")
    assert resolve_checkpoint(tmp_path / "run@best") == tmp_path / "run@best"


def test_a_run_without_a_best_checkpoint_is_one_line(trained, tmp_path):
    with pytest.raises(ConfigError, match=r"none: expected a folder|none: no such"):
        resolve_checkpoint(tmp_path / "none@best")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty/checkpoints contains no checkpoint"):
        resolve_checkpoint(tmp_path / "empty@best")
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(resolve_checkpoint(tmp_path / "run@best"))
    with pytest.raises(ConfigError, match=r"the best checkpoint, step \d+, does not exist anymore"):
        resolve_checkpoint(tmp_path / "run@best")
    (remaining,) = [path for path in (tmp_path / "run" / "checkpoints").iterdir() if step_of(path) == 8]
    state = json.loads((remaining / "train_state.json").read_text())
    (remaining / "train_state.json").write_text(json.dumps(state | {"best": []}))
    with pytest.raises(ConfigError, match=r"has no best checkpoint: the run had no \[evaluation\] keep_best_on"):
        resolve_checkpoint(tmp_path / "run@best")


def test_the_list_marks_the_best_checkpoint(trained, best):
    lines = run_script("scripts/checkpoint.py", "list", trained).stdout.splitlines()
    assert [line.split()[0] for line in lines if line.endswith(", best")] == [best.name]
    assert run_script("scripts/checkpoint.py", "verify", at_best(trained)).stdout == f"{best}: intact\n"


def test_the_export_at_the_end_is_the_best_checkpoint_unless_the_user_says_last(ranks, trained, best, tmp_path):
    assert is_export_of(trained / "huggingface", best, averaged=False)
    log = (trained / "log.txt").read_text()
    exported = f"exported {best.name} to {trained}/huggingface, the best checkpoint; the last is step 8"
    assert f"{exported} (checkpoint.export_checkpoint = auto)\n" in log
    assert log.endswith(f"; the best checkpoint is {trained}@best, of step {step_of(best)}\n")
    shutil.copytree(trained, tmp_path / "run")
    exported = tmp_path / "run" / "huggingface"
    shutil.rmtree(exported)
    last = CheckpointConfig(export_huggingface=True, export_checkpoint="last")
    ranks(1).run(export_run, tmp_path / "run", last)
    assert is_export_of(exported, checkpoint_of(tmp_path / "run"), averaged=False)


@pytest.mark.parametrize("other", ["export_averaged", "evaluation.averaged"])
def test_the_best_weights_are_exported_as_they_were_evaluated(tiny, other):
    key = f"checkpoint.{other}" if other == "export_averaged" else other
    argv = [
        *tiny,
        *TRACKED,
        "--checkpoint.export_huggingface",
        "true",
        "--optimizer.ema_decay",
        "0.9",
        f"--{key}",
        "true",
    ]
    with pytest.raises(
        ConfigError, match="the best weights are those evaluated; export_checkpoint = last needs neither"
    ):
        load_config(argv)
    load_config([*argv, "--checkpoint.export_checkpoint", "last"])
    load_config(combine([*argv, "--evaluation.keep_best_on", ""]))


def test_each_command_says_which_checkpoint_of_a_run_it_takes(ranks, tiny, trained, best, tmp_path, capfd):
    last = checkpoint_of(trained)
    newest = f"the newest checkpoint; the best by its evaluations is {trained}@best, of step {step_of(best)}"
    of_best = "the best checkpoint by its evaluations; the newest is step 8"
    environment = {name: value for name, value in os.environ.items() if name not in OF_TORCHRUN}
    chosen = [(trained, last, newest), (at_best(trained), best, of_best), (best, best, "")]
    for number, (source, checkpoint, why) in enumerate(chosen):
        said = [f"{checkpoint}: {why}"] if why else []
        converted = run_script("scripts/convert_hf.py", "to-hf", source, tmp_path / str(number)).stdout.splitlines()
        assert converted == [*said, f"{tmp_path / str(number)}: written"]
        words = [str(ROOT / "scripts" / "generate.py"), str(source), "--prompt", "def", "--max-new-tokens", "1"]
        generated = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
        assert generated.stderr.splitlines() == said
        load_model(source)
        assert capfd.readouterr().err.splitlines() == (said if source == trained else [])
        ranks(1).run(
            train, [*tiny, *in_folder(tmp_path / f"run{number}"), "--training.steps", "1", "--from", str(source)]
        )
        log = (tmp_path / f"run{number}" / "log.txt").read_text()
        (line,) = [line for line in log.splitlines() if " weights: loaded from " in line]
        assert (
            str(checkpoint) in line
            and line.endswith(f"{why})")
            and ("the newest checkpoint" in line) == (source == trained)
        )


def test_a_new_run_starts_from_the_best_checkpoint(ranks, tiny, trained, best, tmp_path):
    losses = []
    for source in (at_best(trained), best, trained):
        folder = tmp_path / str(len(losses))
        argv = [*tiny, *in_folder(folder), "--training.steps", "1", "--checkpoint.init_from", str(source)]
        ranks(1).run(train, argv)
        losses.append(records(folder)[0]["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_a_run_goes_back_to_its_best_checkpoint_once(ranks, tiny, trained, best, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    argv = [*tiny, *in_folder(folder), *WORSENS[2:], *TRACKED, "--checkpoint.load_step", "best"]
    ranks(1).run(train, [*argv, "--training.steps", str(step_of(best) + 1)])
    steps = [step_of(path) for path in list_checkpoints(folder / "checkpoints")]
    assert steps[:2] == [step_of(best) + 1, step_of(best)]
    assert best_step(folder / "checkpoints") == step_of(best) + 1, "the loss has improved"
    ranks(1).run(train, [*argv, "--training.steps", str(step_of(best) + 2)])
    assert (folder / "checkpoints" / f"step-{step_of(best) + 1:08}").exists(), "the same command continues"

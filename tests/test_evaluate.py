"""Several evaluation datasets, the best checkpoint, and phases of a mixture."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.faults.harness import write_corpus
from tests.training_runs import records, train
from trainer.base.config import DataConfig, EvaluationConfig, TokenizerConfig
from trainer.base.system import console
from trainer.base.system.run_files import latest_per_step, step_of
from trainer.checkpoint.best import BestTracker
from trainer.data.build import open_datasets
from trainer.data.datasets import prepare_datasets
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.tools.testing.ranks import RankError


@pytest.fixture(scope="module")
def two_datasets(tiny, tmp_path_factory):
    """Arguments of a run with an evaluation dataset, and the folder of its texts."""
    folder = tmp_path_factory.mktemp("datasets")
    write_corpus(folder / "other", 40, seed=5)
    (folder / "datasets.toml").write_text(
        Path(tiny[1]).read_text()
        + f'[evaluation]\ninterval_steps = 2\ndatasets = {{ other = "text:{folder}/other" }}\n'
    )
    return ["--config", str(folder / "datasets.toml")], folder


def run(ranks, argv, folder, *more, size=1):
    ranks(size).run(train, [*argv, "--run.output_folder", str(folder), "--run.name", "run", *more])
    return folder / "run"


def train_logged(argv):
    """Train, and return what the rank has logged."""
    lines = []
    with (
        mock.patch.object(console, "info", side_effect=lines.append),
        mock.patch.object(console, "warning", side_effect=lines.append),
    ):
        train(argv)
    return lines


def test_every_dataset_has_the_same_loss_on_any_number_of_ranks(ranks, two_datasets, tmp_path):
    argv, _ = two_datasets
    z_loss = ["--training.z_loss", "0.01"]  # of the training only
    folders = [run(ranks, argv, tmp_path / str(size), *z_loss, size=size) for size in (1, 2)]
    one, two = (records(folder, "eval") for folder in folders)
    for a, b in zip(*(records(folder, "train") for folder in folders), strict=True):
        assert a["z_loss"] == pytest.approx(b["z_loss"], rel=5e-6) and a["z_loss"] > a["loss"]
    assert [(r["step"], r["dataset"]) for r in one] == [(2, "held_out"), (2, "other"), (4, "held_out"), (4, "other")]
    for a, b in zip(one, two, strict=True):
        assert a["num_targets"] == b["num_targets"]
        assert a["loss"] == pytest.approx(b["loss"], rel=5e-6)
        assert a["perplexity"] == pytest.approx(math.exp(a["loss"])) and "z_loss" not in a


def test_bits_per_byte_count_the_bytes_of_the_text(ranks, two_datasets, tmp_path):
    argv, folder = two_datasets
    record = records(run(ranks, argv, tmp_path), "eval")[-1]
    tokenizer = load_tokenizer(TokenizerConfig())
    datasets = {"other": f"text:{folder}/other"}
    data = DataConfig(dataset="text", path=str(folder / "other"), store_folder=str(tmp_path / "stores"))
    samples = open_datasets(
        data, datasets, prepare_datasets(data, datasets, TokenizerConfig(), tokenizer, 32, pairs=False), 32
    ).evaluation["other"]
    labels = samples[np.arange(len(samples))].labels
    special = set(tokenizer.special_tokens.values())
    text = tokenizer.decode([token for token in labels.flatten().tolist() if token not in special])
    bits = record["loss"] * record["num_targets"] / math.log(2)
    assert labels.numel() == record["num_targets"]
    assert record["bits_per_byte"] == pytest.approx(bits / len(text.encode()), rel=1e-6)


def test_the_best_checkpoint_is_saved_and_kept(ranks, two_datasets, tmp_path):
    """A learning rate that degrades the model after some steps makes an early step the best."""
    more = ["--evaluation.keep_best_on", "other", "--checkpoint.interval_steps", "5", "--checkpoint.keep", "1"]
    more += ["--training.steps", "15", "--optimizer.lr", "1.0", "--evaluation.interval_steps", "1"]
    folder = run(ranks, two_datasets[0], tmp_path, *more, "--lr_schedule.warmup_steps", "14")
    losses = {r["step"]: r["loss"] for r in records(folder, "eval") if r["dataset"] == "other"}
    best = min(losses, key=losses.get)
    assert best < 15
    assert sorted(step_of(path) for path in latest_per_step(folder / "checkpoints")) == [best, 15]


def test_losses_of_averages_are_not_compared_with_losses_of_weights():
    config = EvaluationConfig(keep_best_on="other")
    assert BestTracker(config, "a").identity != BestTracker(replace(config, averaged=True), "a").identity


@pytest.mark.parametrize(("data", "steps", "best"), [("a", [10, 20], 10), ("b", [10, 20], 0), ("a", [20], 0)])
def test_the_best_step_is_ignored_if_its_data_or_its_checkpoint_is_gone(data, steps, best):
    before = BestTracker(EvaluationConfig(keep_best_on="other"), "a")
    before.update("other", {"loss": 2.0})
    before.before_save(10)
    after = BestTracker(EvaluationConfig(keep_best_on="other"), data)
    after.load_state(json.loads(json.dumps(before.state())), steps)
    assert after.step == best
    after.update("other", {"loss": 2.5})
    assert after.pending == (best == 0)


def test_an_unknown_dataset_in_keep_best_on_is_an_error(ranks, two_datasets, tmp_path):
    with pytest.raises(
        RankError, match=r"evaluation\.keep_best_on: unknown evaluation dataset or task; available: held_out, other"
    ):
        run(ranks, two_datasets[0], tmp_path, "--evaluation.keep_best_on", "ohter")


@pytest.fixture(scope="module")
def one_text(tiny, tmp_path_factory):
    """Arguments of a run on one file of 480 tokens."""
    folder = tmp_path_factory.mktemp("one_text")
    (folder / "my.txt").write_text("a text of my own\n" * 80)
    text = Path(tiny[1]).read_text().replace("held_out_fraction = 0.1", "held_out_fraction = 0.02")
    lines = [f'path = "{folder}/my.txt"' if line.startswith("path") else line for line in text.splitlines()]
    (folder / "one.toml").write_text("\n".join([*lines, "[evaluation]", "interval_steps = 2"]))
    return ["--config", str(folder / "one.toml")]


def test_one_text_file_trains_and_evaluates_equally_on_two_ranks_and_after_a_resume(ranks, one_text, tmp_path):
    folder, more = tmp_path / "run", ["--checkpoint.interval_steps", "2"]
    argv = [*one_text, "--run.output_folder", str(tmp_path), "--run.name", "run", *more]
    log = "\n".join(ranks(1).run(train_logged, argv)[0])
    one = records(folder, "eval")
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    two = records(run(ranks, one_text, tmp_path, "--checkpoint.interval_steps", "2", size=2), "eval")
    assert [record["step"] for record in one] == [record["step"] for record in two] == [2, 4]
    assert one[1]["loss"] == pytest.approx(two[1]["loss"], rel=5e-6)
    assert one[0]["num_targets"] == 12
    assert "so that the last 13 of 642 tokens are held out instead" in log
    assert "over only 12 targets (" in log
    assert (
        "held_out: its loss will be rough, because it has only 12 target tokens; increase [data] held_out_fraction, or "
        "name other data in [evaluation] datasets (with held_out_fraction = 0, these alone are evaluated); without evaluation, "
        "set interval_steps = 0"
    ) in log


def test_a_run_without_evaluation_is_not_resumed_with_evaluation_of_what_it_was_trained_on(ranks, one_text, tmp_path):
    run(ranks, one_text, tmp_path, "--evaluation.interval_steps", "0", "--training.steps", "2")
    with pytest.raises(RankError, match=r'cannot resume from .*: data was "text-.{16}", is "text-.{16}-last-13"'):
        run(ranks, one_text, tmp_path)


def test_data_without_a_sample_to_evaluate_names_all_ways_out(ranks, tiny, tmp_path):
    (tmp_path / "my.txt").write_text("equal files\n" * 20)
    (tmp_path / "same.txt").write_text("equal files\n" * 20)
    message = (
        r"evaluation\.interval_steps: the documents of held_out give no sample with a target; increase \[data\] "
        r"held_out_fraction, or name other data in \[evaluation\] datasets .*; without evaluation, set interval_steps = 0"
    )
    with pytest.raises(RankError, match=message):
        run(ranks, tiny, tmp_path, "--data.path", f"{tmp_path}/*.txt", "--evaluation.interval_steps", "2")


# ------------------------------------------------------------ phases of a mixture


def mixed(ranks, tiny, folder, mixture, steps):
    for name, seed in (("a", 1), ("b", 2)):
        write_corpus(folder / name, 60, seed)
    lines = [line for line in Path(tiny[1]).read_text().splitlines() if not line.startswith(("dataset", "path"))]
    two = f'[data]\ndatasets = {{ a = "text:{folder}/a", b = "text:{folder}/b" }}\nmixture = {list(mixture)}'
    (folder / "two.toml").write_text("\n".join(lines).replace("[data]", two.replace("'", '"')))
    run(ranks, ["--config", str(folder / "two.toml")], folder, "--training.steps", str(steps))


def test_a_phase_may_change_until_it_has_started(ranks, tiny, tmp_path):
    mixed(ranks, tiny, tmp_path, ["0: a=3 b=1", "32: b=1"], 3)  # 24 samples
    mixed(ranks, tiny, tmp_path, ["0: a=3 b=1", "24: a=1"], 4)
    kinds = [(r["step"], r["sample"], r["weights"]) for r in records(tmp_path / "run", "mixture")]
    assert kinds == [(1, 0, {"a": 0.75, "b": 0.25}), (4, 24, {"a": 1.0})]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "step 4 | mixture: a=1 from sample 24" in log
    assert "warning: mixture: b=1 from sample 32 on, in step 5; the run ends after step 3" in log
    message = (
        r"data\.mixture: phases that have already started .*a=1 from sample 24, now .* starting at sample 32 or later"
    )
    with pytest.raises(RankError, match=message):
        mixed(ranks, tiny, tmp_path, ["0: a=3 b=1", "26: a=1"], 5)

"""Several sets, each by all of its targets alike; the best checkpoint stays."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.faults.bench import write_corpus
from tests.training_runs import records, train
from trainer.checkpoint.best import BestTracker
from trainer.checkpoint.commit import latest_per_step, step_of
from trainer.config import DataConfig, EvaluationConfig, TokenizerConfig
from trainer.data.build import open_datasets, prepare_datasets
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.testing.ranks import RankError


@pytest.fixture(scope="module")
def two_sets(tiny, tmp_path_factory):
    """Arguments of a run with a set of its own, and the folder of its texts."""
    folder = tmp_path_factory.mktemp("sets")
    write_corpus(folder / "other", 40, seed=5)
    (folder / "sets.toml").write_text(
        Path(tiny[1]).read_text() + f'[evaluation]\ninterval_steps = 2\nsets = {{ other = "text:{folder}/other" }}\n'
    )
    return ["--config", str(folder / "sets.toml")], folder


def run(ranks, argv, folder, *more, size=1):
    ranks(size).run(train, [*argv, "--run.output_folder", str(folder), "--run.name", "run", *more])
    return folder / "run"


def test_every_set_is_evaluated_on_any_number_of_ranks_alike(ranks, two_sets, tmp_path):
    argv, _ = two_sets
    one, two = (records(run(ranks, argv, tmp_path / str(size), size=size), "eval") for size in (1, 2))
    assert [(r["step"], r["dataset"]) for r in one] == [(2, "held_out"), (2, "other"), (4, "held_out"), (4, "other")]
    for a, b in zip(one, two, strict=True):
        assert a["num_targets"] == b["num_targets"]
        assert a["loss"] == pytest.approx(b["loss"], rel=5e-6)
        assert a["perplexity"] == pytest.approx(math.exp(a["loss"]))


def test_bits_per_byte_are_those_of_the_text(ranks, two_sets, tmp_path):
    """Whatever the tokenizer: here the bytes are counted in the text that the targets stand for."""
    argv, folder = two_sets
    record = records(run(ranks, argv, tmp_path), "eval")[-1]
    tokenizer = load_tokenizer(TokenizerConfig())
    sets = {"other": f"text:{folder}/other"}
    data = DataConfig(dataset="text", path=str(folder / "other"), store_folder=str(tmp_path / "stores"))
    samples = open_datasets(data, sets, prepare_datasets(data, sets, TokenizerConfig(), tokenizer, 32), 32).evaluation[
        "other"
    ]
    labels = samples.batch(np.arange(len(samples))).labels
    special = set(tokenizer.special_tokens.values())
    text = tokenizer.decode([token for token in labels.flatten().tolist() if token not in special])
    bits = record["loss"] * record["num_targets"] / math.log(2)
    assert labels.numel() == record["num_targets"]
    assert record["bits_per_byte"] == pytest.approx(bits / len(text.encode()), rel=1e-6)


def test_the_best_checkpoint_is_written_and_kept(ranks, two_sets, tmp_path):
    """A learning rate that spoils the model after some steps makes an early step the best."""
    more = ["--evaluation.keep_best_on", "other", "--checkpoint.interval_steps", "5", "--checkpoint.keep", "1"]
    more += ["--training.steps", "15", "--optimizer.lr", "1.0", "--evaluation.interval_steps", "1"]
    folder = run(ranks, two_sets[0], tmp_path, *more, "--lr_schedule.warmup_steps", "14")
    losses = {r["step"]: r["loss"] for r in records(folder, "eval") if r["dataset"] == "other"}
    best = min(losses, key=losses.get)
    assert best < 15
    assert sorted(step_of(path) for path in latest_per_step(folder / "checkpoints")) == [best, 15]


@pytest.mark.parametrize(("data", "steps", "best"), [("a", [10, 20], 10), ("b", [10, 20], 0), ("a", [20], 0)])
def test_the_best_is_forgotten_with_its_data_or_its_checkpoint(data, steps, best):
    before = BestTracker(EvaluationConfig(keep_best_on="other"), "a")
    before.see("other", 2.0)
    before.before_save(10)
    after = BestTracker(EvaluationConfig(keep_best_on="other"), data)
    after.load_state(json.loads(json.dumps(before.state())), steps)
    assert after.step == best
    after.see("other", 2.5)
    assert after.to_save == (best == 0)


def test_a_best_of_no_set_is_refused(ranks, two_sets, tmp_path):
    with pytest.raises(RankError, match=r"evaluation\.best: is no set; there are: held_out, other"):
        run(ranks, two_sets[0], tmp_path, "--evaluation.keep_best_on", "ohter")


# ------------------------------------------------------------ phases of a mixture


def mixed(ranks, tiny, folder, mixture, steps):
    for name, seed in (("a", 1), ("b", 2)):
        write_corpus(folder / name, 60, seed)
    lines = [line for line in Path(tiny[1]).read_text().splitlines() if not line.startswith(("dataset", "path"))]
    two = f'[data]\ndatasets = {{ a = "text:{folder}/a", b = "text:{folder}/b" }}\nmixture = {list(mixture)}'
    (folder / "two.toml").write_text("\n".join(lines).replace("[data]", two.replace("'", '"')))
    run(ranks, ["--config", str(folder / "two.toml")], folder, "--training.steps", str(steps))


def test_a_phase_may_change_until_it_has_started(ranks, tiny, tmp_path):
    mixed(ranks, tiny, tmp_path, ["0: a=3 b=1", "64: b=1"], 3)  # 48 samples
    mixed(ranks, tiny, tmp_path, ["0: a=3 b=1", "48: a=1"], 4)
    message = (
        r"data\.mixture: phases that have already started .*a=1 from sample 48, now .* starting at sample 64 or later"
    )
    with pytest.raises(RankError, match=message):
        mixed(ranks, tiny, tmp_path, ["0: a=3 b=1", "50: a=1"], 5)

import re
import shutil
from itertools import islice
from pathlib import Path

import pytest

from tests.commands import run_script
from tests.faults.harness import write_corpus
from tests.training_runs import recorded_batches, train, trainer_from
from trainer.base.config import TokenizerConfig
from trainer.data.tokenizer.backends import load_tokenizer


def script(run, step, *words):
    done = run_script("scripts/inspect_samples.py", run, step, *words)
    return done.returncode, done.stdout.splitlines(), done.stderr.strip()


def consumed(argv):
    """Train; return the tokens of each sample of each step."""
    trainer = trainer_from(argv)
    training = trainer.config.training
    sizes = [training.batch_size(step) for step in range(trainer.state.step + 1, training.steps + 1)]
    with recorded_batches() as batches:
        trainer.train()
    rows = (row for batch in batches for row in batch.tokens.tolist())
    return [list(islice(rows, size)) for size in sizes]


def test_the_printed_samples_of_a_step_are_those_it_consumed(ranks, tiny, tmp_path):
    """Two datasets. The run is killed at step 4, resumes from step 2 with other batch sizes, and is killed at step 5."""
    for name, seed in (("a", 1), ("b", 2)):
        write_corpus(tmp_path / name, 60, seed)
    lines = Path(tiny[1]).read_text().splitlines()
    two = f'[data]\ndatasets = {{ a = "text:{tmp_path}/a", b = "text:{tmp_path}/b" }}\nmixture = ["0: a=3 b=1"]'
    remaining = "\n".join(line for line in lines if not line.startswith(("dataset", "path", "interval_steps")))
    (tmp_path / "two.toml").write_text(remaining.replace("[data]", two))
    argv = ["--config", str(tmp_path / "two.toml"), "--run.output_folder", str(tmp_path), "--run.name", "run"]
    argv += ["--metrics.interval_steps", "9", "--checkpoint.interval_steps", "2", "--training.global_batch_size"]
    (steps,) = ranks(1).run(consumed, [*argv, "8", "--training.steps", "4"])
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    steps[2:] = ranks(1).run(consumed, [*argv, "4", "--training.batch_schedule.3", "6", "--training.steps", "5"])[0]
    (tmp_path / "run" / "checkpoints" / "step-00000005" / "train_state.json").write_text("{")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    tokenizer = load_tokenizer(TokenizerConfig())
    printed = []
    for step, tokens in enumerate(steps, start=1):
        code, lines, err = script(tmp_path / "run", step)
        assert (code, err) == (0, "")
        printed += [line.split(maxsplit=3) for line in lines]
        assert [line[3] for line in printed[-len(tokens) :]] == [repr(tokenizer.decode(row)[:60]) for row in tokens]
    complete = script(tmp_path / "run", 5, "--show")[1]
    assert sum(": 32 positions, 32 targets (100.0 %)" in line for line in complete) == 6
    assert tokenizer.decode(steps[-1][-1]) in re.sub("[⟦⟧⟨⟩]", "", "\n".join(complete))
    assert [int(position) for position, *_ in printed] == list(range(32))
    assert [name for _, name, *_ in printed].count("a") == 24


@pytest.mark.parametrize("record", ['{"kind": "train"}', '{"kind": "train", "step": 1, "first_step": null}'])
def test_a_record_that_is_not_valid_is_one_line(ranks, tiny, tmp_path, record):
    ranks(1).run(train, [*tiny, "--run.output_folder", str(tmp_path), "--run.name", "run", "--training.steps", "1"])
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(record)
    assert script(tmp_path / "run", 1) == (2, [], f"{path} has a record of kind train that is not valid")


def test_a_step_without_a_record_is_an_error(ranks, tiny, tmp_path):
    ranks(1).run(train, [*tiny, "--run.output_folder", str(tmp_path), "--run.name", "run", "--training.steps", "1"])
    error = f"{tmp_path}/run: metrics.jsonl has no record of step 2; the last record is of step 1"
    assert script(tmp_path / "run", 2) == (2, [], error)
    assert script(tmp_path, 2) == (2, [], f"{tmp_path}: is not a run folder, because it has no metrics.jsonl")

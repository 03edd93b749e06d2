import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.conftest import ROOT
from tests.faults.bench import write_corpus
from tests.training_runs import train
from trainer.config import TokenizerConfig
from trainer.config.load import load_config
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.run.resolve import resolve
from trainer.run.run_folder import resume_point
from trainer.trainer import Trainer


def samples(run, step):
    command = [sys.executable, str(ROOT / "scripts" / "samples.py"), str(run), str(step)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr.strip()


class Watching(Trainer):
    def train_step(self, batches, rate, stop=False):
        def watched():
            for batch in batches:
                self.seen[-1] += batch.tokens.tolist()
                yield batch

        self.seen.append([])
        return super().train_step(watched(), rate, stop)


def seen(argv):
    """The tokens of each sample of each step."""
    config = load_config(argv)
    resolved = resolve(config, dist.get_world_size())
    trainer = Watching(config, resolved, torch.device("cpu"), resume_point(config, resolved))
    trainer.seen = []
    trainer.train()
    return trainer.seen


def test_the_samples_of_a_step_are_those_it_saw(ranks, tiny, tmp_path):
    """Two datasets, a batch that changes at step 3, and records of every second step."""
    for name, seed in (("a", 1), ("b", 2)):
        write_corpus(tmp_path / name, 60, seed)
    lines = Path(tiny[1]).read_text().splitlines()
    two = f'[data]\ndatasets = {{ a = "text:{tmp_path}/a", b = "text:{tmp_path}/b" }}\nmixture = ["0: a=3 b=1"]'
    kept = "\n".join(line for line in lines if not line.startswith(("dataset", "path", "interval_steps")))
    (tmp_path / "two.toml").write_text(kept.replace("[data]", two))
    argv = ["--config", str(tmp_path / "two.toml"), "--run.output_folder", str(tmp_path), "--run.name", "run"]
    argv += ["--metrics.interval_steps", "2", "--training.global_batch_size"]
    (steps,) = ranks(1).run(seen, [*argv, "8", "--training.steps", "2"])
    steps += ranks(1).run(seen, [*argv, "4", "--training.steps", "4"])[0]
    tokenizer = load_tokenizer(TokenizerConfig())
    told = []
    for step, tokens in enumerate(steps, start=1):
        code, lines, err = samples(tmp_path / "run", step)
        assert (code, err) == (0, "")
        told += [line.split(maxsplit=3) for line in lines]
        assert [line[3] for line in told[-len(tokens) :]] == [repr(tokenizer.decode(row)[:60]) for row in tokens]
    assert [int(place) for place, *_ in told] == list(range(24))
    assert [name for _, name, *_ in told].count("a") == 18


def test_a_step_that_was_not_is_told(ranks, tiny, tmp_path):
    ranks(1).run(train, [*tiny, "--run.output_folder", str(tmp_path), "--run.name", "run", "--training.steps", "1"])
    told = f"{tmp_path}/run: has no record of step 2; the last one is of step 1"
    assert samples(tmp_path / "run", 2) == (2, [], told)
    assert samples(tmp_path, 2) == (2, [], f"{tmp_path}: no run's folder (metrics.jsonl)")

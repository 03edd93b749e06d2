"""Print the samples that a step of a run consumed.

    python scripts/inspect_samples.py outputs/debug 100

Each line describes one sample: position in the global order, dataset, index in the dataset, beginning of the text. The script
reads the order from config.toml, the step's first sample from metrics.jsonl, and skipped samples from the newest checkpoint.
"""

import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from trainer.system.process import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

import numpy as np

from trainer.checkpoint.commit import latest_per_step
from trainer.config import ConfigError
from trainer.config.command_line import Arguments, die, positive_int, run_to_end
from trainer.config.load import load_config
from trainer.data.build import open_datasets
from trainer.data.datasets import dataset_configs, prepare_datasets
from trainer.data.sampling.loader import SampleOrder
from trainer.data.tokenizer.backends import load_tokenizer

_TEXT_LENGTH = 60
"""Maximum number of characters to print of each text."""


def samples_of_step(run: Path, step: int, seq_len: int) -> range:
    """Return the samples that a step consumed, as a range of positions in the global order. Raises ConfigError."""
    records = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    consumed = [(0, 0), *((r["step"], r["tokens_seen"] // seq_len) for r in records if r["kind"] == "train")]
    for (first, before), (last, after) in itertools.pairwise(consumed):
        if first < step <= last:
            batch_size, remainder = divmod(after - before, last - first)
            if remainder:
                raise ConfigError("", f"the batch size changed between the logged steps {first} and {last}")
            start = before + (step - 1 - first) * batch_size
            return range(start, start + batch_size)
    last_step = consumed[-1][0]
    raise ConfigError("", f"{run}: metrics.jsonl has no record of step {step}; the last record is of step {last_step}")


def skipped_samples(run: Path) -> tuple[tuple[int, int], ...]:
    checkpoints = latest_per_step(run / "checkpoints")
    ranges = json.loads((checkpoints[0] / "train_state.json").read_text())["skipped_samples"] if checkpoints else []
    return tuple(map(tuple, ranges))


def print_samples(run: Path, step: int) -> None:
    config = load_config(["--config", str(run / "config.toml")])
    seq_len, data = config.training.seq_len, config.data
    consumed = np.array(samples_of_step(run, step, seq_len))
    tokenizer = load_tokenizer(config.tokenizer)
    datasets = open_datasets(data, {}, prepare_datasets(data, {}, config.tokenizer, tokenizer, seq_len), seq_len)
    order = SampleOrder(datasets.sizes, datasets.phases, config.run.seed, data.shuffle, skipped_samples(run))
    starts, names = np.cumsum([0, *datasets.sizes]), list(dataset_configs(data))
    for position, index in zip(order.global_index(consumed).tolist(), order(consumed).tolist(), strict=True):
        dataset = int(np.searchsorted(starts, index, side="right")) - 1
        text = tokenizer.decode(datasets.training[np.array([index])].tokens[0].tolist())
        print(f"{position:>10}  {names[dataset]}  {index - int(starts[dataset])}  {text[:_TEXT_LENGTH]!r}")


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("step", type=positive_int, help="number of a completed step")
    args = parser.parse_args()
    if not (args.run / "metrics.jsonl").is_file():
        die(f"{args.run}: is not a run folder, because it has no metrics.jsonl")
    print_samples(args.run, args.step)


if __name__ == "__main__":
    run_to_end(main)

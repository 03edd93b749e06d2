"""Say which samples a step of a run saw: python scripts/inspect_samples.py RUN_FOLDER STEP

For each sample: its place in the order, its dataset, its number there, and how its text begins. The order is computed from
config.toml, the run's records say where the step began, and its newest checkpoint what was passed over on purpose.
"""

import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from trainer.checkpoint.commit import latest_per_step
from trainer.config import ConfigError
from trainer.config.command_line import Arguments, die, positive_int, run_to_end
from trainer.config.load import load_config
from trainer.data.build import dataset_configs, open_datasets, prepare_datasets
from trainer.data.sampling.loader import SampleOrder
from trainer.data.tokenizer.backends import load_tokenizer

_SHOWN = 60
"""Characters of each text."""


def consumed_before(run: Path, step: int, seq_len: int) -> tuple[int, int]:
    """Samples that the steps before it had consumed, and that it consumed itself, by the run's records."""
    records = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    known = [(0, 0), *((r["step"], r["tokens_seen"] // seq_len) for r in records if r["kind"] == "train")]
    for (first, before), (last, after) in itertools.pairwise(known):
        if first < step <= last:
            size, rest = divmod(after - before, last - first)
            if rest:
                raise ConfigError(
                    "", f"the batch size changed between steps {first} and {last}, which have the records"
                )
            return before + (step - 1 - first) * size, size
    raise ConfigError("", f"{run}: has no record of step {step}; the last one is of step {known[-1][0]}")


def skipped_samples(run: Path) -> tuple[tuple[int, int], ...]:
    checkpoints = latest_per_step(run / "checkpoints")
    ranges = json.loads((checkpoints[0] / "train_state.json").read_text())["skipped_samples"] if checkpoints else []
    return tuple(map(tuple, ranges))


def show(run: Path, step: int) -> None:
    config = load_config(["--config", str(run / "config.toml")])
    seq_len, data = config.training.seq_len, config.data
    before, size = consumed_before(run, step, seq_len)
    tokenizer = load_tokenizer(config.tokenizer)
    datasets = open_datasets(data, {}, prepare_datasets(data, {}, config.tokenizer, tokenizer, seq_len), seq_len)
    order = SampleOrder(datasets.sizes, datasets.phases, config.run.seed, data.shuffle, skipped_samples(run))
    places = np.arange(before, before + size)
    numbers = order(places)
    firsts, names = np.cumsum([0, *datasets.sizes]), list(dataset_configs(data))
    for place, number in zip(order.global_index(places).tolist(), numbers.tolist(), strict=True):
        dataset = int(np.searchsorted(firsts, number, side="right")) - 1
        text = tokenizer.decode(datasets.training.batch(np.array([number])).tokens[0].tolist())
        print(f"{place:>10}  {names[dataset]}  {number - int(firsts[dataset])}  {text[:_SHOWN]!r}")


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("step", type=positive_int)
    chosen = parser.parse_args()
    if not (chosen.run / "metrics.jsonl").is_file():
        die(f"{chosen.run}: no run's folder (metrics.jsonl)")
    try:
        show(chosen.run, chosen.step)
    except ConfigError as error:
        die(str(error))


if __name__ == "__main__":
    run_to_end(main)

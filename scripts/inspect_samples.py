"""Print the samples that a step of a run consumed.

    python scripts/inspect_samples.py outputs/debug 100
    python scripts/inspect_samples.py outputs/debug 100 --show

Each line describes one sample: position in the global order, dataset, index in the dataset, beginning of the text. With --show,
the complete sample follows, as prepare_data.py --show prints it. The script reads the order from config.toml, and the samples of
each step from metrics.jsonl.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from trainer.base.system.run_files import CONFIG_FILE, METRICS_FILE
from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config.argument_types import existing_folder, positive_int
from trainer.base.config.arguments import Arguments
from trainer.base.config.exits import answer_early, run_to_end


def arguments() -> Arguments:
    parser = Arguments(__doc__)
    parser.add_argument("run", type=existing_folder, help="run folder")
    parser.add_argument("step", type=positive_int, help="number of a completed step")
    parser.add_argument("--show", action="store_true", help="print complete samples, with their targets")
    return parser


if __name__ == "__main__":
    answer_early(arguments())  # before torch is imported

import numpy as np

from trainer.base.config import Config, ConfigError
from trainer.base.config.load import load_config
from trainer.base.config.required_files import DATA_SECTIONS
from trainer.base.system import console
from trainer.base.system.files import read_json_lines
from trainer.data.build import open_datasets
from trainer.data.datasets import dataset_configs, prepare_datasets
from trainer.data.sampling.loader import SampleOrder
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.tools.report.view.samples import view_samples
from trainer.tools.report.view.text import sample_lines

_TEXT_LENGTH = 60
"""Maximum number of characters to print of each text."""


def samples_of_step(run: Path, step: int) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
    """Return the cursor positions of the samples that a step consumed, and the samples that the run had skipped before. Raises
    ConfigError if metrics.jsonl has no valid record of this step."""
    path, last_step = run / METRICS_FILE, 0
    try:
        for record in read_json_lines(path):
            if record["kind"] != "train":
                continue
            last_step = record["step"]
            if record["first_step"] <= step <= last_step:
                stop = record["cursor"] - (last_step - step) * record["global_batch_size"]
                skipped_samples = tuple((first, end) for first, end in record["skipped_samples"])
                return np.arange(stop - record["global_batch_size"], stop), skipped_samples
    except (KeyError, TypeError, ValueError):
        raise ConfigError("", f"{path} has a record of kind train that is not valid") from None
    raise ConfigError("", f"{run}: metrics.jsonl has no record of step {step}; the last record is of step {last_step}")


def print_samples(run: Path, step: int, complete: bool) -> None:
    config = load_config(["--config", str(run / CONFIG_FILE)], DATA_SECTIONS)
    with config.explained_errors():
        _print_samples(config, run, step, complete)


def _print_samples(config: Config, run: Path, step: int, complete: bool) -> None:
    seq_len, data = config.training.seq_len, config.data
    consumed, skipped_samples = samples_of_step(run, step)
    tokenizer = load_tokenizer(config.tokenizer)
    pairs, evaluates = config.preference.enabled, config.evaluation.interval_steps > 0
    stores = prepare_datasets(data, {}, config.tokenizer, tokenizer, seq_len, pairs, evaluates)
    datasets = open_datasets(data, {}, stores, seq_len, evaluates)
    order = SampleOrder(datasets.sizes, datasets.phases, config.run.seed, data.shuffle, skipped_samples)
    positions, index = order.global_index(consumed).tolist(), order(consumed).tolist()
    names = list(dataset_configs(data))
    views = view_samples(datasets.training, index, datasets.sizes, names, tokenizer, pairs)
    for i, position, sample in zip(index, positions, views, strict=True):
        text = tokenizer.decode(datasets.training[np.array([i])].tokens[0].tolist())
        print(f"{position:>10}  {sample.dataset}  {sample.index}  {text[:_TEXT_LENGTH]!r}")
        if complete:
            print("", *sample_lines(sample, console.shows_colour()), "", sep="\n")


def main() -> None:
    args = arguments().parse_args()
    if not (args.run / METRICS_FILE).is_file():
        raise ConfigError("", f"{args.run}: is not a run folder, because it has no metrics.jsonl")
    print_samples(args.run, args.step, args.show)


if __name__ == "__main__":
    run_to_end(main)

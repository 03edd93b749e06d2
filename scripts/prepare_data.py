"""Prepare the token stores of a configuration, and print a table of them. Training prepares missing stores automatically.

    python scripts/prepare_data.py --config my.toml [--section.key value ...]
    python scripts/prepare_data.py --config my.toml --show 3 --html data.html   # also show the first documents of a run
    python scripts/prepare_data.py --config my.toml --shard 3/16 --data.store_folder stores/    # on one of 16 nodes

To read the stores of several shards together, set data.dataset = "prepared", and set data.path to the folder that contains them.
"""

import argparse
import json
import re
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

import numpy as np

from trainer.base.config import Config, DataConfig
from trainer.base.config.argument_types import file_to_write, number
from trainer.base.config.arguments import Arguments
from trainer.base.config.command_line import config_from_command_line
from trainer.base.config.errors import ConfigError
from trainer.base.config.exits import run_to_end
from trainer.base.config.pretrained import provenance
from trainer.base.config.required_files import DATA_SECTIONS
from trainer.base.system import console
from trainer.base.system.files import atomic_write
from trainer.base.system.spelling import counted
from trainer.data.datasets import (
    all_dataset_configs,
    blame_setting,
    check_names,
    dataset_configs,
    describe_template,
    pack_splits,
)
from trainer.data.prepare.prepare import prepare, unused_fields
from trainer.data.store.held_out import open_splits
from trainer.data.store.store import SPLITS, check_content, open_store, read_description
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.data.tokenizer.protocol import Tokenizer

_SHOWN = 3
"""Number of samples of a page if --show does not say it."""


def shard(text: str) -> tuple[int, int]:
    """Parse I/N, with I from 1 to N, into (I - 1, N)."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
    if not match or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text}: expected I/N, from 1/N to N/N")
    return int(match[1]) - 1, int(match[2])


def print_store(folder: Path, data: DataConfig, seconds: float | None) -> None:
    """Print where a store is, and which fields of its documents were not used. seconds: duration of its preparation, or None if
    the store already existed."""
    tokens = sum(counts["tokens"] for counts in read_description(folder)["splits"].values())
    print(f"{folder}: {'already prepared' if seconds is None else f'{tokens / seconds:,.0f} tokens per second'}")
    for line in unused_fields(folder, data):
        print(f"  {line}")


def report(config: Config, stores: dict[str, Path], tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Print the table of the datasets and the documents that --show asks for, and write the page of --html."""
    from trainer.data.build import open_datasets
    from trainer.data.sampling.loader import SampleOrder
    from trainer.tools.report.view import text
    from trainer.tools.report.view.dataset_table import dataset_table, refusals
    from trainer.tools.report.view.page import data_page
    from trainer.tools.report.view.samples import view_samples

    data, sets, training, is_sharded = config.data, config.evaluation.datasets, config.training, args.shard != (0, 1)
    evaluates = not is_sharded and config.evaluation.interval_steps > 0
    datasets = None
    if not is_sharded:
        folders = json.dumps({name: str(folder) for name, folder in stores.items()})
        datasets = open_datasets(data, sets, folders, training.seq_len, evaluates)
    rows = dataset_table(data, sets, stores, training, datasets.phases if datasets else (), evaluates)
    notes = list(refusals(data, sets, stores))
    print("", *text.table_lines(rows), *notes, sep="\n")
    if datasets is None or not (args.show or args.html):
        return
    order = SampleOrder(datasets.sizes, datasets.phases, config.run.seed, data.shuffle)
    index = order(np.arange(min(args.show or _SHOWN, len(datasets.training)))).tolist()
    names, pairs = list(dataset_configs(data)), config.preference.enabled
    samples = partial(view_samples, datasets.training, index, datasets.sizes, names, tokenizer, pairs)
    if args.show:
        noun, colour = "pair" if pairs else "document", console.shows_colour()
        print("", f"the first {counted(args.show, noun)} of a run: {text.legend(colour)}", sep="\n")
        left = args.show * (2 if pairs else 1)  # a pair is shown as two documents
        for sample in samples():
            print("", *text.sample_lines(sample, colour, left), sep="\n")
            left -= len(sample.documents)
            if left <= 0:
                break
    if args.html:
        atomic_write(args.html, data_page(f"Data of {config.run.name}", rows, notes, list(samples())))
        print("", f"wrote {args.html}", sep="\n")


def main() -> None:
    parser = Arguments(__doc__, settings=True)
    shard_help = "prepare every N-th file, beginning with file I, so that N nodes share the work"
    parser.add_argument("--shard", type=shard, default="1/1", metavar="I/N", help=shard_help)
    parser.add_argument("--verify", action="store_true", help="read every file and compare its content with its hash")
    show_help = "print the first N documents (texts, conversations or pairs) that a run trains on, with their target tokens and "
    show_help += "special tokens"
    parser.add_argument("--show", type=number(int, 1, 1000), metavar="N", help=show_help)
    html_help = f"write the table and the first samples (as many as --show, or {_SHOWN}), complete, to an HTML page"
    parser.add_argument("--html", type=file_to_write, metavar="FILE", help=html_help)
    args, settings = parser.parse_known_args()
    config = config_from_command_line(settings, DATA_SECTIONS)  # the initial model may not exist yet
    is_sharded = args.shard != (0, 1)
    if is_sharded and (args.show or args.html):
        raise ConfigError("", "--shard: a part of the files has no samples to show; remove --show and --html")
    with config.explained_errors():
        if line := provenance(config):
            console.info(line)
        check_names(config.data, config.evaluation)  # refuses what training would refuse
        tokenizer = load_tokenizer(config.tokenizer)
        for warning in tokenizer.warnings:
            console.warning(warning)
        datasets = list(all_dataset_configs(config.data, config.evaluation.datasets))
        if is_sharded and any(dataset.dataset == "prepared" for _, _, dataset in datasets):
            raise ConfigError("", "--shard: a prepared dataset cannot be sharded")
        stores = {}
        for name, setting, dataset in datasets:
            existing = set(Path(dataset.store_folder).glob("*"))
            start = time.perf_counter()
            with blame_setting(setting):
                folder = prepare(dataset, config.tokenizer, tokenizer, args.shard)
                seconds = time.perf_counter() - start
                for split in SPLITS:
                    open_store(folder, split)
                print_store(folder, dataset, None if folder in existing else seconds)
                if args.verify:
                    check_content(folder)
                    print("  intact: every file has the content that was written")
                if not is_sharded:
                    evaluates = config.evaluation.interval_steps > 0
                    pack_splits(dataset, folder, config.training.seq_len, config.preference.enabled, evaluates)
                    if note := open_splits(folder, dataset, evaluates).note:
                        print(f"  {note}")
            stores[name] = folder
        describe_template(config.data, config.evaluation.datasets, tokenizer, stores)
        report(config, stores, tokenizer, args)


if __name__ == "__main__":
    run_to_end(main, "interrupted; rerun the same command to continue")

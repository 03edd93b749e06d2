"""Prepare the token stores of a configuration and print a summary of each. Training prepares missing stores automatically.

    python scripts/prepare_data.py --config my.toml [--section.key value ...]
    python scripts/prepare_data.py --config my.toml --shard 3/16 --data.store_folder stores/    # on one of 16 nodes

To read the stores of several shards together, set data.dataset = "prepared", and set data.path to the folder that contains them.
"""

import argparse
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from trainer.system.process import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.config import DataConfig
from trainer.config.command_line import Arguments, config_from_command_line, die, one_line_errors, run_to_end
from trainer.config.load import DATA_SECTIONS
from trainer.data.datasets import all_dataset_configs, blame_setting, dataset_configs, pack_splits
from trainer.data.prepare.prepare import prepare, unused_fields
from trainer.data.sampling.phases import parse_mixture
from trainer.data.store.store import SPLITS, check_content, open_store, read_description
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.system import console


def shard(text: str) -> tuple[int, int]:
    """Parse I/N, with I from 1 to N, into (I - 1, N)."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
    if not match or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text}: expected I/N, from 1/N to N/N")
    return int(match[1]) - 1, int(match[2])


def summary(folder: Path, data: DataConfig, seconds: float | None) -> str:
    """Return a description of a store. seconds: duration of its preparation, or None if the store already existed."""
    description = read_description(folder)
    train, held_out = description["splits"]["train"], description["splits"]["held_out"]
    tokens = train["tokens"] + held_out["tokens"]
    lines = [
        f"{folder}: {'already prepared' if seconds is None else f'{tokens / seconds:,.0f} tokens per second'}",
        f"  training   {train['documents']:>15,} documents {train['tokens']:>19,} tokens",
        f"  held out   {held_out['documents']:>15,} documents {held_out['tokens']:>19,} tokens",
        f"  skipped    {description['bad_documents']:>15,} documents",
        *(f"  {line}" for line in unused_fields(folder, data)),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = Arguments(__doc__, settings=True)
    shard_help = "prepare every N-th file, beginning with file I, so that N nodes share the work"
    parser.add_argument("--shard", type=shard, default="1/1", metavar="I/N", help=shard_help)
    parser.add_argument("--verify", action="store_true", help="read every file and compare its content with its hash")
    args, settings = parser.parse_known_args()
    config = config_from_command_line(settings, DATA_SECTIONS)  # the initial model may not exist yet
    is_sharded = args.shard != (0, 1)
    with one_line_errors(config):
        parse_mixture(config.data.mixture, list(dataset_configs(config.data)))  # refuses one that training would refuse
        tokenizer = load_tokenizer(config.tokenizer)
        for warning in tokenizer.warnings:
            console.warning(warning)
        datasets = list(all_dataset_configs(config.data, config.evaluation.datasets))
        if is_sharded and any(dataset.dataset == "prepared" for _, _, dataset in datasets):
            die("--shard: a prepared dataset cannot be sharded")
        for _, setting, dataset in datasets:
            existing = set(Path(dataset.store_folder).glob("*"))
            start = time.perf_counter()
            with blame_setting(setting):
                folder = prepare(dataset, config.tokenizer, tokenizer, args.shard)
                seconds = time.perf_counter() - start
                for split in SPLITS:
                    open_store(folder, split)
                print(summary(folder, dataset, None if folder in existing else seconds))
                if args.verify:
                    check_content(folder)
                    print("  intact: every file has the content that was written")
                if not is_sharded:
                    pack_splits(dataset, folder, config.training.seq_len, config.preference.enabled)


if __name__ == "__main__":
    run_to_end(main, "interrupted; rerun the same command to continue")

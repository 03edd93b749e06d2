"""Prepare the token store of a configuration before a run needs it, and say what is in it.

    python scripts/prepare_data.py --config my.toml [--section.key value ...]
    python scripts/prepare_data.py --config my.toml --share 3/16 --data.store_folder stores/    # one machine of many
    python scripts/prepare_data.py --config my.toml --verify                                    # read it all, and compare

--share I/N takes every N-th file from the I-th on, so that N machines prepare N stores of one corpus; a run reads them
together with data.dataset = "prepared" and their folder as data.path. A run that finds no store makes it itself.
"""

import argparse
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from trainer.config.command_line import Arguments, config_from_command_line, die, one_line_errors, run_to_end
from trainer.data.build import all_dataset_configs, blame_setting, pack_splits
from trainer.data.prepare.prepare import prepare
from trainer.data.store.store import SPLITS, check_content, open_store, read_description
from trainer.data.tokenizer.backends import load_tokenizer


def share(text: str) -> tuple[int, int]:
    """(i, n), i counted from 0, of I/N."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
    if not match or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text}: expected I/N, as 1/4 to 4/4")
    return int(match[1]) - 1, int(match[2])


def told(folder: Path, seconds: float | None) -> str:
    """What is in a store. seconds: that it took to make, None where it was there."""
    description = read_description(folder)
    train, held_out = description["splits"]["train"], description["splits"]["held_out"]
    tokens = train["tokens"] + held_out["tokens"]
    lines = [
        f"{folder}: {'there already' if seconds is None else f'{tokens / seconds:,.0f} tokens per second'}",
        f"  training   {train['documents']:>15,} documents {train['tokens']:>19,} tokens",
        f"  held out   {held_out['documents']:>15,} documents {held_out['tokens']:>19,} tokens",
        f"  left out   {description['skipped']:>15,} documents",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = Arguments(__doc__, settings=True)
    parser.add_argument("--share", type=share, default=(0, 1))
    parser.add_argument("--verify", action="store_true")
    arguments, settings = parser.parse_known_args()
    config = config_from_command_line(settings)
    with one_line_errors(config):
        tokenizer = load_tokenizer(config.tokenizer)
        datasets = list(all_dataset_configs(config.data, config.evaluation.datasets))
        if arguments.share != (0, 1) and any(member.dataset == "prepared" for _, _, member in datasets):
            die("--share: stores that were prepared before are not shared out")
        for _, setting, member in datasets:
            before = set(Path(member.store_folder).glob("*"))
            begin = time.perf_counter()
            with blame_setting(setting):
                folder = prepare(member, config.tokenizer, tokenizer, arguments.share)
                seconds = time.perf_counter() - begin
                for split in SPLITS:
                    open_store(folder, split)
                print(told(folder, None if folder in before else seconds))
                if arguments.verify:
                    check_content(folder)
                    print("  every file is as it was written")
                if arguments.share == (0, 1):
                    pack_splits(member, folder, config.training.seq_len)


if __name__ == "__main__":
    run_to_end(main, "interrupted; the same command goes on")

"""Train a byte-pair tokenizer on a dataset and write it as a tiktoken rank file.

    python scripts/train_tokenizer.py OUT.tiktoken --vocab-size 8192 --data.dataset text --data.path corpus/

The shipped default was made by `python scripts/train_tokenizer.py trainer/data/tokenizer/default.tiktoken --vocab-size 2048`.
Needs the optional package `tokenizers` (pip install tokenizers). Settings of the trainer choose the dataset.
"""

import argparse
import base64
import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from trainer.config import ConfigError, DataConfig, TokenizerConfig
from trainer.config.command_line import config_from_command_line, die, one_line_errors, run_to_end
from trainer.data.build import all_dataset_configs, blame_setting
from trainer.data.prepare.tokenize import check_bad_documents
from trainer.data.sources import BadDocument, open_source
from trainer.data.tokenizer.backends import LLAMA3_PATTERN, NUM_SPECIAL, load_tokenizer
from trainer.data.tokenizer.hf_json import byte_to_char
from trainer.system.files import atomic_write

try:
    import tokenizers
except ModuleNotFoundError:
    die("scripts/train_tokenizer.py needs the package tokenizers: pip install tokenizers")


NO_TEXT = ConfigError("data.path", "holds no text to learn from")


def documents(data: DataConfig, tokenizer: TokenizerConfig) -> Iterator[str]:
    """Those of every dataset that can be read; the others are told. Raises ConfigError where a dataset has more of them than
    data.max_bad_documents, or nothing else."""
    for _, setting, member in all_dataset_configs(data, {}):
        with blame_setting(setting):
            yield from _documents(member, tokenizer)


def _documents(data: DataConfig, tokenizer: TokenizerConfig) -> Iterator[str]:
    if data.dataset == "prepared":
        raise NO_TEXT
    problems, any_there = [], False
    for document in open_source(data, load_tokenizer(tokenizer)).documents():
        if isinstance(document, BadDocument):
            problems.append(document)
            check_bad_documents(data, len(problems), iter(problems))
        elif isinstance(document, str):
            any_there = True
            yield document
        else:
            raise NO_TEXT
    if not any_there:
        why = f"; {problems[0]}" if problems else ""
        raise ConfigError("data.path", f"holds no readable document{why}")
    if problems:
        print(f"documents left out: {len(problems)}; the first: {problems[0]}", file=sys.stderr)


def train(texts: Iterator[str], num_ranks: int) -> list[bytes]:
    """Tokens in the order of their ranks: the 256 bytes, then the merges as they were learned."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), behavior="isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=num_ranks, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    char_to_byte = {char: byte for byte, char in byte_to_char().items()}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [bytes(char_to_byte[char] for char in token) for token, _ in vocabulary]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the rank file to write")
    parser.add_argument("--vocab-size", type=int, default=2048, help=f"tokens, {NUM_SPECIAL} special ones included")
    arguments, settings = parser.parse_known_args()
    if not arguments.out.parent.is_dir():
        die(f"{arguments.out}: expected the name of a file in a folder that exists")
    if arguments.out.exists():
        die(f"{arguments.out}: exists already")
    if not os.access(arguments.out.parent, os.W_OK):
        die(f"{arguments.out.parent}: cannot be written")
    num_ranks = arguments.vocab_size - NUM_SPECIAL
    if num_ranks < 256:
        die(f"--vocab-size {arguments.vocab_size}: must be at least {NUM_SPECIAL + 256}")
    config = config_from_command_line(settings)
    with one_line_errors(config):
        ranks = train(documents(config.data, config.tokenizer), num_ranks)
    if len(ranks) < num_ranks:
        print(f"the text has room for {len(ranks)} ranks only, not {num_ranks}", file=sys.stderr)
    try:
        lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
        atomic_write(arguments.out, "".join(lines))
    except OSError as error:
        die(f"{arguments.out}: cannot be written ({error.strerror})")
    print(f"{arguments.out}: {len(ranks)} ranks + {NUM_SPECIAL} special tokens")


if __name__ == "__main__":
    run_to_end(main)

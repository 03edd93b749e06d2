"""Train a byte-pair tokenizer on a dataset and write it as a tiktoken file.

    python scripts/train_tokenizer.py my.tiktoken --vocab-size 8192 --data.dataset text --data.path corpus/
    python scripts/train_tokenizer.py trainer/data/tokenizer/default.tiktoken --vocab-size 2048    # the shipped tokenizer

The optional package `tokenizers` is needed (pip install tokenizers). The trainer's settings select the dataset.
"""

import base64
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config import ConfigError, DataConfig, TokenizerConfig
from trainer.base.config.argument_types import positive_int
from trainer.base.config.arguments import Arguments
from trainer.base.config.command_line import config_from_command_line
from trainer.base.config.exits import run_to_end
from trainer.base.config.packages import require_package
from trainer.base.system.files import atomic_write
from trainer.base.system.spelling import counted
from trainer.data.datasets import all_dataset_configs, blame_setting
from trainer.data.prepare.encode import plain_text
from trainer.data.prepare.limits import Counts, check_number, check_share
from trainer.data.sources import BadDocument, open_source
from trainer.data.tokenizer.backends import NUM_SPECIAL, load_tokenizer
from trainer.data.tokenizer.byte_pair import LLAMA3_PATTERN
from trainer.data.tokenizer.hf_json import byte_to_char

NO_TEXT = ConfigError("data.path", "contains no text to train on")


def documents(data: DataConfig, tokenizer: TokenizerConfig) -> Iterator[str]:
    """Yield the documents of every dataset and print the number of bad documents. Raises ConfigError if a dataset has no readable
    document, or more bad documents than the settings allow."""
    for _, setting, dataset in all_dataset_configs(data, {}):
        with blame_setting(setting):
            yield from _documents_of(dataset, tokenizer)


def _documents_of(data: DataConfig, tokenizer: TokenizerConfig) -> Iterator[str]:
    if data.dataset == "prepared":
        raise NO_TEXT
    source = open_source(data, load_tokenizer(tokenizer))
    bad_documents, found = [], 0
    for document in source.documents(lambda document: _text(data, document)):
        if isinstance(document, BadDocument):
            bad_documents.append(document)
            check_number(data, Counts(found, len(bad_documents)), iter(bad_documents))
        else:
            found += 1
            yield document
    if not found:
        reason = f"; {bad_documents[0]}" if bad_documents else ""
        raise ConfigError("data.path", f"contains no readable document{reason}")
    damaged = sum(document.ends_file for document in bad_documents)
    check_share(data, Counts(found, len(bad_documents), len(source.files), damaged), iter(bad_documents))
    if bad_documents:
        print(f"skipped {counted(len(bad_documents), 'bad document')}; the first: {bad_documents[0]}", file=sys.stderr)


def _text(data: DataConfig, document: Any) -> str:
    if not isinstance(document, str):
        raise NO_TEXT
    return plain_text(data, document)


def train(texts: Iterator[str], num_ranks: int) -> list[bytes]:
    """Return the bytes of each token, sorted by rank: the 256 single bytes, then the merged tokens in the order of training."""
    tokenizers = require_package("tokenizers", "")
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
    parser = Arguments(__doc__, settings=True)
    parser.add_argument("out", type=Path, help="tiktoken file to write")
    vocab_help = f"number of tokens, including {NUM_SPECIAL} special tokens"
    parser.add_argument("--vocab-size", type=positive_int, default=2048, metavar="N", help=vocab_help)
    args, settings = parser.parse_known_args()
    require_package("tokenizers", "scripts/train_tokenizer.py")  # before all work
    if not args.out.parent.is_dir():
        raise ConfigError("", f"{args.out}: {args.out.parent} is not a folder")
    if args.out.exists():
        raise ConfigError("", f"{args.out}: already exists")
    if not os.access(args.out.parent, os.W_OK):
        raise ConfigError("", f"{args.out.parent}: cannot be written")
    num_ranks = args.vocab_size - NUM_SPECIAL
    if num_ranks < 256:
        raise ConfigError("", f"--vocab-size {args.vocab_size}: must be at least {NUM_SPECIAL + 256}")
    config = config_from_command_line(settings)
    with config.explained_errors():
        ranks = train(documents(config.data, config.tokenizer), num_ranks)
    if len(ranks) < num_ranks:
        print(f"the text is too short for {num_ranks} tokens: the file has only {len(ranks)}", file=sys.stderr)
    try:
        lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
        atomic_write(args.out, "".join(lines))
    except OSError as error:
        raise ConfigError("", f"{args.out}: cannot be written ({error.strerror})") from None
    print(f"{args.out}: {len(ranks)} tokens + {NUM_SPECIAL} special tokens")
    print(f'  to use it: --tokenizer.backend tiktoken --tokenizer.pattern llama3 --tokenizer.path "{args.out}"')


if __name__ == "__main__":
    run_to_end(main)

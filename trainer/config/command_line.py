"""Arguments of scripts, whose errors are one line as those of settings are."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from trainer.config.load import load_config
from trainer.config.render import help_text, to_toml
from trainer.config.schema import Config, ConfigError
from trainer.system.process import local_rank


class Arguments(argparse.ArgumentParser):
    """Shows the script's own text as --help."""

    def __init__(self, text: str):
        super().__init__(
            description=text, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s", allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        die(message)


def run_to_end(main: Callable[[], None], interrupted: str = "interrupted") -> None:
    """Call main; Ctrl-C is one line and exit code 130."""
    try:
        main()
    except KeyboardInterrupt:
        sys.stdout.flush()
        print(interrupted, file=sys.stderr, flush=True)
        os._exit(130)  # without waiting for worker processes, which end with this one


def utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("expected UTF-8 text") from None
    return text


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return value


def amount(text: str) -> float:
    """A number of at least 0."""
    return 0.0 if text in ("0", "0.0") else positive(text)


def whole(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 0")
    return int(text)


def check_chosen_ranks() -> None:
    """Raises ConfigError where LOG_RANK names no ranks."""
    chosen = os.environ.get("LOG_RANK", "0")
    if chosen != "all" and not all(word.isdecimal() for word in chosen.split(",")):
        raise ConfigError("", f"LOG_RANK={chosen}: expected all, or numbers of ranks such as 0,3")


def die(line: str) -> NoReturn:
    """Print one line and exit with code 2. Started by torchrun, every rank of a machine comes here with the same line, and
    the first one prints it."""
    if local_rank():
        time.sleep(5)  # when the first rank has spoken and ended, the launcher ends this one
    print(line, file=sys.stderr, flush=True)
    sys.exit(2)


@contextmanager
def one_line_errors(config: Config) -> Iterator[None]:
    """A ConfigError inside becomes one line on stderr and exit code 2."""
    try:
        yield
    except ConfigError as error:
        die(config.explain(error))


def config_from_command_line(argv: Sequence[str], files: bool = True) -> Config:
    """load_config for a command: answers --help and --print-config, and turns errors into one line and exit code 2."""
    if "--help" in argv or "-h" in argv:
        _print_and_exit(help_text())
    try:
        check_chosen_ranks()
        config = load_config([word for word in argv if word != "--print-config"], files)
    except ConfigError as error:
        die(str(error))
    if "--print-config" in argv:
        _print_and_exit(to_toml(config))
    return config


def _print_and_exit(text: str) -> NoReturn:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `--help | head`: the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)

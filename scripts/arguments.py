"""Arguments of scripts, whose errors are one line as those of settings are."""

import argparse
from typing import NoReturn

from trainer.load_config import exit_with


class Arguments(argparse.ArgumentParser):
    """Shows the script's own text as --help."""

    def __init__(self, text: str):
        super().__init__(
            description=text, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s", allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        exit_with(message)


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


def whole(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 0")
    return int(text)

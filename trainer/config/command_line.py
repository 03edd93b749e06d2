"""Arguments of scripts, whose errors are one line as those of settings are."""

import argparse
import os
import sys
from collections.abc import Callable
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

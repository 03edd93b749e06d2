"""Types of the arguments of scripts: functions that parse the text of an argument."""

import argparse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.base.config.fields import parse_text, range_error, type_name
from trainer.base.config.remote_paths import local_path_of, readable_error
from trainer.base.config.schema.constraint import Constraint
from trainer.base.system.files import folder_error
from trainer.base.system.paths import path_error


def utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("expected UTF-8 text") from None
    return text


def local_path(text: str) -> Path:
    """Parse a path. Options with `type=Path` are parsed by this function."""
    if problem := path_error(text):
        raise argparse.ArgumentTypeError(f"{text}: {problem}")
    return Path(text)


class Readable(str):
    """The path of what is read, or its URL in an object store. `Arguments` replaces it by the path of a local copy when all
    arguments have been parsed."""

    with_weights = True
    """Whether files with weights are read."""

    def __new__(cls, text: str) -> "Readable":
        if problem := readable_error(text):
            raise argparse.ArgumentTypeError(f"{text}: {problem}")
        return super().__new__(cls, text)

    def local(self) -> Path:
        """Return the path of a local copy. Raises ConfigError."""
        return Path(local_path_of(str(self), with_weights=self.with_weights))


class ReadableRecords(Readable):
    with_weights = False


def existing_folder(text: str) -> Path:
    local_path(text)
    if problem := folder_error(text):
        raise argparse.ArgumentTypeError(f"{text}: {problem}")
    return Path(text)


def file_to_write(text: str) -> Path:
    path = local_path(text)
    existing_folder(str(path.parent))
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is a folder")
    return path


def number(kind: type[int] | type[float], least: float, most: float) -> Callable[[str], Any]:
    """Return the parser of an option whose value is a number from `least` to `most`."""

    def parse(text: str) -> int | float:
        with suppress(ValueError):
            value = parse_text(text, kind)
            if not range_error(value, Constraint(min=least, max=most)):
                return value
        raise argparse.ArgumentTypeError(f"{text}: expected {type_name(kind)} from {least} to {most}")

    return parse


positive_int = number(int, 1, 2**31)
non_negative_int = number(int, 0, 2**31)
positive_float = number(float, 1e-18, 1e18)  # products and quotients of two such numbers are finite
non_negative_float = number(float, 0, 1e18)

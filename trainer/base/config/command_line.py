"""The configuration that a command line asks for."""

import sys
from collections.abc import Collection, Sequence
from typing import NoReturn

from trainer.base.config.load import load_config
from trainer.base.config.render import help_text, to_toml
from trainer.base.config.required_files import FILE_SECTIONS
from trainer.base.config.schema.config import Config
from trainer.base.system.streams import name_stdout_in_errors, require_stdout


def config_from_command_line(argv: Sequence[str], check_files: Collection[str] = FILE_SECTIONS) -> Config:
    """Return the configuration. With --help or --print-config, print the requested text and exit with code 0.

    Args:
        argv: Words of the command line.
        check_files: Sections whose files must exist.

    Raises:
        ConfigError: Its message is the complete line for the user.
    """
    if "--help" in argv or "-h" in argv:
        _print_and_exit(help_text())
    words, prints = [word for word in argv if word != "--print-config"], "--print-config" in argv
    config = load_config(words, check_files, with_weights=not prints)
    if prints:
        _print_and_exit(to_toml(config, show_origins=True))
    return config


def _print_and_exit(text: str) -> NoReturn:
    require_stdout()
    name_stdout_in_errors()
    print(text, flush=True)
    sys.exit(0)

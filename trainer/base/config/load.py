"""Loading of a Config from a TOML file and the command line. An error message is one line: the setting, its value and origin,
the broken rule, and a likely fix if one is found."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.base.config import compatibility
from trainer.base.config.errors import ConfigError
from trainer.base.config.fields import settings
from trainer.base.config.flags import parse_argv, settings_of_flags
from trainer.base.config.pretrained import with_pretrained, with_tokenizer_backend
from trainer.base.config.required_files import FILE_SECTIONS, require_files
from trainer.base.config.schema.config import Config
from trainer.base.config.toml_file import DEFAULT_CONFIG, settings_of_file
from trainer.base.config.value_rules import check_values


def load_config(argv: Sequence[str], check_files: Collection[str] = FILE_SECTIONS, with_weights: bool = True) -> Config:
    """Load and check a configuration.

    Args:
        argv: `--config FILE` (default: train_configs/debug.toml) and any number of `--section.key value`.
        check_files: Sections whose files and packages must exist.
        with_weights: Whether a model that is named by its name on the Hub is downloaded completely, not only its small files.

    Raises:
        ConfigError: Its message is the complete line for the user.
    """
    flags = parse_argv(argv)
    file = flags.pop("--config", str(DEFAULT_CONFIG))
    values: dict[str, dict[str, Any]] = {setting.section: {} for setting in settings().values()}
    origins: dict[str, str] = {}
    for given in itertools.chain(settings_of_file(file), settings_of_flags(flags)):
        setting, value = given.setting, given.value()
        origins[setting.key] = given.origin
        if setting.is_table:
            given.require_valid_entry()
            values[setting.section].setdefault(setting.name, {})[given.entry] = value
            origins[f"{setting.key}.{given.entry}"] = given.origin
        else:
            values[setting.section][setting.name] = value
    _prefer_flag(values["training"], origins)
    values["run"]["name"] = values["run"].get("name") or Path(file).stem
    defaults = Config()
    sections = {name: replace(getattr(defaults, name), **members) for name, members in values.items()}
    config = Config(**sections, origins=origins)
    try:
        config = with_tokenizer_backend(with_pretrained(config, check_files, with_weights))
        check_values(config)
        compatibility.check(config)
        require_files(config, check_files)
    except ConfigError as error:
        raise ConfigError("", config.explain(error)) from None
    return config


def _prefer_flag(training: dict[str, Any], origins: dict[str, str]) -> None:
    """Remove the file's number of steps if the command line gives epochs, and the file's epochs if it gives steps."""
    for given, other in (("steps", "epochs"), ("epochs", "steps")):
        key = f"training.{other}"
        by_flag = origins.get(f"training.{given}", "").startswith("--") and training[given] is not None
        if by_flag and key in origins and not origins[key].startswith("--"):
            del training[other], origins[key]

"""Packages that only some settings need."""

import importlib
from types import ModuleType

from trainer.config.schema import ConfigError


def require_package(name: str, setting: str) -> ModuleType:
    """The package, or one module of it. Raises ConfigError, by the setting that asks for it, where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # it is installed, and lacks something itself
        raise ConfigError(setting, f"needs the package {package}: pip install {package}") from None

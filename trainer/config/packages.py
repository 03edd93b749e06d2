"""Optional packages, imported when a setting needs them."""

import importlib
import sys
from types import ModuleType

from trainer.config.schema import ConfigError


def require_package(name: str, setting: str) -> ModuleType:
    """Import and return a package or one of its modules. Raises a ConfigError about `setting` if the package is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is installed, but one of its own dependencies is not
        raise ConfigError(setting, f"needs the package {package}: {sys.executable} -m pip install {package}") from None

"""Optional packages, imported when a setting needs them."""

import importlib
import importlib.util
import sys
from types import ModuleType

from trainer.base.config.errors import ConfigError


def require_package(name: str, setting: str) -> ModuleType:
    """Import and return a package or one of its modules. Raises a ConfigError about `setting` if the package, or one that it
    needs, is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:  # of its own dependencies, one is missing
            raise ConfigError(setting, f"the package {package} cannot be imported ({error})") from None
        raise _missing(package, setting) from None


def require_installed(package: str, setting: str) -> None:
    """Like `require_package`, without importing the package. A folder of its name that holds no code does not count."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise _missing(package, setting)


def _missing(package: str, setting: str) -> ConfigError:
    return ConfigError(setting, f"needs the package {package}: {sys.executable} -m pip install {package}")

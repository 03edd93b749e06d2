"""Error about a setting."""

from collections.abc import Iterator
from contextlib import contextmanager

from trainer.base.system.streams import printable


class ConfigError(Exception):
    """Error about a setting whose value cannot be used. Commands print it as one line and exit with code 2.

    key: "section.name" of the setting, or "" if `message` is already the complete line.
    message: the broken rule. `Config.explain` prepends the value and its origin.
    """

    def __init__(self, key: str, message: str):
        self.key = key
        self.message = printable(message)
        super().__init__(f"{key}: {self.message}" if key else self.message)

    def __reduce__(self) -> tuple:
        return ConfigError, (self.key, self.message)  # worker processes raise it too


@contextmanager
def errors_about(key: str) -> Iterator[None]:
    """Context manager whose body raises a ConfigError about this setting instead of one about another, or about a path alone."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(key, error.message) from None

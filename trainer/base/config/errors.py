"""Error about a setting."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trainer.base.system.streams import printable
from trainer.base.system.urls import with_urls


class ConfigError(Exception):
    """Error about a setting whose value cannot be used. Commands print it as one line and exit with code 2.

    key: "section.name" of the setting, or "" if `message` is already the complete line.
    message: the broken rule. `Config.explain` prepends the value and its origin.
    """

    def __init__(self, key: str, message: str):
        self.key = key
        self.message = printable(with_urls(message))
        super().__init__(f"{key}: {self.message}" if key else self.message)

    def __reduce__(self) -> tuple:
        return ConfigError, (self.key, self.message)  # worker processes raise it too


@contextmanager
def errors_of_options(options: Mapping[str, str]) -> Iterator[None]:
    """Context manager whose body raises a ConfigError that names the option of a command instead of a setting. options: setting
    -> option with its value, or "" if it is not given."""
    try:
        yield
    except ConfigError as error:
        message = error.message
        for key, option in options.items():
            message = message.replace(f"--{key} ", f"{option.partition(' ')[0]} ") if option else message
        given = options.get(error.key, "")
        raise ConfigError("", f"{given}: {message}" if given else message) from None


@contextmanager
def errors_about(key: str) -> Iterator[None]:
    """Context manager whose body raises a ConfigError about this setting instead of one about another, or about a path alone."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(key, error.message) from None

"""Values as the user gives them, in a file or on the command line."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.base.config.errors import ConfigError
from trainer.base.config.fields import Setting, parse_text, parse_texts, range_error, type_error


@dataclass(frozen=True, kw_only=True)
class GivenValue:
    """A value of a setting, or of one entry of a setting that is a table. It is not parsed yet."""

    setting: Setting
    entry: str
    """Key of the entry, or "" if the setting is no table."""
    parse: Callable[[Any, Any], Any]
    """coerce for a value of a TOML file, parse_text for a word of the command line."""
    raw: Any
    origin: str
    """The setting and its value, as the user wrote them, for messages."""

    def value(self) -> Any:
        """Parse and check the value. Raises ConfigError."""
        setting, raw = self.setting, self.raw
        try:
            are_texts = setting.constraint.multiline and self.parse is parse_text
            value = parse_texts(raw) if are_texts else self.parse(raw, setting.type)
        except ValueError:
            problem = type_error(setting, raw)
            raise ConfigError("", f"{self.origin}: {problem}") from None
        if problem := range_error(value, setting.constraint):
            raise ConfigError("", f"{self.origin}: {problem}")
        return value

    def require_valid_entry(self) -> None:
        """Raise ConfigError if the key of a table's entry is not a name, or not printable text where this suffices."""
        is_text = self.setting.constraint.free_keys and self.entry.isprintable() and self.entry
        if not (self.entry.isidentifier() or is_text):
            raise ConfigError("", f"{self.origin}: {self.entry!r} is not a valid name")

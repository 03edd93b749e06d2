"""Conditions of a run, as data. Their English is made here, where it is shown; nothing parses it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from trainer.base.config.toml_text import toml_value

_NOT_SET = (None, "", 0, False, "none", "off")


class Settings(Protocol):
    """What a condition asks of a Config, whose sections are declared with conditions."""

    def value(self, key: str) -> Any: ...

    def datasets(self) -> Iterator[tuple[str, str, str]]: ...


class Known(NamedTuple):
    """What is known of a fact."""

    holds: bool
    detail: str = ""
    """What a message says about it in addition, such as the installed version."""
    setting: str = ""
    """Setting at fault, if it is another one than the fact's own."""


@dataclass(frozen=True)
class When:
    """A setting has one of some values."""

    setting: str
    values: tuple[Any, ...] = ()
    """Without values: the setting is set, which means not empty, 0, false, "none" or "off". A list has a value if it contains
    it."""
    negated: bool = False
    above: int | None = None
    """Bound of a number, instead of values."""

    @property
    def settings(self) -> frozenset[str]:
        """The settings on which the condition depends."""
        return frozenset((self.setting,))

    @property
    def own_value(self) -> str:
        """The values in English, or "" if the setting is just set."""
        if self.above is not None:
            return f"> {self.above}"
        listed = one_of([value if isinstance(value, str) else toml_value(value) for value in self.values])
        return f"{'!=' if self.negated else '='} {listed}" if self.values else ""

    @property
    def text(self) -> str:
        section, name = self.setting.split(".")
        empty = "empty " if self.negated and not self.values else ""
        return f"{empty}[{section}] {name} {self.own_value}".rstrip()

    @property
    def facts(self) -> frozenset["Fact"]:
        return frozenset()

    def holds(self, config: Settings, facts: "Facts") -> bool:
        value = config.value(self.setting)
        if self.above is not None:
            return value > self.above
        if self.values:
            members = value if isinstance(value, tuple) else (value,)
            return any(member in self.values for member in members) != self.negated
        is_set = bool(value) and value not in _NOT_SET
        return is_set != self.negated

    def key(self, config: Settings, facts: "Facts") -> str:
        """Return the setting that a message about this condition names."""
        return self.setting


@dataclass(frozen=True)
class Differs(When):
    """A setting has another value than its default."""

    default: Any = None

    def holds(self, config: Settings, facts: "Facts") -> bool:
        return config.value(self.setting) != self.default


@dataclass(frozen=True)
class Dataset:
    """One of the datasets has one of these types."""

    types: tuple[str, ...]
    negated: bool = False
    """Whether it must have another type."""

    setting = "data.dataset"
    settings = frozenset((setting,))
    own_value = ""
    facts = frozenset()

    @property
    def text(self) -> str:
        return f"a dataset that is not {one_of(self.types)}" if self.negated else f"a {one_of(self.types)} dataset"

    def holds(self, config: Settings, facts: "Facts") -> bool:
        return bool(self._found(config))

    def key(self, config: Settings, facts: "Facts") -> str:
        return self._found(config) or self.setting

    def _found(self, config: Settings) -> str:
        """Return the setting of the first such dataset, or ""."""
        single = "data.dataset" if not config.value("data.datasets") else ""
        found = ((single if key == "data.path" else key, type_) for key, type_, _ in config.datasets())
        return next((key for key, type_ in found if key and (type_ in self.types) != self.negated), "")


@dataclass(frozen=True)
class Evaluates:
    """The run evaluates, on datasets or on tasks that have an interval of their own."""

    setting = "evaluation.interval_steps"
    settings = frozenset((setting, "evaluation.tasks"))
    text = "[evaluation] interval_steps"
    own_value = ""
    facts = frozenset()

    def holds(self, config: Settings, facts: "Facts") -> bool:
        return config.value("evaluation.evaluates")

    def key(self, config: Settings, facts: "Facts") -> str:
        return self.setting


@dataclass(frozen=True)
class Fact:
    """Something about a run that its settings alone do not tell. Who knows it passes it to `compatibility.check`."""

    text: str
    setting: str = ""
    """Setting at fault, or "" if a message cannot begin with this condition."""

    settings = frozenset()
    own_value = ""

    @property
    def facts(self) -> frozenset["Fact"]:
        return frozenset((self,))

    def holds(self, config: Settings, facts: "Facts") -> bool:
        return facts[self].holds

    def key(self, config: Settings, facts: "Facts") -> str:
        return facts[self].setting or self.setting


@dataclass(frozen=True)
class Either:
    """One of several conditions holds."""

    members: tuple["Condition", ...]

    setting = own_value = ""

    @property
    def settings(self) -> frozenset[str]:
        return frozenset().union(*(member.settings for member in self.members))

    @property
    def text(self) -> str:
        return one_of([member.text for member in self.members])

    @property
    def facts(self) -> frozenset[Fact]:
        return frozenset().union(*(member.facts for member in self.members))

    def holds(self, config: Settings, facts: "Facts") -> bool:
        return any(member.holds(config, facts) for member in self.members)

    def key(self, config: Settings, facts: "Facts") -> str:
        return ""


Condition = When | Dataset | Evaluates | Fact | Either
Facts = Mapping[Fact, Known]


def all_of(words: list[str]) -> str:
    """Return "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def one_of(words: list[str] | tuple[str, ...]) -> str:
    """Return "a, b or c"."""
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))

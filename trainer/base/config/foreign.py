"""Names and values of other trainers, and what replaces each of them here (foreign.toml).

An unknown setting with one of these names is an error whose line names the replacement. docs/coming_from.md is generated from
the same file.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

_FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Foreign:
    """What replaces a setting of other projects."""

    projects: str = ""
    """Letters of the projects that use the name."""
    use: str = ""
    """The settings to use instead, separated by spaces. Empty: there is none, and the note says why."""
    note: str = ""
    """How the value is converted, or why there is no such setting."""


@functools.cache
def read_foreign() -> Mapping[str, Any]:
    """Return the tables of foreign.toml. The file is read at the first wrong name or value."""
    return tomli.loads(_FILE.read_text(encoding="utf-8"))


@functools.cache
def foreign_names() -> Mapping[str, Foreign]:
    """Return name in other projects -> what replaces it. A name with a dot applies only in that section."""
    return {name: Foreign(**entry) for name, entry in read_foreign()["names"].items()}


def hint_of_value(key: str, value: str) -> str:
    """Return what to write instead of another project's value of the setting `key`, or "" if the value is unknown."""
    return _hint(read_foreign()["values"].get(key, {}), value.lower())


def hint_of_option(script: str, option: str) -> str:
    """Return what to use instead of an option of commands that are similar to the script, or "" if the option is unknown."""
    return _hint(read_foreign()["arguments"].get(script, {}), normalized(option))


def _hint(names_of_hints: Mapping[str, list[str]], name: str) -> str:
    return next((hint for hint, names in names_of_hints.items() if name in names), "")


def normalized(name: str) -> str:
    """Return a name as in the table: small letters and underscores."""
    return name.strip("-+").lower().replace("-", "_")


def replacement(name: str, show: str) -> str:
    """Return a hint that names what replaces a setting of another project, or "" if the name is unknown.

    Args:
        name: With or without a section, in the spelling of a file or a flag.
        show: Format of one setting, with its section and its name: "[{0}] {1}".
    """
    key = normalized(name)
    found = foreign_names().get(key) or foreign_names().get(key.rpartition(".")[2])
    if found is None:
        return ""
    if not found.use:
        return f"; {found.note}"
    names = " and ".join(show.format(*key.split(".")) for key in found.use.split())
    return f"; use {names}: {found.note}" if found.note else f"; use {names}"

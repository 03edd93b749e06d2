"""A configuration as text: TOML, --help, and the tables of docs/configuration.md and docs/coming_from.md."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import tomli

from trainer.base.config.compatibility import ROWS, restrictions
from trainer.base.config.errors import ConfigError
from trainer.base.config.fields import Setting, options, settings, type_name
from trainer.base.config.foreign import foreign_names, read_foreign
from trainer.base.config.pretrained import is_from_pretrained
from trainer.base.config.schema.config import Config
from trainer.base.config.toml_text import toml_value
from trainer.base.system.run_files import CONFIG_FILE
from trainer.base.system.streams import without_credentials
from trainer.base.system.urls import with_urls


def to_toml(config: Config, show_origins: bool = False, keep_credentials: bool = False) -> str:
    """Return the configuration as TOML, including defaults. Loading this text with load_config returns an equal configuration.

    Args:
        config: The configuration.
        show_origins: Whether comments name the values that come from [model] pretrained.
        keep_credentials: Whether URLs keep their credentials, in a private file of a process that needs them.
    """
    lines = []
    omitted = {"training.steps"} if config.training.epochs is not None else set()  # a file has one of the two
    for section, members in groupby(settings().values(), attrgetter("section")):
        entries = [
            f"{s.name} = {toml_value(config.value(s.key))}{_comment(config, s, show_origins)}"
            for s in members
            if s.key not in omitted
        ]
        lines += [f"[{section}]", *entries, ""]
    text = with_urls("\n".join(lines))
    return text if keep_credentials else without_credentials(text)


def _comment(config: Config, setting: Setting, show_origins: bool) -> str:
    from_folder = show_origins and is_from_pretrained(config, setting.key)
    return f"  # from {config.model.pretrained}" if from_folder else ""


def setting_texts(text: str, file: Path) -> dict[str, str]:
    """Return "section.key" -> value of each setting of a TOML configuration, without credentials. Raises ConfigError, about
    `file`, if it is not valid TOML."""
    text = without_credentials(text)
    try:
        return {f"{s}.{k}": toml_value(v) for s, section in tomli.loads(text).items() for k, v in section.items()}
    except (tomli.TOMLDecodeError, AttributeError, RecursionError):
        raise ConfigError("", f"{file} is not the configuration of a run") from None


def differing_settings(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return "section.key before -> now" for each setting that differs between two results of `setting_texts`. Versions
    differ in their settings."""
    absent = "(not a setting)"
    keys = [key for key in new | old if old.get(key) != new.get(key)]
    return [f"{key} {old.get(key, absent)} -> {new.get(key, absent)}" for key in keys]


def require_same_settings(config: Config, what: str, may_differ: tuple[str, ...] = ()) -> None:
    """Raise ConfigError if the run folder belongs to a run with other settings, whose losses would pass for those of this one.

    Args:
        config: Settings of a run that is about to start or to continue.
        what: What the folder contains, such as "a run".
        may_differ: Beginnings of the names of settings that may differ.
    """
    folder = config.run.folder
    file = folder / CONFIG_FILE
    if not file.exists():
        return
    before, now = setting_texts(file.read_text(), file), setting_texts(to_toml(config), file)
    differences = [text for text in differing_settings(before, now) if not text.startswith(may_differ)]
    if differences:
        advice = f"remove {folder}, or set another --run.name"
        raise ConfigError("", f"{folder} has {what} with other settings ({', '.join(differences[:3])}); {advice}")


def _limits(setting: Setting) -> str:
    """Return the unit, range and conditions of a setting, as --help and docs/configuration.md show them."""
    c = setting.constraint
    limits = {
        c.unit: c.unit,
        f"at least {c.min}": c.min is not None,
        f"above {c.exclusive_min}": c.exclusive_min is not None,
        f"at most {c.max}": c.max is not None,
        "fixed on resume": c.fixed_on_resume,
    }
    conditions = [f"used with {c.used_with.text}"] if c.used_with else []
    return ", ".join([*(text for text, applies in limits.items() if applies), *restrictions(setting.key), *conditions])


def _type(setting: Setting) -> str:
    return "a table" if setting.is_table else type_name(setting.type)


def help_text() -> str:
    lines = [
        "usage: train.py [--config FILE.toml] [--from FOLDER] [--SECTION.KEY VALUE ...] [--dry-run] [--print-config] [--help]",
        "",
        "Settings come from the TOML file (default: train_configs/debug.toml); the command line overrides them.",
        "--from FOLDER, short for --model.pretrained, gives model, initial weights, tokenizer and chat template.",
        "--print-config prints the resulting configuration and exits.",
        "--dry-run checks data, tokenizer, weights, memory and disk, prints what the run would do, and exits.",
    ]
    for section, members in groupby(settings().values(), attrgetter("section")):
        lines += ["", f"[{section}]"]
        for s in members:
            flag = f"--{s.key}.NAME" if s.is_table else f"--{s.key}"
            limits = f" ({_limits(s)})" if _limits(s) else ""
            lines += [f"  {flag}: {_type(s)}; default {toml_value(s.default)}{limits}", f"      {s.doc}"]
            for option in options(s.key).values():
                limits = f" ({_limits(option)})" if _limits(option) else ""
                lines.append(f"      .{option.name}: {_type(option)}; default {toml_value(option.default)}{limits}")
                lines.append(f"          {option.doc}")
    return "\n".join(lines)


def settings_as_markdown() -> str:
    """Return the tables of docs/configuration.md, one per section."""
    lines = []
    for section, members in groupby(settings().values(), attrgetter("section")):
        of_section = list(members)
        lines += [f"## [{section}]", "", *_table(of_section), ""]
        for s in of_section:
            if known := options(s.key):
                lines += [f"### [[{s.key}]]", "", *_table(known.values()), ""]
    return "\n".join(lines)


def _table(shown: Iterable[Setting]) -> list[str]:
    lines = ["| key | type | default | unit, range, conditions | meaning |", "|---|---|---|---|---|"]
    for s in shown:
        cells = (f"`{s.name}`", _type(s), f"`{toml_value(s.default)}`", _limits(s), s.doc)
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return lines


def compatibility_as_markdown() -> str:
    """Return the tables of docs/compatibility.md."""
    lines = []
    for title, verb, excludes in (("Refused together", "does not work with", True), ("Required", "needs", False)):
        lines += [f"## {title}", "", f"| this | {verb} | because |", "|---|---|---|"]
        for row in ROWS:
            given = "" if row.given is None else f" (with {row.given.text})"
            if row.excludes == excludes:
                lines.append(f"| {row.first.text}{given} | {row.second.text} | {row.reason} |")
        lines.append("")
    return "\n".join(lines)


def foreign_as_markdown() -> str:
    """Return the tables of docs/coming_from.md, one per project."""
    lines = []
    for project, letter in read_foreign()["projects"].items():
        lines += [f"## {project}", "", "| there | here | remark |", "|---|---|---|"]
        for name, found in foreign_names().items():
            if letter in found.projects:
                section, _, last = name.rpartition(".")
                there = f"`{last}` of {section}" if section else f"`{last}`"
                here = ", ".join(f"`{key}`" for key in found.use.split())
                lines.append(f"| {there} | {here} | {found.note.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)

"""The settings of a TOML file."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli

from trainer.base.config.errors import ConfigError
from trainer.base.config.fields import Layer, layer_of_value, options, settings
from trainer.base.config.foreign import read_foreign, replacement
from trainer.base.config.toml_text import toml_value
from trainer.base.config.unknown_names import IN_FILE, REMOVED, WITHOUT_EFFECT, hint
from trainer.base.system import console
from trainer.base.system.files import read_limited
from trainer.base.system.run_files import LARGEST_CONFIG
from trainer.base.system.spelling import did_you_mean, nearest, nearest_path

_TRANSLATED = 3
"""Number of settings of another trainer's file that a message translates."""
DEFAULT_CONFIG = Path(__file__).parents[3] / "train_configs" / "debug.toml"


def layer_of_file(file: str) -> Layer:
    """Return each value in the file. Raises ConfigError for a section or a key that does not exist."""
    sections = {setting.section for setting in settings().values()}
    layer: Layer = {}
    for section, body in _read_toml(file).items():
        if not isinstance(body, dict):
            own = f"; write [{section}] as a table" if section in sections else ""
            line = f"{file} {section} = {toml_value(body)}: the key is outside any [section]"
            raise ConfigError("", f"{line}{hint(section, IN_FILE) or own}")
        if section not in sections:
            raise _unknown_section(file, section, body)
        for name, raw in body.items():
            layer |= _values_of_key(file, section, name, raw)
    return layer


def _unknown_section(file: str, section: str, body: dict[str, Any]) -> ConfigError:
    """Return the error of a section that does not exist. It names what replaces the first key that another trainer has too."""
    for name in body:
        if used := replacement(f"{section}.{name}", IN_FILE):
            return ConfigError("", f"{file} [{section}] {name}: unknown section{used}")
    sections = {setting.section for setting in settings().values()}
    own = read_foreign()["sections"].get(section)
    meant = f"; did you mean [{own}]?" if own else did_you_mean(section, sections, "[{}]")
    return ConfigError("", f"{file} [{section}]: unknown section{meant}")


def _values_of_key(file: str, section: str, name: str, raw: Any) -> Layer:
    """Return the value of a key, or of each entry of the key's table."""
    setting = settings().get(f"{section}.{name}")
    if setting is None:
        siblings = [s.name for s in settings().values() if s.section == section]
        if f"{section}.{name}" in WITHOUT_EFFECT:
            console.warning(f"{file} [{section}] {name} has no effect: {REMOVED[f'{section}.{name}']}")
            return {}
        used = hint(f"{section}.{name}", IN_FILE) or did_you_mean(name, siblings)
        raise ConfigError("", f"{file} [{section}] {name}: unknown key{used}")
    origin = f"{file} [{section}] {name} = {toml_value(raw)}"
    if not setting.is_table:
        return layer_of_value(setting, "", raw, origin, is_text=False)
    named = options(setting.key)
    if named and isinstance(raw, list):
        raw = _by_name(file, setting.key, raw)
    if not isinstance(raw, dict):
        raise ConfigError("", f"{origin}: expected a table")
    layer: Layer = {}
    for entry, value in raw.items():
        if named and isinstance(value, dict) and value:
            for option, given in value.items():
                origin = f"{file} [{setting.key}.{entry}] {option} = {toml_value(given)}"
                layer |= layer_of_value(setting, f"{entry}.{option}", given, origin, is_text=False)
            continue
        origin = f"{file} [{setting.key}] {entry} = {toml_value(value)}"
        layer |= layer_of_value(setting, entry, value, origin, is_text=False)
    return layer


def _by_name(file: str, key: str, tables: list[Any]) -> dict[str, Any]:
    """Return name -> table of an array of tables, each of which has a name. Raises ConfigError."""
    named: dict[str, Any] = {}
    for table in tables:
        name = table.get("name") if isinstance(table, dict) else None
        if not isinstance(name, str):
            raise ConfigError(
                "", f'{file} [[{key}]] {toml_value(table)}: expected a table with a name, such as name = "arc"'
            )
        if name in named:
            raise ConfigError("", f"{file} [[{key}]] name = {toml_value(name)}: another table has this name")
        named[name] = {option: value for option, value in table.items() if option != "name"}
    return named


def _read_toml(file: str) -> dict[str, Any]:
    try:
        content = tomli.loads(Path(file).read_text(encoding="utf-8-sig"))
        toml_value(content)  # error messages show values in this form
        return content
    except FileNotFoundError:
        problem = f"no such file{_similar_file(file)}"
    except IsADirectoryError:
        problem = "expected a TOML file, got a folder"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text (byte {error.start})"
    except tomli.TOMLDecodeError as error:
        is_toml = Path(file).suffix not in (".yaml", ".yml", ".json", ".py")
        problem = f"not valid TOML: {error}" if is_toml else "expected a TOML file such as train_configs/debug.toml"
        problem += "" if is_toml else _translation(file)
    except (ValueError, RecursionError):  # a number has thousands of digits, or values are nested hundreds of times
        problem = "a value is too long or nested too deep"
    raise ConfigError("", f"--config {file}: {problem}")


def _translation(file: str) -> str:
    """Return a hint about the settings of another trainer in a JSON or YAML file, or ""."""
    with suppress(OSError, ValueError):
        text = read_limited(Path(file), LARGEST_CONFIG).decode()
        names = dict.fromkeys(re.findall(r"""(?:^|[{,])\s*["']?([A-Za-z_]\w*)["']?\s*:""", text, re.MULTILINE))
        found = [f"{name}{used.replace(';', ':', 1)}" for name in names if (used := replacement(name, IN_FILE))]
        if found:
            shown = "; ".join(found[:_TRANSLATED])
            return f"; it has settings of another trainer, which docs/coming_from.md translates, such as {shown}"
    return ""


def _similar_file(file: str) -> str:
    """Return a hint with the existing file that the user may have meant: one of train_configs/ by its name alone, or a similar
    name in the same folder."""
    named = Path(file).stem
    for path in (Path(f"{file}.toml"), DEFAULT_CONFIG.parent / f"{named}.toml"):
        if path.exists():
            return f"; did you mean '{os.path.relpath(path)}'?"
    shipped = {path.stem: os.path.relpath(path) for path in DEFAULT_CONFIG.parent.glob("*.toml")}
    shipped_name = shipped.get(nearest(named, shipped), "")
    similar = found if (found := nearest_path(file)).endswith(".toml") else shipped_name or found
    return similar and f"; did you mean '{similar}'?"

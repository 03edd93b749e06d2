"""The settings declared in schema/, with parsers and checks for their values."""

import ast
import functools
import inspect
import itertools
import math
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import tomli

from trainer.base.config.errors import ConfigError
from trainer.base.config.foreign import hint_of_value
from trainer.base.config.schema.config import Config
from trainer.base.config.schema.constraint import Constraint
from trainer.base.config.toml_text import toml_value
from trainer.base.system import console
from trainer.base.system.spelling import did_you_mean


@dataclass(frozen=True)
class Setting:
    """A setting that a module of schema/ declares."""

    section: str
    name: str
    type: Any
    """Declared type without `Annotated`. If the setting is a table, this is the type of its values."""
    is_table: bool
    """Whether the setting is a table whose keys the user chooses."""
    constraint: Constraint
    default: Any
    doc: str

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"


@dataclass(frozen=True)
class Value:
    """A value of a setting, or of one entry of a setting that is a table. Its type and range have been checked."""

    value: Any
    origin: str
    """The setting and its value, as the user wrote them, or where it comes from, for messages. Empty: a default."""


Layer = dict[str, Value]
"""Values from one source: "section.name", or "section.table.entry" for an entry of a table, -> value."""


@functools.cache
def settings() -> Mapping[str, Setting]:
    """Return "section.name" -> Setting, in the order of `Config`."""
    sections = {name: values for name, values in vars(Config()).items() if is_dataclass(values)}
    return {s.key: s for section, values in sections.items() for s in _declared(section, values)}


@functools.cache
def options(setting_key: str) -> Mapping[str, Setting]:
    """Return name -> option of each entry of a table whose values are dataclasses, or {} for any other setting. The key of an
    option contains NAME in place of the entry's name."""
    setting = settings()[setting_key]
    declared = _declared(f"{setting.key}.NAME", setting.type()) if is_dataclass(setting.type) else ()
    return {option.name: option for option in declared}


def _declared(section: str, values: Any) -> Iterator[Setting]:
    """Yield the settings that a dataclass declares. values: instance with the defaults."""
    cls = type(values)
    types_, docs = typing.get_type_hints(cls), _docstrings(cls.__module__)
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        constraint = Constraint()
        # First the constraints of an alias such as Steps, then those of the setting.
        for given in getattr(hint, "__metadata__", ()):
            changes = {k: v for k, v in vars(given).items() if v != getattr(Constraint, k)}
            constraint = replace(constraint, **changes)
        type_, is_table = types_[name], typing.get_origin(types_[name]) is Mapping
        type_ = typing.get_args(type_)[1] if is_table else type_
        doc, default = docs[f"{cls.__name__}.{name}"], getattr(values, name)
        yield Setting(section, name, type_, is_table, constraint, default, doc)


@functools.cache
def _docstrings(module: str) -> dict[str, str]:
    """Return "Class.field" -> docstring that follows the field, for the classes of a module."""
    docs = {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for member, text in itertools.pairwise(cls.body):
            match member, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    docs[f"{cls.name}.{name}"] = " ".join(doc.split())
    return docs


def _options(type_: Any) -> tuple[Any, ...]:
    """Return the members of a union. For any other type, return a tuple of this type."""
    return typing.get_args(type_) if typing.get_origin(type_) in (typing.Union, types.UnionType) else (type_,)


def is_list(type_: Any) -> bool:
    """Return whether the type is a list of any length."""
    return typing.get_origin(type_) is tuple and typing.get_args(type_)[1:] == (...,)


def type_name(type_: Any) -> str:
    """Return a type's description for an error message, where it follows the word "expected"."""
    if len(_options(type_)) > 1:
        return " or ".join(type_name(k) for k in _options(type_) if not (k is int and float in _options(type_)))
    if typing.get_origin(type_) is typing.Literal:
        return "one of " + ", ".join(typing.get_args(type_))
    if typing.is_typeddict(type_):
        return "a table with one or more of " + ", ".join(typing.get_type_hints(type_))
    if is_list(type_):
        member = typing.get_args(type_)[0]
        if typing.get_origin(member) is typing.Literal:
            return "a list of " + " | ".join(typing.get_args(member))
        return "a list of " + {str: "names", bool: "true | false"}.get(member, "values")
    if typing.get_origin(type_) is tuple:
        return f"a list of {len(typing.get_args(type_))} numbers"
    return {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "none"}[type_]


def layer_of_value(setting: Setting, entry: str, raw: Any, origin: str, is_text: bool) -> Layer:
    """Parse and check a value, and return it as a layer.

    Args:
        setting: The setting.
        entry: Which entry of a setting that is a table, otherwise "". "entry.option" is an option of an entry that is a
            dataclass, and "entry" then all its options.
        raw: A word of the command line, or a value of a TOML file.
        origin: What an error message begins with.
        is_text: Whether `raw` is a word of the command line.

    Raises:
        ConfigError: The value has another type, or is out of range, or the name of the entry is not valid.
    """
    if is_dataclass(setting.type):
        return _layer_of_options(setting, entry, raw, origin, is_text)
    try:
        if is_text:
            value = parse_texts(raw) if setting.constraint.multiline else parse_text(raw, setting.type)
        else:
            value = coerce(raw, setting.type)
    except ValueError as error:
        raise ConfigError("", f"{origin}: {str(error) or type_error(setting, raw)}") from None
    if problem := range_error(value, setting.constraint):
        raise ConfigError("", f"{origin}: {problem}")
    if not setting.is_table:
        return {setting.key: Value(value, origin)}
    is_printable = setting.constraint.free_keys and entry.isprintable() and entry
    if not (entry.isidentifier() or is_printable):
        raise ConfigError("", f"{origin}: {entry!r} is not a valid name")
    return {f"{setting.key}.{entry}": Value(value, origin)}


def _layer_of_options(setting: Setting, entry: str, raw: Any, origin: str, is_text: bool) -> Layer:
    """Return the layer of one option, or of all given options, of an entry that is a dataclass. See layer_of_value."""
    known, (name, _, option) = options(setting.key), entry.partition(".")
    if not re.fullmatch("[A-Za-z0-9_-]+", name):
        raise ConfigError("", f"{origin}: {name!r} is not a valid name; it must consist of letters, digits, _ and -")
    given = {option: raw} if option else raw
    if is_text and not option:
        with suppress(ValueError):
            given, is_text = _table_of_text(raw), False
    if not isinstance(given, dict) or not given:
        raise ConfigError("", f"{origin}: expected a table with one or more of {', '.join(known)}")
    layer: Layer = {}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                "", f"{origin}: unknown option {key}; it is one of {', '.join(known)}{did_you_mean(key, known)}"
            )
        of_entry = replace(known[key], section=f"{setting.key}.{name}")
        own = origin if option else f"{origin}, {key}"
        layer |= layer_of_value(of_entry, "", value, own, is_text)
    return layer


def coerce(raw: Any, type_: Any) -> Any:
    """Convert a TOML value to `type_`. Raises ValueError, with a message if the type's name does not say what is wrong."""
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if typing.is_typeddict(type_):
        return _coerce_options(raw, type_)
    if len(_options(type_)) > 1:
        for option in _options(type_):
            with suppress(ValueError):
                return coerce(raw, option)
    elif origin is typing.Literal and isinstance(raw, str) and raw in arguments:
        return raw
    elif origin is tuple and isinstance(raw, list):
        members = arguments[:1] * len(raw) if is_list(type_) else arguments
        if len(raw) == len(members):
            return tuple(map(coerce, raw, members))
    elif type_ is type(None) and raw == "none":
        return None
    elif type_ is float and type(raw) is int and abs(raw) < 10**300:
        return float(raw)
    elif type(raw) is type_:
        return raw
    raise ValueError


def _coerce_options(given: Any, type_: Any) -> dict[str, Any]:
    """Convert a table of options, of which at least one must be given, or its text. Raises ValueError as `coerce` does."""
    types_, hints = typing.get_type_hints(type_), typing.get_type_hints(type_, include_extras=True)
    table, options = _table_of_text(given) if isinstance(given, str) else given, {}
    if not isinstance(table, dict) or not table:
        raise ValueError
    for name, raw in table.items():
        if name not in types_:
            raise ValueError(f"{name}: expected one of {', '.join(types_)}{did_you_mean(name, types_)}")
        option = types_[name]
        problem = f"expected {type_name(option)}{did_you_mean(str(raw), typing.get_args(option))}"
        with suppress(ValueError):
            options[name] = coerce(raw, option)
            constraints = getattr(hints[name], "__metadata__", ())
            problem = next(filter(None, (range_error(options[name], c) for c in constraints)), "")
        if problem:
            raise ValueError(f"{name} = {toml_value(raw)}: {problem}")
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        console.warning(f'"{given}" is the form of the version before; write {toml_value(options)}')
    return options


def _table_of_text(text: str) -> Any:
    """Return the value of an inline table of TOML, or of its form in the version before, such as lr=0.3 decay=0. Raises
    ValueError."""
    words = [word.partition("=") for word in text.split()]
    if words and all(name.isidentifier() and equals for name, equals, _ in words):
        table = {name: parse_text(value, float | str) for name, _, value in words}
        if len(table) < len(words):
            raise ValueError
        return table
    if text.isprintable():  # no further line, which would be another value
        with suppress(ValueError, RecursionError):
            return tomli.loads(f"table = {text}")["table"]
    raise ValueError


def parse_text(text: str, type_: Any) -> Any:
    """Convert a command-line word to `type_`. Raises ValueError as `coerce` does."""
    if typing.get_origin(type_) is tuple:
        member = typing.get_args(type_)[0]
        if not text.strip() and typing.get_origin(member) is typing.Literal:
            raise ValueError  # an empty list is written []
        words = [word for word in _words(text) if word or member is not str]  # empty names are dropped
        return coerce([parse_text(word, member) for word in words], type_)
    with suppress(ValueError):
        if text in ("true", "false"):
            return coerce(text == "true", type_)
        is_integer = re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*", text)
        return coerce(int(text) if is_integer else float(text), type_)
    return coerce(text, type_)  # the type is text, a choice or none


def parse_texts(text: str) -> tuple[str, ...]:
    """Return the texts of a list that is written as ["a", "b"], or else the text itself, such as "[INST] a, b [/INST]". Raises
    ValueError if a text begins like such a list, but is none."""
    values = _toml_texts(text)
    if values is None and re.match(r"\s*\[\s*[\"']", text):
        raise ValueError
    return (text,) if values is None else tuple(values)


def _toml_texts(text: str) -> list[str] | None:
    """Return the texts of a list of TOML, or None. Such a text may contain a comma, or a space at its end."""
    with suppress(tomli.TOMLDecodeError, RecursionError):
        values = tomli.loads(f"list = {text}")["list"] if text.lstrip().startswith("[") else None
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            return values
    return None


def _words(text: str) -> list[str]:
    """Split the text of a list, written as a,b or as ["a", "b"], into its words."""
    text = text.strip()
    if (values := _toml_texts(text)) is not None:
        return values
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    return [word.strip().strip("\"'") for word in text.split(",")] if text.strip() else []


def range_error(value: Any, constraint: Constraint) -> str:
    """Return the first rule that a value breaks, or "" if it breaks none. value: must have the declared type."""
    if isinstance(value, tuple):
        return next(filter(None, (range_error(v, constraint) for v in value)), "")
    if isinstance(value, str):
        text = re.sub(r"[\n\t]", " ", value) if constraint.multiline else value
        return "" if text.isprintable() else "must be printable text"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    least, above, most = constraint.min, constraint.exclusive_min, constraint.max
    rules = {
        "must be finite": isinstance(value, int) or math.isfinite(value),
        f"must be at least {least}": least is None or value >= least,
        f"must be at most {most}": most is None or value <= most,
        f"must be above {above}": above is None or value > above,
        "must be a 64-bit integer": isinstance(value, float) or -(2**63) <= value < 2**63,
    }
    return next((rule for rule, is_met in rules.items() if not is_met), "")


_BOOLEANS = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
_MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9}


def type_error(setting: Setting, raw: Any) -> str:
    """Return the message for a value that `coerce` or `parse_text` rejected."""
    type_ = setting.type
    types_ = typing.get_args(type_)[:1] if is_list(type_) else _options(type_)
    words_of = {bool: ("true", "false"), type(None): ("none",)}
    choices = [w for k in types_ for w in words_of.get(k, ())]
    choices += [w for k in types_ if typing.get_origin(k) is typing.Literal for w in typing.get_args(k)]
    words = [str(word) for word in raw] if isinstance(raw, list) else _words(str(raw))
    unknown = next((word for word in words if word not in choices), "")
    hint = hint_of_value(setting.key, unknown)
    if not hint and bool in types_ and (same := _BOOLEANS.get(unknown.lower())):
        hint = f"write {same}"
    if not hint and int in types_ and (whole := _whole_number(str(raw))) is not None:
        hint = f"write {whole}"
    if not hint and type(None) in types_ and unknown.lower() in ("null", "off", "false", "disabled"):
        hint = "write none"
    return f"expected {type_name(type_)}" + (f"; {hint}" if hint else did_you_mean(unknown, choices))


def _whole_number(text: str) -> int | None:
    """Return the integer that a text such as 1e3, 5.0, 2k or 10,000 stands for, or None."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?(?:e[0-9])?)([kmg]?)", text.lower().replace(",", ""))
    value = float(match[1]) * _MULTIPLES.get(match[2], 1) if match else 0.5
    return int(value) if value.is_integer() else None

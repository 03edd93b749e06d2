"""The settings that schema.py declares (type, constraint, default, meaning); parsers and checks of single values."""

import ast
import difflib
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from trainer.config import schema as declarations
from trainer.config.schema import Config, Constraint


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One declared setting. type: the declared type without `Annotated`."""

    section: str
    name: str
    type: Any
    constraint: Constraint
    default: Any
    doc: str

    @property
    def flag(self) -> str:
        return f"--{self.section}.{self.name}"

    @property
    def value_type(self) -> Any:
        """Type of the setting's value, or of one entry if the setting is a table."""
        return typing.get_args(self.type)[1] if is_table(self.type) else self.type


@functools.cache
def settings() -> Mapping[str, Mapping[str, Setting]]:
    """Return section name -> setting name -> Setting, in the order of schema.py."""
    docs = _docstrings()
    table = {}
    defaults = Config()
    for section in fields(Config):
        cls = section.default_factory
        if not is_dataclass(cls):
            continue
        hints = typing.get_type_hints(cls, include_extras=True)
        table[section.name] = {
            f.name: _setting(section.name, f.name, hints[f.name], defaults, docs[cls.__name__][f.name])
            for f in fields(cls)
        }
    return table


def _setting(section: str, name: str, hint: Any, defaults: Config, doc: str) -> Setting:
    constraint = Constraint()
    if typing.get_origin(hint) is typing.Annotated:
        hint, *constraints = typing.get_args(hint)
        for declared in constraints:  # first the constraints of an alias such as Steps, then those of the setting
            constraint = replace(constraint, **{k: v for k, v in vars(declared).items() if v != getattr(Constraint, k)})
    default = getattr(getattr(defaults, section), name)
    return Setting(section=section, name=name, type=hint, constraint=constraint, default=default, doc=doc)


def _docstrings() -> dict[str, dict[str, str]]:
    """Return class name -> field name -> docstring that follows the field in schema.py."""
    docs: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(declarations)).body:
        if isinstance(node, ast.ClassDef):
            docs[node.name] = {
                member.target.id: " ".join(text.value.value.split())
                for member, text in zip(node.body, node.body[1:], strict=False)
                if isinstance(member, ast.AnnAssign)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            }
    return docs


# ---------------------------------------------------------------- one value


def _options(type_: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return typing.get_args(type_) if typing.get_origin(type_) in (typing.Union, types.UnionType) else (type_,)


def is_table(type_: Any) -> bool:
    """Whether the type is a table whose keys the user chooses."""
    return typing.get_origin(type_) is Mapping


def is_list(type_: Any) -> bool:
    """Whether the type is a list of any length."""
    return typing.get_origin(type_) is tuple and typing.get_args(type_)[1:] == (...,)


def type_name(type_: Any) -> str:
    """Return the description of a type that an error message shows after "expected"."""
    if len(_options(type_)) > 1:
        return " or ".join(type_name(k) for k in _options(type_) if not (k is int and float in _options(type_)))
    if typing.get_origin(type_) is typing.Literal:
        return "one of " + ", ".join(typing.get_args(type_))
    if is_list(type_):
        member = typing.get_args(type_)[0]
        return "a list of " + (" | ".join(typing.get_args(member)) if member is not str else "names")
    if typing.get_origin(type_) is tuple:
        return f"a list of {len(typing.get_args(type_))} numbers"
    if is_table(type_):
        return "a table"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "none"}
    return names[type_]


def coerce(raw: Any, type_: Any) -> Any:
    """Convert a TOML value to `type_`. Raises ValueError."""
    if len(_options(type_)) > 1:
        for option in _options(type_):
            try:
                return coerce(raw, option)
            except ValueError:
                continue
        raise ValueError
    if typing.get_origin(type_) is typing.Literal:
        if isinstance(raw, str) and raw in typing.get_args(type_):
            return raw
        raise ValueError
    if typing.get_origin(type_) is tuple:
        members = typing.get_args(type_)
        if is_list(type_) and isinstance(raw, list | tuple):
            members = members[:1] * len(raw)
        if not isinstance(raw, list | tuple) or len(raw) != len(members):
            raise ValueError
        return tuple(coerce(r, m) for r, m in zip(raw, members, strict=True))
    if type_ is type(None):
        if raw == "none":
            return None
        raise ValueError
    if type_ is float and type(raw) is int and abs(raw) < 10**300:
        return float(raw)
    if type(raw) is not type_:
        raise ValueError
    return raw


def parse_text(text: str, type_: Any) -> Any:
    """Convert a command-line word to `type_`. Raises ValueError."""
    if is_list(type_):
        return coerce(_words(text), type_)
    try:
        return coerce(text, type_)  # the type is text, a choice or none
    except ValueError:
        return coerce(_literal(text), type_)


def _words(text: str) -> list[str]:
    """Parse a list of names: a,b or ["a", "b"]."""
    names = (word.strip().strip("\"'") for word in text.removeprefix("[").removesuffix("]").split(","))
    return [name for name in names if name]


def _literal(text: str) -> Any:
    """Parse a boolean, a number or a list of numbers (0.9,0.95 or [0.9, 0.95]). Raises ValueError."""
    if text in ("true", "false"):
        return text == "true"
    if "," in text or text.startswith("["):
        return [_literal(word.strip()) for word in text.removeprefix("[").removesuffix("]").split(",")]
    if re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*", text):
        return int(text)
    return float(text)


def range_error(value: Any, constraint: Constraint) -> str:
    """Return the rule of the constraint that a value of the right type breaks, or "" if it breaks none."""
    if isinstance(value, tuple):
        return next(filter(None, (range_error(v, constraint) for v in value)), "")
    if isinstance(value, str) and not value.isprintable():
        return "must be printable text"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if not math.isfinite(value):
        return "must be finite"
    if constraint.min is not None and value < constraint.min:
        return f"must be at least {constraint.min}"
    if constraint.max is not None and value > constraint.max:
        return f"must be at most {constraint.max}"
    if constraint.exclusive_min is not None and value <= constraint.exclusive_min:
        return f"must be above {constraint.exclusive_min}"
    return ""


def did_you_mean(word: str, candidates: Iterable[str], show: str = "{!r}") -> str:
    """Return "; did you mean 'x'?" for the closest candidate, ignoring case, or "" if none is close."""
    names = {name.lower(): name for name in candidates}
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {show.format(names[close[0]])}?" if close else ""


def type_error(type_: Any, raw: Any) -> str:
    """Return the message for a value that `coerce` or `parse_text` rejected."""
    given = [raw] if isinstance(raw, str) else []
    if is_list(type_):
        types_ = typing.get_args(type_)[:1]
        words = _words(raw) if isinstance(raw, str) else raw if isinstance(raw, list) else []
        given = [word for word in words if isinstance(word, str)]
    else:
        types_ = _options(type_)
    choices = [w for k in types_ if typing.get_origin(k) is typing.Literal for w in typing.get_args(k)]
    unknown = next((word for word in given if word not in choices), "")
    return f"expected {type_name(type_)}" + did_you_mean(unknown, choices)

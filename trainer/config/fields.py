"""The declarations of config.py, read: each setting with its type, rule, default and meaning, and what a single value
of it may be."""

import ast
import difflib
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from trainer.config import schema as declarations
from trainer.config.schema import Config, Constraint


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One declared setting; `kind` is its type without annotations."""

    section: str
    name: str
    kind: Any
    rule: Constraint
    default: Any
    doc: str

    @property
    def flag(self) -> str:
        return f"--{self.section}.{self.name}"

    @property
    def value_kind(self) -> Any:
        """The type of one value: of the entries, where the setting is a table."""
        return typing.get_args(self.kind)[1] if is_table(self.kind) else self.kind


@functools.cache
def settings() -> Mapping[str, Mapping[str, Setting]]:
    """Section name -> setting name -> Setting, in the order of config.py."""
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
    rule = Constraint()
    if typing.get_origin(hint) is typing.Annotated:
        hint, rule = typing.get_args(hint)
    default = getattr(getattr(defaults, section), name)
    return Setting(section=section, name=name, kind=hint, rule=rule, default=default, doc=doc)


def _docstrings() -> dict[str, dict[str, str]]:
    """Class name -> field name -> the string that follows the field in config.py."""
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


def _options(kind: Any) -> tuple[Any, ...]:
    """The members of a union; any other type alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def is_table(kind: Any) -> bool:
    """Whether the setting is a table of entries that a user names."""
    return typing.get_origin(kind) is Mapping


def is_list(kind: Any) -> bool:
    """Whether the setting is a list of any length."""
    return typing.get_origin(kind) is tuple and typing.get_args(kind)[1:] == (...,)


def type_name(kind: Any) -> str:
    """The type in a user's words, as it stands behind 'expected'."""
    if len(_options(kind)) > 1:
        return " or ".join(type_name(k) for k in _options(kind) if not (k is int and float in _options(kind)))
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    if is_list(kind):
        member = typing.get_args(kind)[0]
        return "a list of " + (" | ".join(typing.get_args(member)) if member is not str else "names")
    if typing.get_origin(kind) is tuple:
        return f"a list of {len(typing.get_args(kind))} numbers"
    if is_table(kind):
        return "a table"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "none"}
    return names[kind]


def coerce(raw: Any, kind: Any) -> Any:
    """The value of `kind` that a TOML value means. Raises ValueError where there is none."""
    if len(_options(kind)) > 1:
        for option in _options(kind):
            try:
                return coerce(raw, option)
            except ValueError:
                continue
        raise ValueError
    if typing.get_origin(kind) is typing.Literal:
        if isinstance(raw, str) and raw in typing.get_args(kind):
            return raw
        raise ValueError
    if typing.get_origin(kind) is tuple:
        members = typing.get_args(kind)
        if is_list(kind) and isinstance(raw, list | tuple):
            members = members[:1] * len(raw)
        if not isinstance(raw, list | tuple) or len(raw) != len(members):
            raise ValueError
        return tuple(coerce(r, m) for r, m in zip(raw, members, strict=True))
    if kind is type(None):
        if raw == "none":
            return None
        raise ValueError
    if kind is float and type(raw) is int and abs(raw) < 10**300:
        return float(raw)
    if type(raw) is not kind:
        raise ValueError
    return raw


def parse_text(text: str, kind: Any) -> Any:
    """The value of `kind` that a command-line word means. Raises ValueError where there is none."""
    if is_list(kind):
        return coerce(_words(text), kind)
    try:
        return coerce(text, kind)  # text, a choice, none
    except ValueError:
        return coerce(_literal(text), kind)


def _words(text: str) -> list[str]:
    """The names of a list that a word writes: a,b or ["a", "b"]."""
    names = (word.strip().strip("\"'") for word in text.removeprefix("[").removesuffix("]").split(","))
    return [name for name in names if name]


def _literal(text: str) -> Any:
    """The boolean, number or list (0.9,0.95, with or without brackets) that a word writes. Raises ValueError."""
    if text in ("true", "false"):
        return text == "true"
    if "," in text or text.startswith("["):
        return [_literal(word.strip()) for word in text.removeprefix("[").removesuffix("]").split(",")]
    if re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*", text):
        return int(text)
    return float(text)


def range_error(value: Any, rule: Constraint) -> str:
    """What is wrong with a value of the right type, or ""."""
    if isinstance(value, tuple):
        return next(filter(None, (range_error(v, rule) for v in value)), "")
    if isinstance(value, str) and not value.isprintable():
        return "must be printable text"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if not math.isfinite(value):
        return "must be finite"
    if rule.low is not None and value < rule.low:
        return f"must be at least {rule.low}"
    if rule.high is not None and value > rule.high:
        return f"must be at most {rule.high}"
    if rule.above is not None and value <= rule.above:
        return f"must be above {rule.above}"
    return ""


def did_you_mean(word: str, candidates: Iterable[str], show: str = "{!r}") -> str:
    """The end of an error line: "; did you mean 'x'?", or "" where nothing is near. Case is no difference."""
    names = {name.lower(): name for name in candidates}
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {show.format(names[near[0]])}?" if near else ""


def type_error(kind: Any, raw: Any) -> str:
    """What stands behind the value that `coerce` or `from_text` refused."""
    given = [raw] if isinstance(raw, str) else []
    if is_list(kind):
        kinds = typing.get_args(kind)[:1]
        given = (
            _words(raw)
            if isinstance(raw, str)
            else [r for r in raw if isinstance(r, str)]
            if isinstance(raw, list)
            else []
        )
    else:
        kinds = _options(kind)
    choices = [w for k in kinds if typing.get_origin(k) is typing.Literal for w in typing.get_args(k)]
    unknown = next((word for word in given if word not in choices), "")
    return f"expected {type_name(kind)}" + did_you_mean(unknown, choices)

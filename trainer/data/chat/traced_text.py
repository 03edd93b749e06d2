"""Strings that know the origin of each of their characters, so that a name of a special token in a rendered conversation is known
to be written by the template or to be part of a message.

A template computes with traced strings as with any other strings: they are equal to, and have the length of, plain strings. An
operation that is not defined here returns a plain string. The origin of its characters is then UNKNOWN, which is never taken for
the template's text.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

TEMPLATE, UNKNOWN = "tu"
"""Origins of a character, each one character: the template, and an untraced operation."""
_FIRST_DATA = 0x100
_SURROGATES = range(0xD800, 0xE000)


def data_origin(index: int) -> str:
    """Return the origin of the characters of the data's string number `index`: one character that is none of the above."""
    code = _FIRST_DATA + index
    return chr(code if code < _SURROGATES.start else code + len(_SURROGATES))


def data_index(origin: str) -> int:
    """Return the inverse of data_origin."""
    code = ord(origin)
    return (code if code < _SURROGATES.start else code - len(_SURROGATES)) - _FIRST_DATA


class Traced(str):
    """A string with the origin of each character.

    The names of its own attributes begin with an underscore, so that Jinja's sandbox hides them from templates.
    """

    __slots__ = ("_origins",)

    def __new__(cls, text: str = "", origins: str | None = None) -> "Traced":
        """origins: the characters' origins, with the length of `text`. Default: those of `text`, or UNKNOWN."""
        self = super().__new__(cls, text)
        self._origins = origins_of(text) if origins is None else origins
        return self

    def __str__(self) -> "Traced":
        return self

    def __iter__(self) -> Iterator["Traced"]:
        return map(Traced, str.__iter__(self), self._origins)

    def __getitem__(self, key: Any) -> "Traced":
        return Traced(str.__getitem__(self, key), self._origins[key])

    def __add__(self, other: Any) -> "Traced":
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented
        return Traced(str.__add__(self, other), self._origins + origins_of(other))

    def __radd__(self, other: Any) -> "Traced":
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented
        return Traced(str.__add__(other, self), origins_of(other) + self._origins)

    def __mul__(self, count: Any) -> "Traced":
        return Traced(str.__mul__(self, count), self._origins * count)

    __rmul__ = __mul__

    def join(self, items: Iterable[Any]) -> "Traced":
        items = list(items)
        return Traced(str.join(self, items), self._origins.join(map(origins_of, items)))

    def strip(self, chars: str | None = None) -> "Traced":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> "Traced":
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> "Traced":
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str) -> "Traced":
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> "Traced":
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: int = -1) -> list["Traced"]:
        return self._pieces(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: int = -1) -> list["Traced"]:
        return self._pieces(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list["Traced"]:
        lines = self._pieces(str.splitlines(self, True), "")
        return lines if keepends else [line[: len(str.splitlines(line)[0])] for line in lines]

    def partition(self, sep: str) -> tuple["Traced", ...]:
        return tuple(self._pieces(str.partition(self, sep), ""))

    def rpartition(self, sep: str) -> tuple["Traced", ...]:
        return tuple(self._pieces(str.rpartition(self, sep), ""))

    def replace(self, old: str, new: str, count: int = -1) -> str:
        if not old:
            return str.replace(self, old, new, count)
        return Traced(new).join(self.split(old, count))

    def lower(self) -> "Traced":
        return self._mapped(str.lower)

    def upper(self) -> "Traced":
        return self._mapped(str.upper)

    def title(self) -> "Traced":
        return self._mapped(str.title)

    def capitalize(self) -> "Traced":
        return self._mapped(str.capitalize)

    def _mapped(self, function: Callable[[str], str]) -> "Traced":
        """Return function(self). The function changes characters, but not their order."""
        text = function(self)
        if len(text) == len(self):
            return Traced(text, self._origins)
        return Traced(text, uniform(self._origins) * len(text))

    def _pieces(self, pieces: Sequence[str], sep: str | None) -> list["Traced"]:
        """Return consecutive pieces of this string as traced strings. sep: the text between two pieces; None: white space."""
        traced, end = [], 0
        for i, piece in enumerate(pieces):
            start = self.find(piece, end) if sep is None else end + (len(sep) if i else 0)
            end = start + len(piece)
            traced.append(self[start:end])
        return traced


Traced.__name__, Traced.__module__ = "str", "builtins"  # the type that Jinja names in its messages


def origins_of(text: str) -> str:
    """Return the origins of the characters of any string."""
    return text._origins if isinstance(text, Traced) else UNKNOWN * len(text)


def uniform(origins: str) -> str:
    """Return the only origin in `origins`, or UNKNOWN."""
    return origins[0] if origins and origins.count(origins[0]) == len(origins) else UNKNOWN


def literal(text: str) -> Traced:
    """Return a text that the template itself contains."""
    return Traced(text, TEMPLATE * len(text))


def join(parts: Iterable[Any]) -> Traced:
    """Return the concatenation of strings."""
    parts = list(parts)
    return Traced("".join(parts), "".join(map(origins_of, parts)))


# ---------------------------------------------------------------- data


def strings(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, str]]:
    """Yield (path, string) for each string in a JSON value, in the order in which trace() numbers them. path: the path of the
    value. The path of an object's name ends with the name and None."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield (*path, name, None), name
            yield from strings(entry, (*path, name))
    elif isinstance(value, list | tuple):
        for i, entry in enumerate(value):
            yield from strings(entry, (*path, i))


def trace(value: Any) -> Any:
    """Return a copy of a JSON value in which all strings are traced. String i has the origin data_origin(i)."""
    numbers = itertools.count()

    def traced(value: Any) -> Any:
        if isinstance(value, str):
            return Traced(value, data_origin(next(numbers)) * len(value))
        if isinstance(value, Mapping):
            return {traced(name): traced(entry) for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return [traced(entry) for entry in value]
        return value

    return traced(value)


# ---------------------------------------------------------------- JSON


def to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> Traced:
    """Return a value as JSON text, formatted by json.dumps. The origin of brackets, numbers and quotes is UNKNOWN."""
    strings: list[str] = []

    def numbered(value: Any) -> Any:
        """Return a copy of a value in which each string is replaced by its index in `strings`."""
        if isinstance(value, str):
            strings.append(value)
            return f"#{len(strings) - 1}"
        if isinstance(value, Mapping):
            items = sorted(value.items()) if sort_keys else value.items()
            return {numbered(name): numbered(entry) for name, entry in items}
        if isinstance(value, list | tuple):
            return [numbered(entry) for entry in value]
        return value

    text = json.dumps(numbered(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators)
    parts, end = [], 0
    for match in re.finditer(r"#(\d+)(?=\")", text):
        parts += [text[end : match.start()], _json_text(strings[int(match[1])], ensure_ascii)]
        end = match.end()
    return join([*parts, text[end:]])


def _json_text(text: str, ensure_ascii: bool) -> Traced:
    """Return a string as JSON, without its quotes."""
    origins = origins_of(text)
    escaped = json.dumps(text, ensure_ascii=ensure_ascii)[1:-1]
    if len(escaped) == len(text):
        return Traced(escaped, origins)
    if len(set(origins)) > 1:
        return join(_json_text(character, ensure_ascii) for character in Traced(text))
    return Traced(escaped, origins[:1] * len(escaped))

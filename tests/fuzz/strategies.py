"""Strategies for random values, and for random changes of files. A change is data, so that hypothesis can show and shrink it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

NUMBERS = ["0", "1", "-1", "2", "3", "7", "64", "0.5", "-0.0", "1e-320", "1e308", "1e400", "inf", "-inf", "nan"]
NUMBERS += ["0x10", "1_0"]
NUMBERS += [str(sign * 2**bits + off) for bits in (15, 31, 32, 63, 64) for sign in (1, -1) for off in (-1, 0)]
NUMBERS += ["1" + "0" * zeros for zeros in (9, 18, 30, 400, 5000)]
TEXTS = [
    "",
    " ",
    "none",
    "true",
    "None",
    "äß€😀",
    "../x",
    "/",
    "/dev/null",
    "/proc/self/mem",
    ".",
    "\t",
    "\n",
    "\x1b[31m",
]
TEXTS += [
    "\u202e",
    "%s%n",
    "{0}",
    "$HOME",
    "~",
    "a" * 300,
    "b" * 100_000,
    "'",
    '"',
    "\\",
    "<s>",
    "[1, 2]",
    "a,b",
    "x=1",
]
TEXTS += ["\x7f"]
SAMPLES = ["the quick brown fox", "def f(x):\n\treturn x + 1\n", "Größe 世界 🙂👍🏽", "  \n\n "]
SAMPLES += ["<|begin_of_text|><s></s>", "a" * 600]
"""Documents."""


def sometimes(percent: int) -> st.SearchStrategy[bool]:
    """Return a strategy that yields True in about `percent` of 100 cases, and shrinks to False."""
    return st.integers(0, 99).map(lambda number: number >= 100 - percent)


positions = st.one_of(st.integers(0, 300), st.integers(0, 2**31))
"""Positions in a sequence of unknown length: take the remainder of the division by it."""


@dataclass(frozen=True)
class ByteChange:
    """One change of a file's content. Positions are taken modulo the number of possible ones."""

    action: str
    start: int
    length: int
    source: int = 0
    data: bytes = b""

    def apply(self, content: bytes) -> bytes:
        start = self.start % (len(content) + 1)
        stop = min(len(content), start + self.length)
        part = content[start:stop]
        match self.action:
            case "truncate":
                return content[:start]
            case "remove":
                return content[:start] + content[stop:]
            case "overwrite":
                return content[:start] + self.data[: len(part)].ljust(len(part), b"\xa5") + content[stop:]
            case "flip a bit":
                return (
                    content[:start] + bytes(byte ^ (1 << self.length % 8) for byte in part[:1]) + content[start + 1 :]
                )
            case "overwrite with an earlier part":
                earlier = self.source % (max(start - len(part), 0) + 1)
                return content[:start] + content[earlier : earlier + len(part)] + content[stop:]
            case "repeat":
                return content[:start] + part * (2 if self.source % 2 else 50) + content[stop:]
            case "insert":
                return content[:start] + self.data + content[start:]
        raise AssertionError(self.action)


byte_changes = st.builds(
    ByteChange,
    action=st.sampled_from(
        ["truncate", "remove", "overwrite", "flip a bit", "overwrite with an earlier part", "repeat", "insert"]
    ),
    start=positions,
    length=st.sampled_from([1, 2, 8, 100]),
    source=positions,
    data=st.one_of(st.sampled_from([b"\0", b"\n", b"\xff\xfe", b'"', b"{}", b"]"]), st.binary(max_size=100)),
)


def _number(text: str) -> int | float | None:
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:  # more than 4,300 digits
        return None


json_values = st.recursive(
    st.one_of(
        st.sampled_from([None, True, False]),
        st.sampled_from(NUMBERS).map(_number),
        st.sampled_from([*TEXTS, *NUMBERS]),
    ),
    lambda values: st.one_of(st.lists(values, max_size=2), st.dictionaries(st.sampled_from(TEXTS), values, max_size=2)),
    max_leaves=8,
)


@dataclass(frozen=True)
class JsonChange:
    """One change of a JSON value."""

    action: str
    path: tuple[int, ...]
    """For each level, the number of a member, modulo the number of members."""
    name: str
    value: Any

    def apply(self, value: Any) -> Any:
        return self._apply(value, self.path)

    def _apply(self, value: Any, path: tuple[int, ...]) -> Any:
        if path and value and isinstance(value, dict | list):
            copy = dict(value) if isinstance(value, dict) else list(value)
            key = list(value)[path[0] % len(value)] if isinstance(value, dict) else path[0] % len(value)
            is_last = len(path) == 1
            if is_last and self.action == "remove":
                del copy[key]
            elif is_last and self.action == "rename or repeat":
                if isinstance(copy, dict):
                    copy[self.name] = copy.pop(key)
                else:
                    copy.append(copy[key])
            else:
                copy[key] = self._apply(value[key], path[1:])
            return copy
        if self.action == "change the number" and type(value) is int:
            return value + (-1, 1, 2, value)[len(self.name) % 4]
        return self.value


json_changes = st.builds(
    JsonChange,
    action=st.sampled_from(["replace", "remove", "rename or repeat", "change the number"]),
    path=st.lists(positions, max_size=4).map(tuple),
    name=st.sampled_from(TEXTS),
    value=json_values,
)


@dataclass(frozen=True)
class Missing:
    """The file is missing."""

    def write(self, path: Path) -> None:
        path.unlink()


@dataclass(frozen=True)
class Replaced:
    """A folder or a link has the file's name."""

    target: str
    """Target of a link, or "" for a folder."""

    def write(self, path: Path) -> None:
        path.unlink()
        if self.target:
            path.symlink_to(self.target.format(name=path.name, parent=path.parent))
        else:
            path.mkdir()


@dataclass(frozen=True)
class Changed:
    """The file's content is another one."""

    changes: tuple[ByteChange, ...]
    json_changes: tuple[JsonChange, ...] = ()

    def write(self, path: Path) -> None:
        content = path.read_bytes()
        if self.json_changes:
            value = json.loads(content)
            for change in self.json_changes:
                value = change.apply(value)
            content = json.dumps(value).encode()
        path.write_bytes(apply(self.changes, content))


def apply(changes: tuple[ByteChange, ...], content: bytes) -> bytes:
    for change in changes:
        content = change.apply(content)
    return content


_any_file = st.one_of(
    st.lists(byte_changes, min_size=1, max_size=3).map(lambda changes: Changed(tuple(changes))),
    st.builds(Missing),
    st.sampled_from(["", "nothing", "/dev/null", "{parent}", "{name}"]).map(Replaced),
    st.just(Changed((ByteChange("truncate", 0, 1),))),
)
_json_file = st.lists(json_changes, min_size=1, max_size=4).map(lambda changes: Changed((), tuple(changes)))


def file_change(name: str) -> st.SearchStrategy[Missing | Replaced | Changed]:
    """Return a strategy for changes of a file, whose content is changed as JSON if its name says so."""
    return st.one_of(_json_file, _json_file, _any_file) if name.endswith(".json") else _any_file

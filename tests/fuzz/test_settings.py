"""Configurations. An accepted configuration is the same after it was written as TOML."""

import typing
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.check import limits, may_refuse, refusal_of
from tests.fuzz.strategies import NUMBERS, TEXTS, ByteChange, apply, byte_changes, sometimes
from trainer.base.config import ConfigError
from trainer.base.config.fields import Setting, settings
from trainer.base.config.load import load_config
from trainer.base.config.render import to_toml
from trainer.base.config.required_files import FILE_SECTIONS
from trainer.base.config.toml_text import toml_value
from trainer.run.resolve import resolve

_toml_texts = st.sampled_from(
    [*NUMBERS, *map(toml_value, TEXTS), "true", "false", "1979-05-27", "07:32:00", "[]", "{}", "[[[1]]]"]
)
_nested = st.builds(lambda text, depth: "[" * depth + text + "]" * depth, _toml_texts, st.sampled_from([1, 2, 400]))
toml = st.one_of(*[_toml_texts] * 10, _nested)
"""TOML values of any type."""
_settings = st.sampled_from(list(settings().values()))


def valid_values(setting: Setting) -> st.SearchStrategy[Any]:
    """Return a strategy for values of the declared type and, mostly, in the declared range."""
    options = typing.get_args(setting.type) if typing.get_origin(setting.type) is not tuple else ()
    choices = [value for option in options for value in (typing.get_args(option) or (option,))]
    types = {type_ for type_ in choices or [setting.type] if isinstance(type_, type)}
    bounds = [bound for bound in (setting.constraint.min, setting.constraint.max) if bound is not None]
    strategies: list[st.SearchStrategy[Any]] = [st.just(setting.default)]
    strategies += [st.sampled_from(texts)] if (texts := [value for value in choices if isinstance(value, str)]) else []
    strategies += [st.booleans()] if bool in types else []
    if int in types:
        strategies += [st.sampled_from([1, 2, 4, 8, 16, *bounds]), st.integers(1, 4096)]
    if float in types:
        strategies += [st.floats(0, 1), st.floats(0, 10), *([st.sampled_from(bounds)] if bounds else [])]
    return st.one_of(strategies)


@dataclass(frozen=True)
class Case:
    lines: tuple[tuple[str, str], ...]
    """Sections and lines of the settings file."""
    damage: tuple[ByteChange, ...]
    words: tuple[str, ...]
    size: str
    check_files: tuple[str, ...]
    world_size: int

    def file(self) -> bytes:
        sections: dict[str, list[str]] = {}
        for section, line in self.lines:
            sections.setdefault(section, []).append(line)
        text = "".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items())
        return apply(self.damage, text.encode())


@st.composite
def _lines(draw: st.DrawFn) -> tuple[str, str]:
    setting = draw(_settings)
    text = draw(toml) if draw(sometimes(20)) else toml_value(draw(valid_values(setting)))
    name = (
        draw(st.sampled_from([setting.name[:-1], setting.name.upper(), "x.y"])) if draw(sometimes(3)) else setting.name
    )
    return setting.section, f"{name} = {text}"


_wrong_sections = st.sampled_from(["data", "modle", '"\\n"', "a.b.c", "run.name"]).map(lambda name: (name, "steps = 1"))


@st.composite
def _flags(draw: st.DrawFn) -> list[str]:
    setting = draw(_settings)
    value = draw(valid_values(setting))
    text = value if isinstance(value, str) else toml_value(value)
    if draw(sometimes(30)):
        text = draw(st.sampled_from([*NUMBERS, *TEXTS, "\udcff", "[1", "a=b c=d"]))
    flag = f"--{setting.key}" + (draw(st.sampled_from([".x", ".web", "."])) if setting.is_table else "")
    if draw(sometimes(3)):
        flag = draw(st.sampled_from([flag[:-1], "--", flag.replace(".", "-"), "-x", "", "\udcff"]))
    return [f"{flag}={text}"] if draw(st.booleans()) else [flag, text]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lines = draw(st.lists(_lines(), max_size=10))
    lines += [draw(_wrong_sections)] if draw(sometimes(10)) else []
    words = [word for flag in draw(st.lists(_flags(), max_size=4)) for word in flag]
    words += [draw(st.sampled_from(["--config", "--config=", "steps", "--help="]))] if draw(sometimes(2)) else []
    return Case(
        lines=tuple(lines),
        damage=tuple(draw(st.lists(byte_changes, min_size=1, max_size=1))) if draw(sometimes(15)) else (),
        words=tuple(words),
        size=draw(st.sampled_from(["debug"] * 8 + ["8b", "70b"])),
        check_files=draw(st.sampled_from([(), FILE_SECTIONS])),
        world_size=draw(st.sampled_from([1, 1, 1, 2, 4, 6, 8, 64])),
    )


@given(cases())
def test_settings_are_refused_with_one_line_or_survive_toml(case):
    with limits() as folder, may_refuse():
        path, rendered = folder / "config.toml", folder / "rendered.toml"
        path.write_bytes(case.file())
        model = [] if b"[model]" in case.file() else ["--model.size", case.size]
        config = load_config(["--config", str(path), *model, *case.words], check_files=case.check_files)
        rendered.write_text(to_toml(config))
        assert load_config(["--config", str(rendered)], check_files=()) == config
        try:
            resolve(config, case.world_size)
        except ConfigError as error:
            refusal_of(ConfigError("", config.explain(error)))

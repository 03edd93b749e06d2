"""Configurations. An accepted configuration is the same after it was written as TOML."""

import typing
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from scripts.dev.fuzz_cases.damage import NUMBERS, TEXTS, damage_bytes, require
from trainer.config import ConfigError
from trainer.config.fields import Setting, settings
from trainer.config.load import FILE_SECTIONS, load_config
from trainer.config.render import to_toml
from trainer.config.schema import toml_value
from trainer.run.resolve import resolve


def _toml(random: Random) -> str:
    text = random.choice(
        (*NUMBERS, *map(toml_value, TEXTS), "true", "false", "1979-05-27", "07:32:00", "[]", "{}", "[[[1]]]")
    )
    depth = random.choice((0,) * 30 + (1, 2, 400))
    return "[" * depth + text + "]" * depth


def _valid_value(random: Random, setting: Setting) -> Any:
    """Return a value of the declared type and, mostly, in the declared range."""
    options = typing.get_args(setting.type) if typing.get_origin(setting.type) is not tuple else ()
    choices = [v for o in options for v in (typing.get_args(o) or (o,))]
    types = {type_ for type_ in choices or [setting.type] if isinstance(type_, type)}
    least, most = setting.constraint.min, setting.constraint.max
    number = random.choice((1, 2, 4, 8, 16, random.randrange(1, 4096), setting.default))
    values: list[Any] = [value for value in choices if isinstance(value, str)]
    values += [random.random() < 0.5] if bool in types else []
    values += [number, least, most] if int in types else []
    values += [random.random(), random.uniform(0, 10), least, most] if float in types else []
    values = [value for value in values if value is not None]
    return random.choice(values) if values else setting.default


def _settings_file(random: Random) -> bytes:
    sections: dict[str, list[str]] = {}
    chosen = random.sample(list(settings().values()), random.choice((0, 1, 2, 3, 5, 10)))
    for setting in chosen:
        value = _valid_value(random, setting)
        text = toml_value(value) if random.random() < 0.8 else _toml(random)
        name = (
            setting.name if random.random() < 0.97 else random.choice((setting.name[:-1], setting.name.upper(), "x.y"))
        )
        sections.setdefault(setting.section, []).append(f"{name} = {text}")
    if random.random() < 0.1:
        sections.setdefault(random.choice(("data", "modle", '"\\n"', "a.b.c", "run.name")), []).append("steps = 1")
    text = "".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items())
    return damage_bytes(random, text.encode()) if random.random() < 0.15 else text.encode()


def _settings_words(random: Random) -> Iterator[str]:
    for _ in range(random.choice((0, 0, 1, 2, 4))):
        setting = random.choice(list(settings().values()))
        value = _valid_value(random, setting)
        text = value if isinstance(value, str) else toml_value(value)
        text = text if random.random() < 0.7 else random.choice((*NUMBERS, *TEXTS, "\udcff", "[1", "a=b c=d"))
        flag = f"--{setting.key}" + (random.choice((".x", ".web", ".")) if setting.is_table else "")
        flag = (
            flag
            if random.random() < 0.97
            else random.choice((flag[:-1], "--", flag.replace(".", "-"), "-x", "", "\udcff"))
        )
        yield from [f"{flag}={text}"] if random.random() < 0.3 else [flag, text]
    if random.random() < 0.02:
        yield random.choice(("--config", "--config=", "steps", "--help="))


def run(random: Random, fixtures: Path, folder: Path) -> str:
    path = folder / "config.toml"
    path.write_bytes(_settings_file(random))
    size = random.choice(("debug",) * 8 + ("8b", "70b"))
    model = [] if b"[model]" in path.read_bytes() else ["--model.size", size]
    checked = random.choice([(), FILE_SECTIONS])
    config = load_config(["--config", str(path), *model, *_settings_words(random)], check_files=checked)
    rendered = folder / "rendered.toml"
    rendered.write_text(to_toml(config))
    again = load_config(["--config", str(rendered)], check_files=())
    require(config == again, f"the configuration is another one after TOML:\n{config}\n{again}")
    try:
        resolve(config, random.choice((1, 1, 1, 2, 4, 8, 6, 64)))
    except ConfigError as error:
        raise ConfigError("", config.explain(error)) from None
    return ""

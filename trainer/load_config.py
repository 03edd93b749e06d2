"""TOML file and command line -> Config, and everything that is printed about settings.

The declarations in config.py are the only source: parsing, checks, `--help`, `--print-config` and
docs/configuration.md are derived from them.
"""

import ast
import difflib
import functools
import glob
import inspect
import math
import os
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import tomli

from trainer import config as declarations
from trainer.config import Config, ConfigError, Rule, toml_value

DEFAULT_CONFIG = Path(__file__).parent.parent / "train_configs" / "debug.toml"
USAGE = "usage: train.py [--config FILE.toml] [--SECTION.KEY VALUE ...] [--print-config] [--help]"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One declared setting; `kind` is its type without annotations."""

    section: str
    name: str
    kind: Any
    rule: Rule
    default: Any
    doc: str

    @property
    def flag(self) -> str:
        return f"--{self.section}.{self.name}"


# ---------------------------------------------------------------- the declarations, read


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
    rule = Rule()
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
                member.target.id: text.value.value
                for member, text in zip(node.body, node.body[1:], strict=False)
                if isinstance(member, ast.AnnAssign)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            }
    return docs


# ---------------------------------------------------------------- one value


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _is_mapping(kind: Any) -> bool:
    return typing.get_origin(kind) is Mapping


def describe(kind: Any) -> str:
    """The type in a user's words, as it stands behind 'expected'."""
    if _is_union(kind):
        return " or ".join(describe(k) for k in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"a list of {len(typing.get_args(kind))} numbers"
    if _is_mapping(kind):
        return "a table"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "none"}
    return names[kind]


def convert(raw: Any, kind: Any) -> Any:
    """The value of `kind` that a TOML value means. Raises ValueError where there is none."""
    if _is_union(kind):
        for option in typing.get_args(kind):
            try:
                return convert(raw, option)
            except ValueError:
                continue
        raise ValueError
    if typing.get_origin(kind) is typing.Literal:
        if isinstance(raw, str) and raw in typing.get_args(kind):
            return raw
        raise ValueError
    if typing.get_origin(kind) is tuple:
        members = typing.get_args(kind)
        if not isinstance(raw, list | tuple) or len(raw) != len(members):
            raise ValueError
        return tuple(convert(r, m) for r, m in zip(raw, members, strict=True))
    if kind is type(None):
        if raw == "none":
            return None
        raise ValueError
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if type(raw) is not kind:
        raise ValueError
    return raw


def from_text(text: str, kind: Any) -> Any:
    """The value of `kind` that a command-line word means. Raises ValueError where there is none."""
    if _is_union(kind):
        for option in typing.get_args(kind):
            try:
                return from_text(text, option)
            except ValueError:
                continue
        raise ValueError
    if kind is bool:
        if text in ("true", "false"):
            return text == "true"
        raise ValueError
    if kind is int:
        if re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*", text):
            return int(text)
        raise ValueError
    if kind is float:
        return float(text)
    if typing.get_origin(kind) is tuple:
        words = text.strip("[]").split(",")
        members = typing.get_args(kind)
        if len(words) != len(members):
            raise ValueError
        return tuple(from_text(w.strip(), m) for w, m in zip(words, members, strict=True))
    return convert(text, kind)


def _mapping_member(kind: Any) -> Any:
    """The type of the values of a table setting; the narrowest of them that fits is taken."""
    return typing.get_args(kind)[1]


def broken_rule(value: Any, rule: Rule) -> str:
    """What is wrong with a value of the right type, or "". Text and tables have no range."""
    if isinstance(value, tuple):
        return next(filter(None, (broken_rule(v, rule) for v in value)), "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if not math.isfinite(value):
        return "must be finite"
    low = rule.low is not None and value < rule.low
    high = rule.high is not None and value > rule.high
    if (low or high) and rule.low is not None and rule.high is not None:
        return f"must be between {rule.low} and {rule.high}"
    if low:
        return f"must be at least {rule.low}"
    if high:
        return f"must be at most {rule.high}"
    if rule.above is not None and value <= rule.above:
        return f"must be above {rule.above}"
    return ""


def _nearest(word: str, candidates: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)), None)


def nearest_name(word: str, candidates: Iterable[str], show: str = "{!r}") -> str:
    """The end of an error line: "; did you mean 'x'?", or "" where nothing is near."""
    near = _nearest(word, list(candidates))
    return f"; did you mean {show.format(near)}?" if near else ""


def _expected(setting: Setting, raw: Any, kind: Any) -> str:
    words = [w for option in (typing.get_args(kind) if _is_union(kind) else (kind,)) for w in _choices(option)]
    return f"expected {describe(kind)}" + (nearest_name(raw, words) if isinstance(raw, str) else "")


def _choices(kind: Any) -> tuple[str, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


# ---------------------------------------------------------------- TOML and command line


class _Values:
    """Values as they come in, the file first, then the command line over it; each with its origin."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, Any]] = {section: {} for section in settings()}
        self.origins: dict[str, str] = {}

    def put(self, setting: Setting, value: Any, origin: str) -> None:
        problem = broken_rule(value, setting.rule)
        if problem:
            raise ConfigError("", f"{origin}: {problem}")
        self.values[setting.section][setting.name] = value
        self.origins[f"{setting.section}.{setting.name}"] = origin

    def put_member(self, setting: Setting, member: str, value: Any, origin: str) -> None:
        """One entry of a table setting."""
        self.values[setting.section].setdefault(setting.name, {})[member] = value
        self.origins[f"{setting.section}.{setting.name}.{member}"] = origin
        self.origins[f"{setting.section}.{setting.name}"] = origin


def _read_toml(path: Path, shown: str) -> dict[str, Any]:
    """shown: how the user named the file."""
    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        siblings = [str(Path(shown).parent / p.name) for p in path.parent.glob("*.toml")]
        raise ConfigError("", f"--config {shown}: no such file{nearest_name(shown, siblings)}") from None
    except IsADirectoryError:
        raise ConfigError("", f"--config {shown}: is a folder, expected a TOML file") from None
    except OSError as error:
        raise ConfigError("", f"--config {shown}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError("", f"--config {shown}: not UTF-8 text (byte {error.start})") from None
    except tomli.TOMLDecodeError as error:
        raise ConfigError("", f"--config {shown}: not valid TOML: {error}") from None


def _put_file(into: _Values, document: Mapping[str, Any], shown: str) -> None:
    for section, body in document.items():
        known = settings().get(section)
        if not isinstance(body, dict):
            where = _elsewhere(section, "") or (f"; write [{section}] as a table" if known else "")
            raise ConfigError("", f"{shown} {section} = {toml_value(body)}: stands in no section{where}")
        if known is None:
            raise ConfigError("", f"{shown} [{section}]: unknown section{nearest_name(section, list(settings()), '[{}]')}")
        for name, raw in body.items():
            setting = known.get(name)
            if setting is None:
                hint = _elsewhere(name, section) or nearest_name(name, list(known))
                raise ConfigError("", f"{shown} [{section}] {name}: unknown key{hint}")
            _put_toml_value(into, setting, raw, shown)


def _put_toml_value(into: _Values, setting: Setting, raw: Any, shown: str) -> None:
    origin = f"{shown} [{setting.section}] {setting.name} = {toml_value(raw)}"
    if _is_mapping(setting.kind):
        if not isinstance(raw, dict):
            raise ConfigError("", f"{origin}: expected a table")
        for member, value in raw.items():
            member_origin = f"{shown} [{setting.section}.{setting.name}] {member} = {toml_value(value)}"
            into.put_member(setting, member, _checked(convert, value, setting, member_origin), member_origin)
        return
    into.put(setting, _checked(convert, raw, setting, origin), origin)


def _checked(parse, raw: Any, setting: Setting, origin: str) -> Any:
    kind = _mapping_member(setting.kind) if _is_mapping(setting.kind) else setting.kind
    try:
        return parse(raw, kind)
    except ValueError:
        raise ConfigError("", f"{origin}: {_expected(setting, raw, kind)}") from None


def _elsewhere(name: str, section: str) -> str:
    """A hint where exactly this key exists in other sections."""
    homes = [s for s, members in settings().items() if name in members and s != section]
    return f"; did you mean [{homes[0]}] {name}?" if homes else ""


def _words(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(flag, value) pairs of a command line without --help and --print-config."""
    words = iter(range(len(argv)))
    for i in words:
        word = argv[i]
        if not word.startswith("--") or len(word) == 2:
            raise ConfigError("", f"{word}: unexpected argument; settings are written --section.key value")
        flag, equals, value = word.partition("=")
        if not equals:
            if i + 1 == len(argv) or argv[i + 1].startswith("--"):
                raise ConfigError("", f"{_known_flag(flag)}: expects a value")
            value = argv[next(words)]
        yield flag, value


def _known_flag(flag: str) -> str:
    if flag != "--config":
        _find(flag)
    return flag


def _find(flag: str) -> tuple[Setting, str]:
    """The setting of --section.key, and the member for --section.table.member."""
    section, _, rest = flag[2:].partition(".")
    name, _, member = rest.partition(".")
    setting = settings().get(section, {}).get(name)
    if setting is not None and bool(member) == _is_mapping(setting.kind):
        return setting, member
    if setting is not None and not member:
        raise ConfigError("", f"{flag}: a table; set one entry of it: {flag}.NAME VALUE")
    flags = [s.flag for members in settings().values() for s in members.values()]
    same_name = [f for f in flags if f.rpartition(".")[2] == flag.rpartition(".")[2].lstrip("-")]
    near = same_name[0] if same_name else _nearest(flag, [*flags, "--config", "--print-config", "--help"])
    raise ConfigError("", f"{flag}: unknown setting" + (f"; did you mean {near!r}?" if near else ""))


def _put_words(into: _Values, words: Sequence[tuple[str, str]]) -> None:
    seen = set()
    for flag, text in words:
        setting, member = _find(flag)
        origin = f"{flag} {text}"
        if flag in seen:
            raise ConfigError("", f"{origin}: given twice")
        seen.add(flag)
        value = _checked(from_text, text, setting, origin)
        if member:
            into.put_member(setting, member, value, origin)
        else:
            into.put(setting, value, origin)


def load_config(argv: Sequence[str]) -> Config:
    """argv: `--config FILE` (default: train_configs/debug.toml) and any number of `--section.key value`.

    Raises ConfigError with the whole line for anything that is not exactly right.
    """
    words = list(_words(argv))
    files = [value for flag, value in words if flag == "--config"]
    if len(files) > 1:
        raise ConfigError("", f"--config {files[1]}: given twice")
    path = Path(files[0]) if files else DEFAULT_CONFIG
    into = _Values()
    _put_file(into, _read_toml(path, str(path)), str(path))
    _put_words(into, [(flag, value) for flag, value in words if flag != "--config"])
    into.values["run"].setdefault("name", path.stem)
    sections = {
        section.name: section.default_factory(**into.values[section.name])
        for section in fields(Config)
        if section.name in into.values
    }
    config = Config(**sections, origins=into.origins)
    try:
        _check_combinations(config)
    except ConfigError as error:
        raise ConfigError("", config.explain(error)) from None
    return config


# ---------------------------------------------------------------- rules between settings, as far as no mesh is needed


def _check_combinations(config: Config) -> None:
    if config.run.name in ("", ".", "..") or "/" in config.run.name or "\\" in config.run.name:
        raise ConfigError("run.name", "must be the name of one folder")
    for key, wanted, condition in _conditional_settings(config):
        section, _, name = key.partition(".")
        if not wanted and getattr(getattr(config, section), name) != settings()[section][name].default:
            raise ConfigError(key, f"has no effect here: only with {condition}")
    for key, path, needed, condition in (
        ("tokenizer.path", config.tokenizer.path, config.tokenizer.kind != "default", "[tokenizer] kind"),
        ("data.path", config.data.path, config.data.dataset != "python_stdlib", "[data] dataset"),
    ):
        if needed and not path:
            section, _, choice = condition.partition("] ")
            value = getattr(getattr(config, section[1:]), choice)
            raise ConfigError(key, f"needed with {condition} = {value}")
    if config.tokenizer.path and not os.path.isfile(config.tokenizer.path):
        raise ConfigError("tokenizer.path", "no such file")
    if config.data.path and not os.path.exists(config.data.path) and not glob.glob(config.data.path, recursive=True):
        raise ConfigError("data.path", "no such file or folder, and no match as a pattern")
    training = config.training
    if training.global_batch_size % training.local_batch_size:
        raise ConfigError(
            "training.global_batch_size", f"must be a multiple of local_batch_size {training.local_batch_size}"
        )
    if config.parallel.dp_shard == 0:
        raise ConfigError("parallel.dp_shard", "must be at least 1, or -1 for every rank that is left")
    reshard = config.parallel.reshard_after_forward
    if isinstance(reshard, int) and reshard < 2:
        raise ConfigError("parallel.reshard_after_forward", "as a number of ranks it must be at least 2")
    if config.evaluation.interval_steps and not config.data.held_out_fraction:
        raise ConfigError("evaluation.interval_steps", "needs held-out documents, but [data] held_out_fraction is 0")
    if config.lr_schedule.name == "warmup_stable_decay" and not config.lr_schedule.decay_steps:
        raise ConfigError("lr_schedule.decay_steps", "must be at least 1 with name = warmup_stable_decay")


def _conditional_settings(config: Config) -> tuple[tuple[str, bool, str], ...]:
    """(setting, whether it has an effect here, when it has one)."""
    return (
        ("tokenizer.path", config.tokenizer.kind != "default", "[tokenizer] kind = tiktoken or sentencepiece"),
        ("data.path", config.data.dataset != "python_stdlib", "[data] dataset = text or jsonl"),
        ("data.text_field", config.data.dataset == "jsonl", "[data] dataset = jsonl"),
        ("data.prefetch", config.data.num_workers > 0, "[data] num_workers > 0"),
        (
            "lr_schedule.decay_steps",
            config.lr_schedule.name == "warmup_stable_decay",
            "[lr_schedule] name = warmup_stable_decay",
        ),
        ("evaluation.max_samples", config.evaluation.interval_steps > 0, "[evaluation] interval_steps > 0"),
    )


# ---------------------------------------------------------------- what is printed


def to_toml(config: Config) -> str:
    """The whole configuration, every default written out; load_config reads it back equal."""
    lines = []
    for section, members in settings().items():
        lines.append(f"[{section}]")
        values = getattr(config, section)
        lines += [f"{name} = {toml_value(getattr(values, name))}" for name in members]
        lines.append("")
    return "\n".join(lines)


def fixed_settings(config: Config) -> dict[str, Any]:
    """"section.name" -> value of all settings that a resumed run must have in common with its checkpoint."""
    return {
        f"{section}.{name}": getattr(getattr(config, section), name)
        for section, members in settings().items()
        for name, setting in members.items()
        if setting.rule.fixed
    }


def _limits(setting: Setting) -> str:
    """Unit and range, as they stand in brackets behind a default."""
    rule = setting.rule
    parts = [rule.unit] if rule.unit else []
    if rule.low is not None:
        parts.append(f"at least {rule.low}")
    if rule.above is not None:
        parts.append(f"above {rule.above}")
    if rule.high is not None:
        parts.append(f"at most {rule.high}")
    if rule.fixed:
        parts.append("fixed on resume")
    return ", ".join(parts)


def help_text() -> str:
    lines = [
        USAGE,
        "",
        "Settings come from the TOML file (default: train_configs/debug.toml); the command line replaces single ones.",
        "--print-config prints the resulting file and exits.",
    ]
    for section, members in settings().items():
        lines += ["", f"[{section}]"]
        for s in members.values():
            flag = s.flag + (".NAME" if _is_mapping(s.kind) else "")
            limits = _limits(s)
            lines.append(f"  {flag}: {describe(s.kind)}; default {toml_value(s.default)}" + (f" ({limits})" * bool(limits)))
            lines.append(f"      {s.doc}")
    return "\n".join(lines)


def settings_as_markdown() -> str:
    """The text of docs/configuration.md below its introduction: one table for each section."""
    lines = []
    for section, members in settings().items():
        lines += [f"## [{section}]", "", "| key | type | default | unit, range | meaning |", "|---|---|---|---|---|"]
        for s in members.values():
            cells = (f"`{s.name}`", describe(s.kind), f"`{toml_value(s.default)}`", _limits(s), s.doc)
            lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
        lines.append("")
    return "\n".join(lines)


# ---------------------------------------------------------------- the start of every command


def exit_with(line: str) -> NoReturn:
    """Print one line and exit with code 2. Every rank comes here with the same line, so only the first of a node prints."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
    sys.exit(2)


@contextmanager
def one_line_errors(config: Config) -> Iterator[None]:
    """A ConfigError inside becomes one line on stderr and exit code 2."""
    try:
        yield
    except ConfigError as error:
        exit_with(config.explain(error))


def config_from_command_line(argv: Sequence[str]) -> Config:
    """load_config for a command: answers --help and --print-config, and turns errors into one line and exit code 2."""
    if "--help" in argv or "-h" in argv:
        print(help_text())
        sys.exit(0)
    try:
        config = load_config([word for word in argv if word != "--print-config"])
    except ConfigError as error:
        exit_with(str(error))
    if "--print-config" in argv:
        print(to_toml(config))
        sys.exit(0)
    return config

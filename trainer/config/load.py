"""TOML file and command line -> Config. Whatever is not exactly right is one line that says what, where, and what was
probably meant."""

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import tomli

from trainer.config.fields import Setting, coerce, did_you_mean, is_table, parse_text, range_error, settings, type_error
from trainer.config.schema import Config, ConfigError, toml_value
from trainer.system.files import folder_error

DEFAULT_CONFIG = Path(__file__).parents[2] / "train_configs" / "debug.toml"


# ---------------------------------------------------------------- TOML and command line


class _Values:
    """Values as they come in, the file first, then the command line over it; each with its origin."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, Any]] = {section: {} for section in settings()}
        self.origins: dict[str, str] = {}

    def put(self, setting: Setting, value: Any, origin: str) -> None:
        self.values[setting.section][setting.name] = value
        self.origins[f"{setting.section}.{setting.name}"] = origin

    def put_member(self, setting: Setting, member: str, value: Any, origin: str) -> None:
        """One entry of a table setting."""
        if not (member.isidentifier() or (setting.constraint.free_keys and member.isprintable() and member)):
            raise ConfigError("", f"{origin}: {member!r} is no name")
        self.values[setting.section].setdefault(setting.name, {})[member] = value
        self.origins[f"{setting.section}.{setting.name}.{member}"] = origin
        self.origins[f"{setting.section}.{setting.name}"] = origin


def _read_toml(path: Path, shown: str) -> dict[str, Any]:
    """shown: how the user named the file."""
    try:
        return tomli.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        siblings = [str(Path(shown).parent / p.name) for p in path.parent.glob("*.toml") if p.exists()]
        raise ConfigError("", f"--config {shown}: no such file{did_you_mean(shown, siblings)}") from None
    except IsADirectoryError:
        raise ConfigError("", f"--config {shown}: is a folder, expected a TOML file") from None
    except OSError as error:
        raise ConfigError("", f"--config {shown}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError("", f"--config {shown}: not UTF-8 text (byte {error.start})") from None
    except tomli.TOMLDecodeError as error:
        raise ConfigError("", f"--config {shown}: not valid TOML: {error}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, thousands of brackets
        raise ConfigError("", f"--config {shown}: not a configuration") from None


def _put_file(into: _Values, document: Mapping[str, Any], shown: str) -> None:
    for section, body in document.items():
        known = settings().get(section)
        if not isinstance(body, dict):
            where = _elsewhere(section, "") or (f"; write [{section}] as a table" if known else "")
            raise ConfigError("", f"{shown} {section} = {toml_value(body)}: stands in no section{where}")
        if known is None:
            raise ConfigError(
                "", f"{shown} [{section}]: unknown section{did_you_mean(section, list(settings()), '[{}]')}"
            )
        for name, raw in body.items():
            setting = known.get(name)
            if setting is None:
                hint = _elsewhere(name, section) or did_you_mean(name, list(known))
                raise ConfigError("", f"{shown} [{section}] {name}: unknown key{hint}")
            _put_toml_value(into, setting, raw, shown)


def _put_toml_value(into: _Values, setting: Setting, raw: Any, shown: str) -> None:
    origin = f"{shown} [{setting.section}] {setting.name} = {toml_value(raw)}"
    if is_table(setting.type):
        if not isinstance(raw, dict):
            raise ConfigError("", f"{origin}: expected a table")
        for member, value in raw.items():
            member_origin = f"{shown} [{setting.section}.{setting.name}] {member} = {toml_value(value)}"
            into.put_member(setting, member, _checked(coerce, value, setting, member_origin), member_origin)
        return
    into.put(setting, _checked(coerce, raw, setting, origin), origin)


def _checked(parse, raw: Any, setting: Setting, origin: str) -> Any:
    try:
        value = parse(raw, setting.value_type)
    except ValueError:
        raise ConfigError("", f"{origin}: {type_error(setting.value_type, raw)}") from None
    problem = range_error(value, setting.constraint)
    if problem:
        raise ConfigError("", f"{origin}: {problem}")
    return value


def _elsewhere(name: str, section: str) -> str:
    """A hint where exactly this key exists in other sections."""
    homes = [s for s, members in settings().items() if name in members and s != section]
    return f"; did you mean [{homes[0]}] {name}?" if homes else ""


def parse_argv(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
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
    if setting is not None and bool(member) == is_table(setting.type):
        return setting, member
    if setting is not None and not member:
        raise ConfigError("", f"{flag}: a table; set one entry of it: {flag}.NAME VALUE")
    flags = [s.flag for members in settings().values() for s in members.values()]
    same_name = [f for f in flags if f.rpartition(".")[2] == flag.rpartition(".")[2].lstrip("-")]
    hint = (
        f"; did you mean {same_name[0]!r}?"
        if same_name
        else did_you_mean(flag, [*flags, "--config", "--print-config", "--help"])
    )
    raise ConfigError("", f"{flag}: unknown setting{hint}")


def _put_words(into: _Values, words: Sequence[tuple[str, str]]) -> None:
    seen = set()
    for flag, text in words:
        setting, member = _find(flag)
        origin = f"{flag} {text}"
        if flag in seen:
            raise ConfigError("", f"{origin}: given twice")
        seen.add(flag)
        value = _checked(parse_text, text, setting, origin)
        if member:
            into.put_member(setting, member, value, origin)
        else:
            into.put(setting, value, origin)


def load_config(argv: Sequence[str], files: bool = True) -> Config:
    """argv: `--config FILE` (default: train_configs/debug.toml) and any number of `--section.key value`. files: whether those
    that settings name must be there.

    Raises ConfigError with the whole line for anything that is not exactly right.
    """
    words = list(parse_argv(argv))
    named = [value for flag, value in words if flag == "--config"]
    if len(named) > 1:
        raise ConfigError("", f"--config {named[1]}: given twice")
    path = Path(named[0]) if named else DEFAULT_CONFIG
    shown = named[0] if named else str(path)
    into = _Values()
    _put_file(into, _read_toml(path, shown), shown)
    _put_words(into, [(flag, value) for flag, value in words if flag != "--config"])
    into.values["run"]["name"] = into.values["run"].get("name") or path.stem
    sections = {
        section.name: section.default_factory(**into.values[section.name])
        for section in fields(Config)
        if section.name in into.values
    }
    config = Config(**sections, origins=into.origins)
    try:
        check_combinations(config)
        if files:
            _check_files(config)
    except ConfigError as error:
        raise ConfigError("", config.explain(error)) from None
    return config


# ---------------------------------------------------------------- rules between settings, as far as no mesh is needed


def check_combinations(config: Config) -> None:
    if config.run.name.strip() in ("", ".", "..") or "/" in config.run.name or "\\" in config.run.name:
        raise ConfigError("run.name", "must be the name of one folder")
    if len(os.fsencode(config.run.name)) > 255:
        raise ConfigError("run.name", "is longer than the name of a folder can be (255 bytes)")
    for key, wanted, condition in _conditional_settings(config):
        section, _, name = key.partition(".")
        if not wanted and config.value(key) != settings()[section][name].default:
            raise ConfigError(key, f"has no effect here: only with {condition}")
    if config.tokenizer.backend != "default" and not config.tokenizer.path:
        raise ConfigError("tokenizer.path", f"needed with [tokenizer] backend = {config.tokenizer.backend}")
    if config.data.dataset not in ("python_stdlib", "chat") and not config.data.path and not config.data.datasets:
        raise ConfigError("data.path", f"needed with [data] dataset = {config.data.dataset}")
    if config.parallel.dp_shard == 0:
        raise ConfigError("parallel.dp_shard", "must be at least 1, or -1 for every rank that is left")
    reshard = config.parallel.reshard_after_forward
    if isinstance(reshard, int) and reshard < 2:
        raise ConfigError("parallel.reshard_after_forward", "as a number of ranks it must be at least 2")
    if config.evaluation.interval_steps and not config.data.held_out_fraction and not config.evaluation.datasets:
        raise ConfigError("evaluation.interval_steps", "needs held-out documents, but [data] held_out_fraction is 0")
    if config.optimizer.offload != "none" and config.parallel.cpu_offload:
        raise ConfigError("optimizer.offload", "not with [parallel] cpu_offload, which keeps all of it on the host")
    if config.optimizer.offload == "state_and_gradients" and config.training.reduce_every_microbatch:
        rule = "state_and_gradients takes gradients when they are complete: not with [training] reduce_every_microbatch"
        raise ConfigError("optimizer.offload", rule)
    if config.activation_checkpoint.offload_inputs and config.activation_checkpoint.mode != "full":
        raise ConfigError(
            "activation_checkpoint.offload_inputs", "needs mode = full: only inputs of blocks go to the host"
        )
    if config.optimizer.in_backward:
        _check_in_backward(config)
    if config.lr_schedule.name == "warmup_stable_decay" and not config.lr_schedule.decay_steps:
        raise ConfigError("lr_schedule.decay_steps", "must be at least 1 with name = warmup_stable_decay")


def _check_in_backward(config: Config) -> None:
    """What needs all gradients at once, or gradients that are not complete."""
    wrong = {
        "[training] max_norm, which needs all gradients at once; it must be none": config.training.max_norm is not None,
        "[training] reduce_every_microbatch: gradients are complete after the last one": config.training.reduce_every_microbatch,
        "[optimizer] offload; state_and_gradients frees gradients in backward too": config.optimizer.offload != "none",
        "[parallel] cpu_offload, where gradients come to the host late": config.parallel.cpu_offload,
        "[resilience] on_loss_spike, which leaves out whole updates": config.resilience.on_loss_spike != "off",
        "[resilience] max_consecutive_skips above 1: no update can be left out as a whole": config.resilience.max_consecutive_skips
        > 1,
    }
    for what, is_so in wrong.items():
        if is_so:
            raise ConfigError("optimizer.in_backward", f"not with {what}")


def _check_files(config: Config) -> None:
    if config.checkpoint.init_from and (problem := folder_error(config.checkpoint.init_from)):
        raise ConfigError("checkpoint.init_from", problem)
    folder_too = config.tokenizer.backend == "huggingface" and os.path.isdir(config.tokenizer.path)
    if config.tokenizer.path and not os.path.isfile(config.tokenizer.path) and not folder_too:
        raise ConfigError("tokenizer.path", "no such file")
    for key, kind, path in _datasets(config):
        if path and kind in _WITH_FILES and not _exists(path):
            raise ConfigError(key, "no such file or folder, and no match as a pattern")


_WITH_FILES = ("text", "jsonl", "parquet", "tokens", "chat", "prepared")
"""Kinds of datasets whose path must be there; the package datasets finds some by their name."""


def _datasets(config: Config) -> Iterator[tuple[str, str, str]]:
    """The settings that name datasets, each with the kind and the path that it gives."""
    yield "data.path", config.data.dataset, config.data.path
    for table, named in (("data.datasets", config.data.datasets), ("evaluation.datasets", config.evaluation.datasets)):
        for name, text in named.items():
            kind, _, path = text.partition(":")
            yield f"{table}.{name}", kind, path


def _exists(path: str) -> bool:
    return os.path.exists(path) or any(True for _ in glob.iglob(path, recursive=True))


def _conditional_settings(config: Config) -> tuple[tuple[str, bool, str], ...]:
    """(setting, whether it has an effect here, when it has one). Details of a feature that is switched off are no error:
    one flag shall be enough to do without it."""
    dataset = config.data.dataset
    kinds = {kind for _, kind, _ in _datasets(config)}
    chats = "chat" in kinds
    return (
        (
            "tokenizer.path",
            config.tokenizer.backend != "default",
            "a [tokenizer] backend other than default",
        ),
        ("data.path", not config.data.datasets, "no [data] datasets"),
        ("data.path", dataset != "python_stdlib", "a [data] dataset other than python_stdlib"),
        ("data.dataset", not config.data.datasets, "no [data] datasets"),
        ("data.mixture", bool(config.data.datasets), "[data] datasets"),
        (
            "tokenizer.reuse_reserved_tokens",
            config.tokenizer.backend in ("default", "tiktoken"),
            "[tokenizer] backend = default or tiktoken",
        ),
        ("data.chat_template", chats, "conversations"),
        ("data.allowed_special", chats, "conversations"),
        ("data.long_documents", config.data.packing != "wrapped", "[data] packing = best-fit or none"),
        (
            "data.text_field",
            bool(kinds & {"jsonl", "parquet", "huggingface"}),
            "[data] dataset = jsonl, parquet or huggingface",
        ),
        ("data.subset", "huggingface" in kinds, "[data] dataset = huggingface"),
        ("data.split", "huggingface" in kinds, "[data] dataset = huggingface"),
        ("data.token_dtype", "tokens" in kinds, "[data] dataset = tokens"),
        (
            "lr_schedule.decay_steps",
            config.lr_schedule.name == "warmup_stable_decay",
            "[lr_schedule] name = warmup_stable_decay",
        ),
        ("checkpoint.init_exclude", config.checkpoint.init_from != "", "[checkpoint] init_from"),
        ("checkpoint.resize_embeddings", config.checkpoint.init_from != "", "[checkpoint] init_from"),
    )


# ---------------------------------------------------------------- the start of every command

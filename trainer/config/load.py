"""Loading of a Config from TOML file and command line. An error is one line: setting, value, origin, rule and likely fix."""

import glob
import os
import re
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
    """Values of settings, and where each was set. The command line overrides the file."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, Any]] = {section: {} for section in settings()}
        self.origins: dict[str, str] = {}

    def put(self, setting: Setting, value: Any, origin: str) -> None:
        self.values[setting.section][setting.name] = value
        self.origins[f"{setting.section}.{setting.name}"] = origin

    def put_entry(self, setting: Setting, entry: str, value: Any, origin: str) -> None:
        if not (entry.isidentifier() or (setting.constraint.free_keys and entry.isprintable() and entry)):
            raise ConfigError("", f"{origin}: {entry!r} is not a valid name")
        self.values[setting.section].setdefault(setting.name, {})[entry] = value
        self.origins[f"{setting.section}.{setting.name}.{entry}"] = origin
        self.origins[f"{setting.section}.{setting.name}"] = origin


def _read_toml(path: Path, file: str) -> dict[str, Any]:
    """file: the path as the user wrote it."""
    try:
        return tomli.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        siblings = [str(Path(file).parent / p.name) for p in path.parent.glob("*.toml") if p.exists()]
        raise ConfigError("", f"--config {file}: no such file{did_you_mean(file, siblings)}") from None
    except IsADirectoryError:
        raise ConfigError("", f"--config {file}: is a folder; expected a TOML file") from None
    except OSError as error:
        raise ConfigError("", f"--config {file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError("", f"--config {file}: not UTF-8 text (byte {error.start})") from None
    except tomli.TOMLDecodeError as error:
        raise ConfigError("", f"--config {file}: not valid TOML: {error}") from None
    except (ValueError, RecursionError):  # the file contains thousands of digits or brackets
        raise ConfigError("", f"--config {file}: cannot be parsed as TOML") from None


def _put_file(values: _Values, document: Mapping[str, Any], file: str) -> None:
    for section, body in document.items():
        known = settings().get(section)
        if not isinstance(body, dict):
            hint = _elsewhere(section, "") or (f"; write [{section}] as a table" if known else "")
            raise ConfigError("", f"{file} {section} = {toml_value(body)}: is outside any [section]{hint}")
        if known is None:
            hint = did_you_mean(section, settings(), "[{}]")
            raise ConfigError("", f"{file} [{section}]: unknown section{hint}")
        for name, raw in body.items():
            setting = known.get(name)
            if setting is None:
                hint = _elsewhere(name, section) or did_you_mean(name, list(known))
                raise ConfigError("", f"{file} [{section}] {name}: unknown key{hint}")
            _put_toml_value(values, setting, raw, file)


def _put_toml_value(values: _Values, setting: Setting, raw: Any, file: str) -> None:
    origin = f"{file} [{setting.section}] {setting.name} = {toml_value(raw)}"
    if is_table(setting.type):
        if not isinstance(raw, dict):
            raise ConfigError("", f"{origin}: expected a table")
        for entry, value in raw.items():
            entry_origin = f"{file} [{setting.section}.{setting.name}] {entry} = {toml_value(value)}"
            values.put_entry(setting, entry, _checked(coerce, value, setting, entry_origin), entry_origin)
        return
    values.put(setting, _checked(coerce, raw, setting, origin), origin)


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
    """Return a hint that names the other sections with exactly this key, or "" if there are none."""
    sections = [s for s, members in settings().items() if name in members and s != section]
    return f"; did you mean [{sections[0]}] {name}?" if sections else ""


def parse_argv(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (flag, value) pairs of a command line without --help and --print-config."""
    words = iter(range(len(argv)))
    for i in words:
        word = argv[i]
        if not word.startswith("--") or len(word) == 2:
            raise ConfigError("", f"{word}: unexpected argument; settings are written --section.key value")
        flag, equals, value = word.partition("=")
        if not equals:
            if i + 1 == len(argv) or argv[i + 1].startswith("--"):
                if flag != "--config":
                    _find(flag)  # raises for an unknown flag
                raise ConfigError("", f"{flag}: expects a value")
            value = argv[next(words)]
        yield flag, value


def _find(flag: str) -> tuple[Setting, str]:
    """Return the setting that a flag names, and the table entry if the flag is --section.table.entry, otherwise ""."""
    section, _, rest = flag[2:].partition(".")
    name, _, entry = rest.partition(".")
    setting = settings().get(section, {}).get(name)
    if setting is not None and bool(entry) == is_table(setting.type):
        return setting, entry
    if setting is not None and not entry:
        raise ConfigError("", f"{flag}: is a table; set an entry with {flag}.NAME VALUE")
    flags = [s.flag for members in settings().values() for s in members.values()]
    same_name = [f for f in flags if f.rpartition(".")[2] == flag.rpartition(".")[2].lstrip("-")]
    candidates = [*flags, "--config", "--print-config", "--help"]
    hint = f"; did you mean {same_name[0]!r}?" if same_name else did_you_mean(flag, candidates)
    raise ConfigError("", f"{flag}: unknown setting{hint}")


def _put_flags(values: _Values, flags: Sequence[tuple[str, str]]) -> None:
    seen = set()
    for flag, text in flags:
        setting, entry = _find(flag)
        origin = f"{flag} {text}"
        if flag in seen:
            raise ConfigError("", f"{origin}: given twice")
        seen.add(flag)
        value = _checked(parse_text, text, setting, origin)
        if entry:
            values.put_entry(setting, entry, value, origin)
        else:
            values.put(setting, value, origin)


def load_config(argv: Sequence[str], check_files: bool = True) -> Config:
    """Load and check a configuration. Raises ConfigError with the complete line for the user.

    argv: `--config FILE` (default: train_configs/debug.toml) and any number of `--section.key value`.
    check_files: whether files that settings name must exist.
    """
    flags = list(parse_argv(argv))
    paths = [value for flag, value in flags if flag == "--config"]
    if len(paths) > 1:
        raise ConfigError("", f"--config {paths[1]}: given twice")
    file = paths[0] if paths else str(DEFAULT_CONFIG)
    path = Path(file)
    values = _Values()
    _put_file(values, _read_toml(path, file), file)
    _put_flags(values, [(flag, value) for flag, value in flags if flag != "--config"])
    values.values["run"]["name"] = values.values["run"].get("name") or path.stem
    sections = {
        section.name: section.default_factory(**values.values[section.name])
        for section in fields(Config)
        if section.name in values.values
    }
    config = Config(**sections, origins=values.origins)
    try:
        check_combinations(config)
        if check_files:
            _check_files(config)
    except ConfigError as error:
        raise ConfigError("", config.explain(error)) from None
    return config


# ---------------------------------------------------------------- rules between settings


def check_combinations(config: Config) -> None:
    """Raise ConfigError for the first broken rule between settings. trainer/run/resolve.py checks model and mesh."""
    for key, broken, message in _rules(config):
        if broken:
            raise ConfigError(key, message)


def _rules(config: Config) -> Iterator[tuple[str, object, str]]:
    """Yield (setting, whether its value breaks the rule, message) for every rule."""
    name, data, training, optimizer = config.run.name, config.data, config.training, config.optimizer
    yield "run.name", name.strip() in ("", ".", "..") or {"/", "\\"} & set(name), "must be a single folder name"
    yield "run.name", len(os.fsencode(name)) > 255, "exceeds 255 bytes, the limit for a folder name"
    for section, members in settings().items():
        for setting in members.values():
            if getattr(getattr(config, section), setting.name) != setting.default:
                for condition in filter(None, setting.constraint.only_with.split(" and ")):
                    message = f"has no effect here: only with {condition}"
                    yield f"{section}.{setting.name}", not _holds(condition, config), message
    backend = config.tokenizer.backend
    yield "tokenizer.path", backend != "default" and not config.tokenizer.path, f"required with backend = {backend}"
    needs_path = data.dataset not in ("python_stdlib", "chat") and not data.path and not data.datasets
    yield "data.path", needs_path, f"required with dataset = {data.dataset}"
    yield "parallel.dp_shard", config.parallel.dp_shard == 0, "must be at least 1, or -1 for all remaining ranks"
    reshard = config.parallel.reshard_after_forward
    message = "must be at least 2 if it is a number of ranks"
    yield "parallel.reshard_after_forward", isinstance(reshard, int) and reshard < 2, message
    nothing_held_out = not data.held_out_fraction and not config.evaluation.datasets
    message = "needs held-out documents, but [data] held_out_fraction is 0"
    yield "evaluation.interval_steps", config.evaluation.interval_steps and nothing_held_out, message
    message = "incompatible with [parallel] cpu_offload, which already keeps the optimizer state on the host"
    yield "optimizer.offload", optimizer.offload != "none" and config.parallel.cpu_offload, message
    early = optimizer.offload == "state_and_gradients" and training.reduce_every_microbatch
    message = "incompatible with [training] reduce_every_microbatch: gradients must be complete when they are offloaded"
    yield "optimizer.offload", early, message
    checkpointing = config.activation_checkpoint
    message = "needs mode = full, because only inputs of blocks are offloaded"
    yield "activation_checkpoint.offload_inputs", checkpointing.offload_inputs and checkpointing.mode != "full", message
    incompatible = {
        "[training] max_norm, which needs all gradients at once; set it to none": training.max_norm is not None,
        "[training] reduce_every_microbatch: gradients are complete after the last one": training.reduce_every_microbatch,
        "[optimizer] offload; state_and_gradients also frees gradients in backward": optimizer.offload != "none",
        "[parallel] cpu_offload, which copies gradients to the host late": config.parallel.cpu_offload,
        "[resilience] on_loss_spike, which skips complete steps": config.resilience.on_loss_spike != "off",
        "[resilience] max_consecutive_skips > 1: a step cannot be skipped": config.resilience.max_consecutive_skips > 1,
    }
    for message, broken in incompatible.items():
        yield "optimizer.in_backward", optimizer.in_backward and broken, f"incompatible with {message}"
    undecayed = config.lr_schedule.name == "warmup_stable_decay" and not config.lr_schedule.decay_steps
    yield "lr_schedule.decay_steps", undecayed, "must be at least 1 with name = warmup_stable_decay"


def _holds(condition: str, config: Config) -> bool:
    """Whether a condition of `Constraint.only_with` is met. Forms: "a jsonl or parquet dataset" (at least one dataset is),
    "[section] name" (the setting is set), "empty [section] name", "[section] name = a or b", "[section] name != a"."""
    if dataset := re.fullmatch(r"a (.+) dataset", condition):
        return any(reader in re.split(", | or ", dataset[1]) for _, reader, _ in _datasets(config))
    form = r"(empty )?\[(\w+)\] (\w+)(?: (!?=) (.+))?"
    empty, section, name, operator, choices = re.fullmatch(form, condition).groups()
    value = getattr(getattr(config, section), name)
    if operator:
        return (value in choices.split(" or ")) == (operator == "=")
    return bool(value) != bool(empty)


def _check_files(config: Config) -> None:
    if config.checkpoint.init_from and (message := folder_error(config.checkpoint.init_from)):
        raise ConfigError("checkpoint.init_from", message)
    tokenizer = config.tokenizer
    is_folder = tokenizer.backend == "huggingface" and os.path.isdir(tokenizer.path)
    if tokenizer.path and not os.path.isfile(tokenizer.path) and not is_folder:
        raise ConfigError("tokenizer.path", "no such file")
    for key, reader, path in _datasets(config):
        if path and reader in _FILE_READERS and not _exists(path):
            raise ConfigError(key, "no such file or folder, and no file matches it as a pattern")


_FILE_READERS = ("text", "jsonl", "parquet", "tokens", "chat", "prepared")
"""Readers whose path must exist. A Hugging Face dataset may be given by name instead of by path."""


def _datasets(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, reader, path) of each dataset."""
    yield "data.path", config.data.dataset, config.data.path
    for table, datasets in (
        ("data.datasets", config.data.datasets),
        ("evaluation.datasets", config.evaluation.datasets),
    ):
        for name, text in datasets.items():
            reader, _, path = text.partition(":")
            yield f"{table}.{name}", reader, path


def _exists(path: str) -> bool:
    return os.path.exists(path) or any(True for _ in glob.iglob(path, recursive=True))

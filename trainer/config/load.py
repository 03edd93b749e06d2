"""Loading of a Config from a TOML file and the command line. An error message is one line: the setting, its value and origin,
the broken rule, and a likely fix if one is found."""

import itertools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import tomli

from trainer.config.fields import (
    Setting,
    coerce,
    did_you_mean,
    nearest,
    parse_text,
    parse_texts,
    range_error,
    settings,
    type_error,
)
from trainer.config.foreign import SECTIONS, VALUES, replacement
from trainer.config.packages import is_installed
from trainer.config.pretrained import SHORT_FLAGS, with_pretrained
from trainer.config.schema import DOCUMENT_COLUMNS, MESSAGE_COLUMNS, Config, ConfigError, ModelFamily, toml_value
from trainer.system.files import folder_error
from trainer.system.paths import exists, is_dataset_name, path_error, split_best

DEFAULT_CONFIG = Path(__file__).parents[2] / "train_configs" / "debug.toml"


DATA_SECTIONS = ("data", "evaluation", "tokenizer")
"""Sections whose files the preparation of data needs."""
FILE_SECTIONS = (*DATA_SECTIONS, "checkpoint", "lora", "metrics")
"""Sections with files, or packages, that must exist before a run starts."""
_WITHOUT_VALUE = ("--dry-run", "--print-config", "--help")


def load_config(argv: Sequence[str], check_files: Collection[str] = FILE_SECTIONS, with_weights: bool = True) -> Config:
    """Load and check a configuration.

    Args:
        argv: `--config FILE` (default: train_configs/debug.toml) and any number of `--section.key value`.
        check_files: Sections whose files and packages must exist.
        with_weights: Whether a model that is named by its name on the Hub is downloaded completely, not only its small files.

    Raises:
        ConfigError: Its message is the complete line for the user.
    """
    flags = parse_argv(argv)
    file = flags.pop("--config", str(DEFAULT_CONFIG))
    values: dict[str, dict[str, Any]] = {setting.section: {} for setting in settings().values()}
    origins: dict[str, str] = {}
    from_flags = (
        (*_find(SHORT_FLAGS.get(flag, flag)), parse_text, text, f"{flag} {text}") for flag, text in flags.items()
    )
    for setting, entry, parse, raw, origin in itertools.chain(_from_file(file), from_flags):
        try:
            are_texts = setting.constraint.multiline and parse is parse_text
            value = parse_texts(raw) if are_texts else parse(raw, setting.type)
        except ValueError:
            raise ConfigError("", f"{origin}: {type_error(setting.type, raw, VALUES.get(setting.key, {}))}") from None
        if problem := range_error(value, setting.constraint):
            raise ConfigError("", f"{origin}: {problem}")
        origins[setting.key] = origin
        if not setting.is_table:
            values[setting.section][setting.name] = value
        elif entry.isidentifier() or (setting.constraint.free_keys and entry.isprintable() and entry):
            values[setting.section].setdefault(setting.name, {})[entry] = value
            origins[f"{setting.key}.{entry}"] = origin
        else:
            raise ConfigError("", f"{origin}: {entry!r} is not a valid name")
    _prefer_flag(values["training"], origins)
    values["run"]["name"] = values["run"].get("name") or Path(file).stem
    defaults = Config()
    sections = {name: replace(getattr(defaults, name), **members) for name, members in values.items()}
    config = Config(**sections, origins=origins)
    try:
        config = with_pretrained(config, check_files, with_weights)
        check_combinations(config)
        _check_files(config, check_files)
    except ConfigError as error:
        raise ConfigError("", config.explain(error)) from None
    return config


def _prefer_flag(training: dict[str, Any], origins: dict[str, str]) -> None:
    """Remove the file's number of steps if the command line gives epochs, and the file's epochs if it gives steps."""
    for given, other in (("steps", "epochs"), ("epochs", "steps")):
        key = f"training.{other}"
        by_flag = origins.get(f"training.{given}", "").startswith("--") and training[given] is not None
        if by_flag and key in origins and not origins[key].startswith("--"):
            del training[other], origins[key]


def _from_file(file: str) -> Iterator[tuple[Setting, str, Callable[[Any, Any], Any], Any, str]]:
    """Yield (setting, key of a table entry or "", parser, unparsed value, origin) for each value in the file."""
    sections = {setting.section for setting in settings().values()}
    for section, body in _read_toml(file).items():
        if not isinstance(body, dict):
            own = f"; write [{section}] as a table" if section in sections else ""
            hint = replacement(section, _IN_FILE) or _elsewhere(section) or own
            raise ConfigError("", f"{file} {section} = {toml_value(body)}: the key is outside any [section]{hint}")
        if section not in sections:
            hints = (replacement(f"{section}.{name}", _IN_FILE) and name for name in body)
            if name := next(filter(None, hints), None):
                hint = replacement(f"{section}.{name}", _IN_FILE)
                raise ConfigError("", f"{file} [{section}] {name}: unknown section{hint}")
            own = SECTIONS.get(section)
            hint = f"; did you mean [{own}]?" if own else did_you_mean(section, sections, "[{}]")
            raise ConfigError("", f"{file} [{section}]: unknown section{hint}")
        for name, raw in body.items():
            setting = settings().get(f"{section}.{name}")
            if setting is None:
                siblings = [s.name for s in settings().values() if s.section == section]
                removed = REMOVED.get(f"{section}.{name}")
                hint = replacement(f"{section}.{name}", _IN_FILE) or _elsewhere(name) or did_you_mean(name, siblings)
                hint = f"; {removed}" if removed else hint
                raise ConfigError("", f"{file} [{section}] {name}: unknown key{hint}")
            origin = f"{file} [{section}] {name} = {toml_value(raw)}"
            if not setting.is_table:
                yield setting, "", coerce, raw, origin
            elif isinstance(raw, dict):
                for entry, value in raw.items():
                    yield setting, entry, coerce, value, f"{file} [{setting.key}] {entry} = {toml_value(value)}"
            else:
                raise ConfigError("", f"{origin}: expected a table")


def _read_toml(file: str) -> dict[str, Any]:
    try:
        content = tomli.loads(Path(file).read_text(encoding="utf-8-sig"))
        toml_value(content)  # error messages show values in this form
        return content
    except FileNotFoundError:
        problem = f"no such file{_similar_file(file)}"
    except IsADirectoryError:
        problem = "expected a TOML file, got a folder"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text (byte {error.start})"
    except tomli.TOMLDecodeError as error:
        is_toml = Path(file).suffix not in (".yaml", ".yml", ".json", ".py")
        problem = f"not valid TOML: {error}" if is_toml else "expected a TOML file such as train_configs/debug.toml"
    except (ValueError, RecursionError):  # a number has thousands of digits, or values are nested hundreds of times
        problem = "a value is too long or nested too deep"
    raise ConfigError("", f"--config {file}: {problem}")


def _similar_file(file: str) -> str:
    """Return a hint with the existing file that the user may have meant: one of train_configs/ by its name alone, or a similar
    name in the same folder."""
    named = Path(file).stem
    for path in (Path(f"{file}.toml"), DEFAULT_CONFIG.parent / f"{named}.toml"):
        if path.exists():
            return f"; did you mean '{os.path.relpath(path)}'?"
    siblings = [str(path) for path in Path(file).parent.glob("*.toml") if path.exists()]
    shipped = {path.stem: os.path.relpath(path) for path in DEFAULT_CONFIG.parent.glob("*.toml")}
    similar = nearest(file, siblings) or shipped.get(nearest(named, shipped), "")
    return similar and f"; did you mean '{similar}'?"


REMOVED = {"metrics.tensorboard": '[metrics] sinks replaces it, a list with or without "tensorboard"'}
"""Settings of earlier versions, and what replaces them."""


_IN_FILE, _AS_FLAG = "[{}] {}", "'--{}.{}'"
"""Formats of a setting in the messages about a file and about the command line."""


def _elsewhere(name: str, show: str = _IN_FILE) -> str:
    """Return a hint that suggests the settings with exactly this name, or "" if there is none."""
    same = [show.format(setting.section, setting.name) for setting in settings().values() if setting.name == name]
    return f"; did you mean {' or '.join(same)}?" if same else ""


def parse_argv(argv: Sequence[str]) -> dict[str, str]:
    """Return flag -> value. argv: must not contain --help or --print-config. Raises ConfigError."""
    flags: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        if not word.startswith("--") or len(word) == 2:
            raise ConfigError("", f"{word}: unexpected argument{_as_flag(word)}")
        flag, equals, value = word.partition("=")
        if equals and flag in _WITHOUT_VALUE:
            raise ConfigError("", f"{flag}: takes no value")
        if not equals:
            value = next(words, None)
            if value is None or value.startswith("--"):
                if flag not in ("--config", *SHORT_FLAGS):
                    _find(flag)  # raises for an unknown flag
                raise ConfigError("", f"{flag}: expects a value")
        if same := next((f for f in flags if SHORT_FLAGS.get(f, f) == SHORT_FLAGS.get(flag, flag)), ""):
            twice = f"{flag} is given twice, first as {flags[same]}; give it once"
            raise ConfigError("", f"{flag} {value}: {twice if same == flag else f'{same} {flags[same]} is given too'}")
        flags[flag] = value
    return flags


def _as_flag(word: str) -> str:
    """Return a hint about an argument that is no flag."""
    if word.endswith(".toml"):
        return f"; did you mean '--config {word}'?"
    name, _, value = word.lstrip("-+").partition("=")
    key = name.replace("-", "_")
    if key in settings():
        return f"; did you mean '--{key}{value and ' '}{value}'?"
    hint = replacement(name, _AS_FLAG) or _elsewhere(key, _AS_FLAG)
    return hint or "; write settings as --section.key value"


def _find(flag: str) -> tuple[Setting, str]:
    """Return a flag's setting and the name of its table entry. The name is "" unless the flag is --section.table.entry."""
    section, _, rest = flag[2:].partition(".")
    name, _, entry = rest.partition(".")
    setting = settings().get(f"{section}.{name}")
    if setting is not None and bool(entry) == setting.is_table:
        return setting, entry
    if setting is not None and not entry:
        raise ConfigError("", f"{flag} is a table: set one of its entries with {flag}.NAME VALUE")
    if removed := REMOVED.get(flag[2:]):
        raise ConfigError("", f"{flag}: unknown setting; {removed}")
    candidates = [*(f"--{key}" for key in settings()), *SHORT_FLAGS, "--config", *_WITHOUT_VALUE]
    hint = replacement(flag, _AS_FLAG) or _elsewhere(flag.rpartition(".")[2].lstrip("-").replace("-", "_"), _AS_FLAG)
    hint = hint or did_you_mean(flag, candidates)
    raise ConfigError("", f"{flag}: unknown setting{hint}")


# ---------------------------------------------------------------- rules between settings


def check_combinations(config: Config) -> None:
    """Raise ConfigError for the first broken rule of `_rules`. trainer/run/resolve.py checks rules for the model and the mesh."""
    for key, broken, message in _rules(config):
        if broken:
            raise ConfigError(key, message)


def _rules(config: Config) -> Iterator[tuple[str, object, str]]:
    """Yield (setting, whether its value breaks the rule, message) for every rule."""
    data, training = config.data, config.training
    yield from _name_rules(config)
    yield from _preference_rules(config)
    for setting in settings().values():
        if config.value(setting.key) != setting.default:
            for condition in filter(None, setting.constraint.only_with.split(" and ")):
                yield setting.key, not _holds(condition, config), f"has an effect only with {condition}"
    backend = config.tokenizer.backend
    yield "tokenizer.path", backend != "default" and not config.tokenizer.path, f"is required with backend = {backend}"
    needs_path = data.dataset not in ("python_stdlib", "chat", "preference") and not data.path and not data.datasets
    yield "data.path", needs_path, f"is required with dataset = {data.dataset}"
    known = DOCUMENT_COLUMNS + MESSAGE_COLUMNS
    for column in data.columns:
        message = f"unknown field; it must be one of {', '.join(known)}{did_you_mean(column, known)}"
        yield f"data.columns.{column}", column not in known, message
    yield "parallel.dp_shard", config.parallel.dp_shard == 0, "must be at least 1, or -1 for all remaining ranks"
    reshard = config.parallel.reshard_after_forward
    message = "must be at least 2 if it is a number of ranks"
    yield "parallel.reshard_after_forward", isinstance(reshard, int) and reshard < 2, message
    # torch 2.13 gathers the wrong shards of a unit that backward did not reach, in the next microbatch.
    message = "must not be a number of ranks with [lora] rank, because frozen units have no backward"
    yield "parallel.reshard_after_forward", isinstance(reshard, int) and config.lora.rank, message
    nothing_held_out = not data.held_out_fraction and not config.evaluation.datasets
    message = "needs held-out documents, but [data] held_out_fraction is 0; without evaluation, set interval_steps = 0"
    yield "evaluation.interval_steps", config.evaluation.interval_steps and nothing_held_out, message
    has_steps = "training.steps" in config.origins or training.steps != settings()["training.steps"].default
    message = f"replaces [training] steps, but steps = {training.steps} is set too; remove one of them"
    yield "training.epochs", training.epochs is not None and has_steps, message
    yield "checkpoint.init_from", config.lora.rank and not config.checkpoint.init_from, "is required with [lora] rank"
    message = "cannot be combined with [lora] rank, which keeps the base model unchanged"
    yield "checkpoint.init_exclude", config.lora.rank and config.checkpoint.init_exclude, message
    message = "best needs [evaluation] keep_best_on and interval_steps, which choose the best checkpoint"
    yield "checkpoint.export_checkpoint", _wants_best(config.checkpoint.export_checkpoint, config), message
    yield "checkpoint.load_step", _wants_best(config.checkpoint.load_step, config), message
    rolls_back = config.resilience.on_loss_spike == "rollback" and not config.checkpoint.enabled
    yield "resilience.on_loss_spike", rolls_back, "rollback needs [checkpoint] enabled = true"
    sinks = set(config.metrics.sinks)
    twice = next((name for name in config.metrics.sinks if config.metrics.sinks.count(name) > 1), "")
    yield "metrics.sinks", twice, f"names {twice} twice"
    message = 'must contain "jsonl" too: other sinks deliver the records of metrics.jsonl'
    yield "metrics.sinks", sinks - {"console"} and "jsonl" not in sinks, message
    limit = config.distributed.timeout_s
    message = (
        f"must be below [distributed] timeout_s, {limit:g}: otherwise a collective fails before the hang is reported"
    )
    yield "resilience.hang_timeout_s", config.resilience.hang_timeout_s >= limit, message
    yield from _optimizer_rules(config)


def _families() -> Collection[str]:
    """Return the names of the model families, with those that the program itself has added to MODELS."""
    models = sys.modules.get("models")  # not imported here, because it imports torch
    return get_args(ModelFamily) if models is None else models.MODELS


def _name_rules(config: Config) -> Iterator[tuple[str, object, str]]:
    name, data, families = config.run.name, config.data, _families()
    for key, path in _paths(config):
        yield key, path_error(path), path_error(path)
    yield "run.name", name.strip() in ("", ".", "..") or {"/", "\\"} & set(name), "must be a single folder name"
    yield "run.output_folder", not config.run.output_folder.strip(), "must not be empty"
    yield "run.name", len(os.fsencode(name)) > 255, "exceeds 255 bytes, the limit for a folder name"
    if data.path and data.dataset == "python_stdlib" and not data.datasets:
        ending = data.path.lower().removesuffix(".gz").removesuffix(".zst").rpartition(".")[2]
        readers = _READERS_BY_ENDING.get(ending, "text, jsonl, parquet, csv, huggingface, tokens, chat or preference")
        yield "data.path", True, f"needs the type of the dataset: set [data] dataset to {readers}"
    message = f"expected one of {', '.join(families)}{did_you_mean(config.model.name, families)}"
    yield "model.name", config.model.name not in families, message


def _optimizer_rules(config: Config) -> Iterator[tuple[str, object, str]]:
    optimizer, training = config.optimizer, config.training
    message = "is incompatible with [parallel] cpu_offload, which already keeps the optimizer state on the host"
    yield "optimizer.offload", optimizer.offload != "none" and config.parallel.cpu_offload, message
    early = optimizer.offload == "state_and_gradients" and training.reduce_every_microbatch
    message = "is incompatible with [training] reduce_every_microbatch: only complete gradients can be offloaded"
    yield "optimizer.offload", early, message
    incompatible = {
        "[training] max_norm, which needs all gradients at once; set max_norm to none": training.max_norm is not None,
        "[training] reduce_every_microbatch: only the last microbatch completes gradients": training.reduce_every_microbatch,
        "[optimizer] offload, which updates parameters only after backward": optimizer.offload != "none",
        "[parallel] cpu_offload, which copies gradients to the host too late": config.parallel.cpu_offload,
        "[resilience] on_loss_spike, which skips complete steps": config.resilience.on_loss_spike != "off",
        "[resilience] max_consecutive_skips > 1: no step can be skipped": config.resilience.max_consecutive_skips > 1,
    }
    for message, broken in incompatible.items():
        yield "optimizer.in_backward", optimizer.in_backward and broken, f"is incompatible with {message}"
    rises = config.lr_schedule.name == "range_test"
    yield (
        "lr_schedule.min_lr_ratio",
        rises and not config.lr_schedule.min_lr_ratio,
        "must be above 0 with name = range_test",
    )
    yield "lr_schedule.warmup_steps", rises and config.lr_schedule.warmup_steps, "must be 0 with name = range_test"
    undecayed = config.lr_schedule.name == "warmup_stable_decay" and not config.lr_schedule.decay_steps
    yield "lr_schedule.decay_steps", undecayed, "must be at least 1 with name = warmup_stable_decay"


def _wants_best(value: int | str, config: Config) -> bool:
    """Return whether a setting chooses the best checkpoint of a run that tracks none."""
    evaluation = config.evaluation
    return value == "best" and not (evaluation.keep_best_on and evaluation.interval_steps)


def _preference_rules(config: Config) -> Iterator[tuple[str, object, str]]:
    data, loss = config.data, config.preference.loss
    for key, reader, _ in _datasets(config):
        if key == "data.path":
            key, reader = "data.dataset", "prepared" if data.datasets else reader
        if config.preference.enabled:
            message = f"[preference] loss = {loss} needs preference datasets, or prepared stores of them"
            yield key, reader not in ("preference", "prepared"), message
        else:
            yield key, reader == "preference", "a preference dataset needs [preference] loss"
    if config.preference.enabled:
        message = f'must be "best-fit" or "none" with [preference] loss = {loss}: a sample contains complete pairs'
        yield "data.packing", data.packing == "wrapped", message
        message = f'must be "drop" with [preference] loss = {loss}: pairs are not divided'
        yield "data.long_documents", data.long_documents != "drop", message
        message = f"must be true with [preference] loss = {loss}: the answers of a sample are independent"
        yield "data.document_mask", not data.document_mask, message
        uninitialized = config.preference.needs_reference and not config.checkpoint.init_from
        message = f"is required with [preference] loss = {loss}, which compares the model with its initial weights"
        yield "checkpoint.init_from", uninitialized, message


def _holds(condition: str, config: Config) -> bool:
    """Return whether an `only_with` condition holds. Forms: "a jsonl or parquet dataset" (a dataset has one of these formats),
    "[section] name" (the setting is not empty), "empty [section] name", "[section] name = a or b" (of a list: it contains one of
    them), "[section] name != a"."""
    if dataset := re.fullmatch(r"a (.+) dataset", condition):
        return any(reader in re.split(", | or ", dataset[1]) for _, reader, _ in _datasets(config))
    form = r"(empty )?\[(\w+)\] (\w+)(?: (!?=) (.+))?"
    empty, section, name, operator, choices = re.fullmatch(form, condition).groups()
    value = config.value(f"{section}.{name}")
    if operator:
        values = value if isinstance(value, tuple) else (value,)
        return any(v in choices.split(" or ") for v in values) == (operator == "=")
    return bool(value) != bool(empty)


def _check_files(config: Config, sections: Collection[str]) -> None:
    for section, key in (("checkpoint", "checkpoint.init_from"), ("lora", "lora.init_from")):
        if section in sections and config.value(key) and (message := folder_error(split_best(config.value(key))[0])):
            raise ConfigError(key, message)
    tokenizer = config.tokenizer
    is_folder = tokenizer.backend == "huggingface" and os.path.isdir(tokenizer.path)
    if "tokenizer" in sections and tokenizer.path and not os.path.isfile(tokenizer.path) and not is_folder:
        raise ConfigError("tokenizer.path", "no such file")
    for package in ("wandb", "mlflow", "trackio") if "metrics" in sections else ():
        if package in config.metrics.sinks and not is_installed(package):
            raise ConfigError(
                "metrics.sinks", f"needs the package {package}: pip install -e '.[{package}]' in the clone"
            )
    for key, reader, path in _datasets(config):
        is_checked = key.partition(".")[0] in sections and reader in _FILE_READERS
        if path and is_checked and not exists(path) and not (reader in _NAME_READERS and is_dataset_name(path)):
            raise ConfigError(key, "no such file or folder, and no file matches the pattern")


PATHS = (
    *(
        "run.output_folder",
        "model.huggingface",
        "model.pretrained",
        "tokenizer.path",
        "data.path",
        "data.chat_template",
        "data.store_folder",
    ),
    *("lora.init_from", "checkpoint.init_from"),
)
"""Settings whose value is a path, or may be one. Those of named datasets are in tables."""


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (setting, path) of each path."""
    yield from ((key, config.value(key)) for key in PATHS)
    for table in ("data.datasets", "evaluation.datasets"):
        for name, text in config.value(table).items():
            yield f"{table}.{name}", text if re.match(r"\w+://", text) else text.partition(":")[2]


_READERS_BY_ENDING = {
    "txt": "text",
    "md": "text",
    "jsonl": "jsonl (texts), chat or preference",
    "json": "jsonl (texts), chat or preference",
    "parquet": "parquet (texts), chat or preference",
    "csv": "csv (texts), chat or preference",
    "tsv": "csv (texts), chat or preference",
    "bin": "tokens",
    "npy": "tokens",
}
"""Ending of a file's name -> values of data.dataset."""
_FILE_READERS = ("text", "jsonl", "parquet", "csv", "tokens", "chat", "preference", "prepared")
"""Readers whose path must exist. A Hugging Face dataset may be given by any name instead of by path."""
_NAME_READERS = ("chat", "preference")
"""Readers of _FILE_READERS that also accept OWNER/NAME of a Hugging Face dataset."""


def _datasets(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, reader, path) of each dataset."""
    yield "data.path", config.data.dataset, config.data.path
    for table in ("data.datasets", "evaluation.datasets"):
        for name, text in config.value(table).items():
            reader, _, path = text.partition(":")
            yield f"{table}.{name}", reader, path

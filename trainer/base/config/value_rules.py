"""Rules of single values that their types and ranges do not express. compatibility.py contains those between settings."""

import os
import re
import sys
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import get_args

from trainer.base.config.errors import ConfigError
from trainer.base.config.remote_paths import readable_error
from trainer.base.config.schema.config import Config
from trainer.base.config.schema.data import (
    DATASET_TYPES,
    DOCUMENT_COLUMNS,
    MESSAGE_COLUMNS,
    READER_OF_ENDING,
    TYPES_THAT_NEED_PATH,
)
from trainer.base.config.schema.model import ModelFamily
from trainer.base.config.schema.tasks import METRICS, PYTHON_IDIOMS, UNUSED, TaskConfig
from trainer.base.config.schema.training import TrainingConfig
from trainer.base.system.object_store import url_error
from trainer.base.system.paths import BEST, path_error
from trainer.base.system.remote_objects import has_pattern
from trainer.base.system.spelling import did_you_mean

_WRITTEN = ("run.output_folder", "data.store_folder")
"""Settings whose value is the path of what is written."""
_READ = (
    "model.huggingface",
    "model.pretrained",
    "tokenizer.path",
    "data.chat_template",
    "lora.init_from",
    "checkpoint.init_from",
)
"""Settings whose value is the path or URL of what is read, or may be one, beside those of datasets."""


def check_values(config: Config) -> None:
    """Raise ConfigError for the first value that breaks one of `_rules`."""
    for key, broken, message in _rules(config):
        if broken:
            raise ConfigError(key, message)


def _rules(config: Config) -> Iterator[tuple[str, object, str]]:
    """Yield (setting, whether its value breaks the rule, message) for every rule."""
    yield from _name_rules(config)
    yield from _dataset_rules(config)
    for name, task in config.evaluation.tasks.items():
        yield from _task_rules(config, f"evaluation.tasks.{name}", task)
    known = DOCUMENT_COLUMNS + MESSAGE_COLUMNS
    for column in config.data.columns:
        message = f"unknown field; it must be one of {', '.join(known)}{did_you_mean(column, known)}"
        yield f"data.columns.{column}", column not in known, message
        same = next((other for other, name in config.data.columns.items() if name == config.data.columns[column]), "")
        yield f"data.columns.{column}", same != column, f"reads the same field as data.columns.{same}"
    yield "parallel.dp_shard", config.parallel.dp_shard == 0, "must be at least 1, or -1 for all remaining ranks"
    reshard = config.parallel.reshard_after_forward
    message = "must be at least 2 if it is a number of ranks"
    yield "parallel.reshard_after_forward", isinstance(reshard, int) and reshard < 2, message
    yield from _batch_rules(config.training)
    twice = next((name for name in config.metrics.sinks if config.metrics.sinks.count(name) > 1), "")
    yield "metrics.sinks", twice, f"names {twice} twice"
    limit = config.distributed.timeout_s
    message = (
        f"must be below [distributed] timeout_s, {limit:g}: otherwise a collective fails before the hang is reported"
    )
    yield "resilience.hang_timeout_s", config.resilience.hang_timeout_s >= limit, message


def _task_rules(config: Config, key: str, task: TaskConfig) -> Iterator[tuple[str, object, str]]:
    name = key.rpartition(".")[2]
    kind, default = f"kind = {task.kind}", TaskConfig()
    others = [other for other, given in config.evaluation.tasks.items() if given.path]
    message = f"expected a file of questions, or {PYTHON_IDIOMS}{did_you_mean(name, others, 'the task {!r}')}"
    yield f"{key}.path", not task.path, message
    problem = "" if task.path == PYTHON_IDIOMS else readable_error(task.path)
    yield f"{key}.path", problem, problem
    message = "the name of a task must differ from those of the evaluation datasets"
    yield key, name in config.evaluation.datasets, message
    for option in UNUSED[task.kind]:
        is_given = getattr(task, option) != getattr(default, option)
        yield f"{key}.{option}", is_given, f"has no effect on a task of {kind}"
    other = next((metric for metric in task.metrics if metric not in METRICS[task.kind]), "")
    message = f"{other} is no metric of {kind}, which has {', '.join(METRICS[task.kind])}"
    yield f"{key}.metrics", other, message
    twice = next((metric for metric in task.metrics if task.metrics.count(metric) > 1), "")
    yield f"{key}.metrics", twice, f"names {twice} twice"
    limit = config.training.seq_len
    yield f"{key}.max_seq_len", task.max_seq_len > limit, f"must be at most [training] seq_len = {limit}"
    yield f"{key}.stop", "" in task.stop, "must not contain an empty text"
    criterion = config.evaluation.criterion.name
    message = "must be 0 for the task of keep_best_on: the scores of different questions cannot be compared; set limit"
    yield f"{key}.time_limit_s", task.time_limit_s and criterion == name, message
    problem = pattern_error(task.answer_pattern)
    yield f"{key}.answer_pattern", problem, problem
    finds_nothing = task.answer_pattern and not problem and re.search(task.answer_pattern, "")
    yield f"{key}.answer_pattern", finds_nothing, "matches an empty text, so that every text has an empty answer"


def pattern_error(pattern: str) -> str:
    """Return why a text is no regular expression, or ""."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    return ""


def _dataset_rules(config: Config) -> Iterator[tuple[str, object, str]]:
    types = ", ".join(DATASET_TYPES)
    for key, type_, path in config.datasets():
        is_entry = key != "data.path"
        message = readable_error(f"{type_}:{path}" if is_entry and path.startswith("//") else path, allows_pattern=True)
        yield key, message, message
        if is_entry:  # otherwise these are rows of compatibility.py
            reader = READER_OF_ENDING.get(os.path.splitext(type_)[1].lower())
            hint = f", such as {reader}:{type_}" if reader else did_you_mean(type_, DATASET_TYPES)
            message = f"expected TYPE:PATH; TYPE is one of {types}{hint}"
            yield key, type_ not in DATASET_TYPES, message
            yield key, path and type_ == "python_stdlib", "python_stdlib does not take a path"
            yield key, not path and type_ in TYPES_THAT_NEED_PATH, f"expected a path after {type_}:"


def _batch_rules(training: TrainingConfig) -> Iterator[tuple[str, object, str]]:
    for steps in training.batch_schedule:
        is_number = re.fullmatch("[1-9][0-9]{0,11}", steps)
        message = f"{steps!r} must be the number of completed steps after which the size changes, such as 1000"
        yield f"training.batch_schedule.{steps}", not is_number, message
    for (_, before), (steps, size) in pairwise(training.batch_sizes):
        key = f"training.batch_schedule.{steps}"
        yield key, size == before, f"must differ from the size of the steps before, {before}"
        message = f"no step would have this size, because the run ends after [training] steps = {training.steps}"
        yield key, training.epochs is None and steps >= training.steps, message


def _families() -> Collection[str]:
    """Return the names of the model families, with those that the program itself has added to MODELS."""
    models = sys.modules.get("models")  # not imported here, because it imports torch
    return get_args(ModelFamily) if models is None else models.MODELS


def _name_rules(config: Config) -> Iterator[tuple[str, object, str]]:
    name, families = config.run.name, _families()
    for key in (*_WRITTEN, *_READ):
        message = (path_error if key in _WRITTEN else readable_error)(config.value(key))
        yield key, message, message
    problem = url_error(config.checkpoint.mirror) if config.checkpoint.mirror else ""
    yield "checkpoint.mirror", problem, problem
    message = f"must contain none of *, ? and [, and must not end in {BEST}: nobody could read it"
    yield "checkpoint.mirror", has_pattern(config.checkpoint.mirror) or config.checkpoint.mirror.endswith(BEST), message
    yield "run.name", name.strip() in ("", ".", "..") or {"/", "\\"} & set(name), "must be a single folder name"
    yield "run.name", name.endswith(BEST), f"must not end in {BEST}, which stands for the best checkpoint of a run"
    yield "run.output_folder", not config.run.output_folder.strip(), "must not be empty"
    yield "run.name", len(os.fsencode(name)) > 255, "exceeds 255 bytes, the limit for a folder name"
    message = f"expected one of {', '.join(families)}{did_you_mean(config.model.name, families)}"
    yield "model.name", config.model.name not in families, message

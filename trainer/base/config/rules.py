"""Rules between settings, for which neither the model nor the device mesh is needed."""

import os
import re
import sys
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import get_args

from trainer.base.config.errors import ConfigError
from trainer.base.config.fields import settings
from trainer.base.config.schema.config import Config
from trainer.base.config.schema.data import DOCUMENT_COLUMNS, MESSAGE_COLUMNS
from trainer.base.config.schema.model import ModelFamily
from trainer.base.config.schema.training import TrainingConfig
from trainer.base.system.paths import path_error
from trainer.base.system.spelling import did_you_mean

_PATHS = (
    "run.output_folder",
    "model.huggingface",
    "model.pretrained",
    "tokenizer.path",
    "data.path",
    "data.chat_template",
    "data.store_folder",
    "lora.init_from",
    "checkpoint.init_from",
)
"""Settings whose value is a path, or may be one. Those of named datasets are in tables."""
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
    has_steps = "training.steps" in config.origins or training.steps != settings()["training.steps"].default
    message = f"replaces [training] steps, but steps = {training.steps} is set too; remove one of them"
    yield "training.epochs", training.epochs is not None and has_steps, message
    yield from _batch_rules(training)
    base = config.lora.base_dtype
    message = f"is incompatible with [lora] base_dtype = {base}: products with its matrices dequantize them"
    yield "training.float8", training.float8 != "none" and base != "keep", message
    yield "checkpoint.init_from", config.lora.rank and not config.checkpoint.init_from, "is required with [lora] rank"
    message = "cannot be combined with [lora] rank, which keeps the base model unchanged"
    yield "checkpoint.init_exclude", config.lora.rank and config.checkpoint.init_exclude, message
    message = "cannot be combined with [lora] rank; scripts/convert_hf.py to-hf --averaged writes a base model"
    yield "checkpoint.init_averaged", config.lora.rank and config.checkpoint.init_averaged, message
    yield from _evaluation_rules(config)
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


def _evaluation_rules(config: Config) -> Iterator[tuple[str, object, str]]:
    data, evaluation, checkpoint = config.data, config.evaluation, config.checkpoint
    nothing_held_out = not data.held_out_fraction and not config.evaluation.datasets
    message = "needs held-out documents, but [data] held_out_fraction is 0; without evaluation, set interval_steps = 0"
    yield "evaluation.interval_steps", config.evaluation.interval_steps and nothing_held_out, message
    message = "best needs [evaluation] keep_best_on and interval_steps, which choose the best checkpoint"
    yield "checkpoint.export_checkpoint", _wants_best(config.checkpoint.export_checkpoint, config), message
    yield "checkpoint.load_step", _wants_best(config.checkpoint.load_step, config), message
    is_of_evaluated = checkpoint.export_checkpoint != "best" or checkpoint.export_averaged == evaluation.averaged
    message = f"must be {str(evaluation.averaged).lower()} with export_checkpoint = best, like [evaluation] averaged"
    yield "checkpoint.export_averaged", not is_of_evaluated, message
    is_used = evaluation.interval_steps or config.samples.prompts
    message = "has no effect without evaluations or samples: set [evaluation] interval_steps or [samples] prompts"
    yield "evaluation.averaged", evaluation.averaged and not is_used, message


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
    muon_needs = {
        "[optimizer] offload: it needs whole matrices on the device": optimizer.offload != "none",
        "[parallel] cpu_offload: it needs whole matrices on the device": config.parallel.cpu_offload,
        "[optimizer] in_backward: it exchanges the matrices of all blocks at once": optimizer.in_backward,
        "[optimizer] state_dtype = 8bit, which quantizes the moments of AdamW": optimizer.state_dtype == "8bit",
        "[lora] rank: nobody has shown a gain on adapters": config.lora.rank is not None,
    }
    for message, broken in muon_needs.items():
        yield "optimizer.name", optimizer.name == "muon" and broken, f"muon is incompatible with {message}"
    message = "is incompatible with [lora] rank: the matrices of adapters do not have the width of the model"
    yield "optimizer.base_width", optimizer.base_width and config.lora.rank is not None, message
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
    for key, reader, _ in datasets_of(config):
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
        return any(reader in re.split(", | or ", dataset[1]) for _, reader, _ in datasets_of(config))
    form = r"(empty )?\[(\w+)\] (\w+)(?: (!?=) (.+))?"
    empty, section, name, operator, choices = re.fullmatch(form, condition).groups()
    value = config.value(f"{section}.{name}")
    if operator:
        values = value if isinstance(value, tuple) else (value,)
        return any(v in choices.split(" or ") for v in values) == (operator == "=")
    return bool(value) != bool(empty)


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (setting, path) of each path."""
    yield from ((key, config.value(key)) for key in _PATHS)
    for table in ("data.datasets", "evaluation.datasets"):
        for name, text in config.value(table).items():
            yield f"{table}.{name}", text if re.match(r"\w+://", text) else text.partition(":")[2]


def datasets_of(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, reader, path) of each dataset."""
    yield "data.path", config.data.dataset, config.data.path
    for table in ("data.datasets", "evaluation.datasets"):
        for name, text in config.value(table).items():
            reader, _, path = text.partition(":")
            yield f"{table}.{name}", reader, path

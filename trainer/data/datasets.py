"""The datasets of a configuration, and the preparation of their token stores and packings. This module does not import torch."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trainer.base.config import ConfigError, DataConfig, EvaluationConfig, TokenizerConfig
from trainer.base.config.schema.data import CHAT_DATASETS, split_dataset
from trainer.base.system import console
from trainer.base.system.files import file_lock
from trainer.base.system.spelling import did_you_mean
from trainer.data.prepare.encode import chat_format
from trainer.data.prepare.prepare import prepare, renders_chats, writing
from trainer.data.sampling.packing import pack
from trainer.data.sampling.phases import MixturePhase, parse_mixture
from trainer.data.store.held_out import may_be_held_out, open_splits
from trainer.data.store.store import read_description, store_digest
from trainer.data.tokenizer.protocol import Tokenizer

SINGLE = "data"
"""Name of the dataset if data.datasets is not set."""


def dataset_configs(data: DataConfig) -> dict[str, DataConfig]:
    """Return name -> configuration for each training dataset."""
    if not data.datasets:
        return {SINGLE: data}
    return {name: _dataset_config(data, text) for name, text in data.datasets.items()}


def mixture_phases(data: DataConfig) -> tuple[MixturePhase, ...]:
    """Return the phases in which the training datasets are mixed. Raises ConfigError."""
    return parse_mixture(data.mixture, list(dataset_configs(data)))


def held_out_names(data: DataConfig) -> dict[str, str]:
    """Return training dataset -> name under which its held-out documents are evaluated, of each that may have some."""
    configs = dataset_configs(data)
    is_single = list(configs) == [SINGLE]
    return {name: "held_out" if is_single else name for name, config in configs.items() if may_be_held_out(config)}


def check_names(data: DataConfig, evaluation: EvaluationConfig) -> None:
    """Raise ConfigError for a name, in the mixture or of an evaluation dataset, that is wrong whatever the data contain."""
    mixture_phases(data)
    held_out, configs = held_out_names(data), dataset_configs(data)
    # A prepared store may have no held-out documents.
    require_new_names(evaluation.datasets, [held_out[name] for name in held_out if configs[name].dataset != "prepared"])
    if name := next((name for name in held_out.values() if name in evaluation.tasks), ""):
        message = "this name is taken by the held-out documents of a training dataset; choose another name"
        raise ConfigError(f"evaluation.tasks.{name}", message)
    require_evaluated(evaluation, [*held_out.values(), *evaluation.datasets])


def require_new_names(sets: Iterable[str], held_out: Collection[str]) -> None:
    """Raise ConfigError if an evaluation-only dataset has the name of held-out documents."""
    if name := next((name for name in sets if name in held_out), ""):
        message = "this name is taken by the held-out documents of a training dataset; choose another name"
        raise ConfigError(f"evaluation.datasets.{name}", message)


def require_evaluated(evaluation: EvaluationConfig, names: Collection[str]) -> None:
    """Raise ConfigError if keep_best_on names neither an evaluation dataset nor a task with one of its metrics. names: of the
    evaluation datasets."""
    best = evaluation.keep_best_on
    name, _, metric = best.partition("/")
    if name in evaluation.tasks:
        measured = evaluation.tasks[name].measured
        if metric not in ("", *measured):
            message = f"{metric} is no metric of the task {name}, which has {', '.join(measured)}"
            raise ConfigError("evaluation.keep_best_on", message + did_you_mean(metric, measured))
        if evaluation.evaluates and not evaluation.interval_of(name):
            message = f"the task {name} is not used; set its interval_steps, or [evaluation] interval_steps"
            raise ConfigError("evaluation.keep_best_on", message)
    elif best and evaluation.evaluates and not evaluation.interval_steps:
        raise ConfigError("evaluation.keep_best_on", "is no task, and [evaluation] interval_steps = 0")
    elif evaluation.interval_steps and best and best not in names:
        known = [*names, *evaluation.tasks]
        available = f"available: {', '.join(known)}{did_you_mean(best, known)}"
        raise ConfigError("evaluation.keep_best_on", f"unknown evaluation dataset or task; {available}")


def all_dataset_configs(data: DataConfig, sets: Mapping[str, str]) -> Iterator[tuple[str, str, DataConfig]]:
    """Yield, for each dataset, a unique name, the setting that contains its path, and its configuration.

    sets: evaluation.datasets. In the configurations of these datasets, held_out_fraction is 0.
    """
    for name, config in dataset_configs(data).items():
        yield f"train/{name}", f"data.datasets.{name}" if data.datasets else "data.path", config
    for name, text in sets.items():
        setting = f"evaluation.datasets.{name}"
        yield f"evaluation/{name}", setting, replace(_dataset_config(data, text), held_out_fraction=0.0)


@contextmanager
def blame_setting(setting: str) -> Iterator[None]:
    """Context manager that attributes a ConfigError about data.path or data.dataset to the setting that contains the path."""
    try:
        yield
    except ConfigError as error:
        if error.key not in ("data.path", "data.dataset") or setting == "data.path":
            raise
        raise ConfigError(setting, error.message) from None


def _dataset_config(data: DataConfig, text: str) -> DataConfig:
    type_, path = split_dataset(text)
    return replace(data, dataset=type_, path=path, datasets={}, mixture=())


def prepare_datasets(
    data: DataConfig,
    sets: Mapping[str, str],
    tokenizer_config: TokenizerConfig,
    tokenizer: Tokenizer,
    seq_len: int,
    pairs: bool,
    evaluates: bool = True,
) -> str:
    """Build the missing stores and packings. Returns the folders of the stores as JSON (name -> folder), for open_datasets.

    Args:
        pairs: Whether the run trains on preference pairs.
        evaluates: Whether the run evaluates, so that held-out tokens are needed.
    """
    stores = {}
    for name, setting, config in all_dataset_configs(data, sets):
        with blame_setting(setting):
            folder = prepare(config, tokenizer_config, tokenizer)
            pack_splits(config, folder, seq_len, pairs, evaluates)
        stores[name] = str(folder)
    describe_template(data, sets, tokenizer, stores)
    return json.dumps(stores)


def describe_template(
    data: DataConfig, sets: Mapping[str, str], tokenizer: Tokenizer, stores: Mapping[str, str | Path]
) -> None:
    """Log what a user should know about the chat template, if it has rendered documents. Raises ConfigError.

    Args:
        data: Settings of the training data.
        sets: evaluation.datasets.
        tokenizer: That of the run.
        stores: Name of a dataset -> folder of its store.
    """
    configs = all_dataset_configs(data, sets)
    chats = [
        (setting, config)
        for name, setting, config in configs
        if config.dataset in CHAT_DATASETS and renders_chats(Path(stores[name]))
    ]
    for setting, config in chats[:1]:  # all datasets have the same template
        name = f"chat template {data.chat_template}"
        with blame_setting(setting):
            chat = chat_format(config, tokenizer)
            if chat.has_generation_tags:
                console.info(f"{name}: its {{% generation %}} tags have no effect; each answer is a target as a whole")
            if chat.rewrites_turns:
                console.warning(
                    f"{name}: in longer conversations, it writes an earlier answer, or the text before it, otherwise than at "
                    "inference, when this answer is the last one"
                )


def pack_splits(config: DataConfig, store: Path, seq_len: int, pairs: bool, evaluates: bool = True) -> None:
    """Build the missing packings of a store. If data.packing = "wrapped", there are none. Raises ConfigError unless the store has
    preference pairs if and only if `pairs` is true. evaluates: see prepare_datasets."""
    if pairs != (read_description(store)["dataset"] == "preference"):
        message = f"{store} {'does not consist' if pairs else 'consists'} of preference pairs; see [preference] loss"
        raise ConfigError("data.path", message)
    if config.packing != "wrapped":
        with writing(Path(config.store_folder)):
            splits = open_splits(store, config, evaluates)
            for split, tokens in splits.items():
                folder = packing_folder(store, split + splits.suffix, config, seq_len)
                if not folder.exists():
                    with file_lock(folder.with_name(f"{folder.name}.lock")):
                        pack(tokens, folder, seq_len, config, pairs)


def packing_folder(store: Path, split: str, data: DataConfig, seq_len: int) -> Path:
    name = f"{store_digest(store)}-{split}-{seq_len}-{data.packing}-{data.long_documents}"
    return Path(data.store_folder) / "packings" / name

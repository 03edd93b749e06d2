"""Opening of the datasets of a configuration as samples."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trainer.base.config import ConfigError, DataConfig
from trainer.base.system import console
from trainer.data.datasets import (
    SINGLE,
    dataset_configs,
    held_out_names,
    mixture_phases,
    packing_folder,
    require_new_names,
)
from trainer.data.prepare.prepare import renders_chats
from trainer.data.sampling.mixture import CombinedSamples
from trainer.data.sampling.packing import PackedIndex, has_target, read_packing
from trainer.data.sampling.phases import MixturePhase
from trainer.data.sampling.samples import PackedSamples, Samples, WrappedSamples
from trainer.data.store.held_out import Splits, open_splits
from trainer.data.store.store import TokenStore, open_store, splits_digest

_CONVERSATIONS = re.compile(r"\b(?:chat|preference)-[0-9a-f]{16}\b")
"""Pattern of the name of a store of conversations."""


@dataclass(frozen=True)
class Datasets:
    training: Samples
    sizes: tuple[int, ...]
    """Number of samples of each training dataset."""
    phases: tuple[MixturePhase, ...]
    evaluation: dict[str, Samples]
    """Name -> samples. They come from a training dataset's held-out documents or from an evaluation-only dataset."""
    name: str
    """Name of the training data. The name changes when the content of the data changes."""
    renders_chats: bool
    """Whether a chat template has rendered some of the documents."""
    evaluation_names: dict[str, str]
    """Evaluation-only dataset -> name of its store. The store's name changes when the content of the dataset changes."""


def open_datasets(
    data: DataConfig, sets: Mapping[str, str], stores: str, seq_len: int, evaluates: bool = True
) -> Datasets:
    """Open the stores and packings of a configuration. Raises ConfigError if a training dataset does not fill one sample.

    Args:
        stores: The result of prepare_datasets.
        evaluates: The argument of prepare_datasets.
    """
    folders = {name: Path(folder) for name, folder in json.loads(stores).items()}
    configs = dataset_configs(data)
    single = list(configs) == [SINGLE]
    phases, held_out_name = mixture_phases(data), held_out_names(data)
    splits = {name: open_splits(folders[f"train/{name}"], config, evaluates) for name, config in configs.items()}
    training: dict[str, Samples] = {}
    evaluation: dict[str, Samples] = {}
    for i, (name, config) in enumerate(configs.items()):
        folder, split = folders[f"train/{name}"], splits[name]
        if split.note:
            console.info(split.note if single else f"{name}: {split.note}")
        training[name] = _samples(folder, "train", split, data, seq_len)
        if not len(training[name]) and any(phase.quotas[i] for phase in phases):
            raise _no_sample_error(name, len(split.train.tokens), data, seq_len)
        if split.held_out is not None:
            held_out = _samples(folder, "held_out", split, data, seq_len, is_evaluation=True)
            if len(held_out) or config.dataset != "prepared":  # a prepared store may have no held-out documents
                evaluation[held_out_name[name]] = held_out
    require_new_names(sets, evaluation)
    for name in sets:
        folder = folders[f"evaluation/{name}"]
        complete = Splits(open_store(folder, "train"), None)
        evaluation[name] = _samples(folder, "train", complete, data, seq_len, is_evaluation=True)
    samples = list(training.values())
    names = {name: folders[f"train/{name}"].name + split.suffix for name, split in splits.items()}
    return Datasets(
        training=samples[0] if len(samples) == 1 else CombinedSamples(samples),
        sizes=tuple(map(len, samples)),
        phases=phases,
        evaluation=evaluation,
        name=names[SINGLE] if single else ", ".join(f"{name} {store}" for name, store in names.items()),
        renders_chats=any(map(renders_chats, folders.values())),
        evaluation_names={name: folders[f"evaluation/{name}"].name for name in sets},
    )


def with_earlier_names(datasets: Datasets, earlier: str, stores: Path) -> Datasets:
    """Return datasets whose stores of conversations have the names of earlier ones with the same tokens and targets. The text of
    the chat template is part of a store's name, but a change of it need not change the tokens.

    Args:
        datasets: The datasets.
        earlier: A text with the names of earlier stores. A store that is no longer there counts as another one.
        stores: Folder of the stores.
    """
    names = _CONVERSATIONS.findall(earlier)

    def earlier_name(match: re.Match[str]) -> str:
        name = match[0]
        content = "" if name in names else splits_digest(stores / name)
        return next((other for other in names if content and splits_digest(stores / other) == content), name)

    return replace(
        datasets,
        name=_CONVERSATIONS.sub(earlier_name, datasets.name),
        evaluation_names={
            dataset: _CONVERSATIONS.sub(earlier_name, name) for dataset, name in datasets.evaluation_names.items()
        },
    )


def _no_sample_error(name: str, num_tokens: int, data: DataConfig, seq_len: int) -> ConfigError:
    documents = "the training documents" if name == SINGLE else f"the training documents of {name}"
    if data.packing != "wrapped" and data.long_documents == "drop" and num_tokens:
        message = f'"drop" removes all of {documents}, because each has more than seq_len {seq_len} tokens or no target'
        return ConfigError("data.long_documents", message)
    return ConfigError("training.seq_len", f"{documents} have {num_tokens} tokens, which do not fill one sample")


def _samples(
    folder: Path, split: str, splits: Splits, data: DataConfig, seq_len: int, is_evaluation: bool = False
) -> WrappedSamples | PackedSamples:
    """Return the samples of one split of a store. An evaluation dataset with less than one sample is padded to one."""
    store = splits.train if split == "train" else splits.held_out
    if data.packing != "wrapped":
        index = read_packing(packing_folder(folder, split + splits.suffix, data, seq_len))
        return PackedSamples(store, seq_len, index, reset_positions=data.document_mask)
    samples = WrappedSamples(store, seq_len, reset_positions=data.document_mask)
    if is_evaluation and not len(samples) and (index := _one_sample(store, data)) is not None:
        return PackedSamples(store, seq_len, index, reset_positions=data.document_mask)
    return samples


def _one_sample(store: TokenStore, data: DataConfig) -> PackedIndex | None:
    """Return the packing of all tokens of a store in one sample, or None if the sample would have no target."""
    bounds = store.documents[:] if data.document_mask else np.array([0, len(store.tokens)])
    lengths = np.diff(bounds) - 1  # the last token is only a label
    starts, lengths = bounds[:-1][lengths > 0], lengths[lengths > 0]
    if not len(starts) or not has_target(store, starts, lengths).any():
        return None
    return PackedIndex("", starts, lengths, np.array([0, len(starts)]))

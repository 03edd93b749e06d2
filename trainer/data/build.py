"""Opening of the datasets of a configuration as samples."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.config import ConfigError, DataConfig
from trainer.data.datasets import SINGLE, dataset_configs, packing_folder, splits
from trainer.data.sampling.mixture import CombinedSamples
from trainer.data.sampling.packing import read_packing
from trainer.data.sampling.phases import MixturePhase, parse_mixture
from trainer.data.sampling.samples import ConcatSamples, PackedSamples, Samples
from trainer.data.store.store import open_store


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
    evaluation_names: dict[str, str]
    """Evaluation-only dataset -> name of its store. The store's name changes when the content of the dataset changes."""


def open_datasets(data: DataConfig, sets: Mapping[str, str], stores: str, seq_len: int) -> Datasets:
    """Open the stores and packings of a configuration. stores: the result of prepare_datasets. Raises ConfigError if a training
    dataset does not fill one sample."""
    folders = {name: Path(folder) for name, folder in json.loads(stores).items()}
    configs = dataset_configs(data)
    single = list(configs) == [SINGLE]
    phases = parse_mixture(data.mixture, list(configs))
    training = {name: _open_split(folders[f"train/{name}"], "train", data, seq_len) for name in configs}
    for i, (name, dataset) in enumerate(training.items()):
        if not len(dataset) and any(phase.quotas[i] for phase in phases):
            raise _no_sample_error(name, len(dataset.store.tokens), data, seq_len)
    evaluation: dict[str, Samples] = {}
    for name, config in configs.items():
        if "held_out" in splits(config):
            held_out = _open_split(folders[f"train/{name}"], "held_out", data, seq_len)
            if len(held_out) or config.dataset != "prepared":  # a prepared store may have no held-out documents
                evaluation["held_out" if single else name] = held_out
    for name in sets:
        if name in evaluation:
            raise ConfigError(
                f"evaluation.datasets.{name}",
                "this name is taken by the held-out documents of a training dataset; choose another name",
            )
        evaluation[name] = _open_split(folders[f"evaluation/{name}"], "train", data, seq_len)
    samples = list(training.values())
    names = {name: folders[f"train/{name}"].name for name in configs}
    return Datasets(
        training=samples[0] if len(samples) == 1 else CombinedSamples(samples),
        sizes=tuple(map(len, samples)),
        phases=phases,
        evaluation=evaluation,
        name=names[SINGLE] if single else ", ".join(f"{name} {store}" for name, store in names.items()),
        evaluation_names={name: folders[f"evaluation/{name}"].name for name in sets},
    )


def _no_sample_error(name: str, num_tokens: int, data: DataConfig, seq_len: int) -> ConfigError:
    documents = "the training documents" if name == SINGLE else f"the training documents of {name}"
    if data.packing != "wrapped" and data.long_documents == "drop" and num_tokens:
        message = f'"drop" removes all of {documents}, because each has more than seq_len {seq_len} tokens or no target'
        return ConfigError("data.long_documents", message)
    return ConfigError("training.seq_len", f"{documents} have {num_tokens} tokens, which do not fill one sample")


def _open_split(folder: Path, split: str, data: DataConfig, seq_len: int) -> ConcatSamples | PackedSamples:
    store = open_store(folder, split)
    if data.packing == "wrapped":
        return ConcatSamples(store, seq_len, reset_positions=data.document_mask)
    index = read_packing(packing_folder(folder, split, data, seq_len))
    return PackedSamples(store, seq_len, index, reset_positions=data.document_mask)

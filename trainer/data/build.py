"""The datasets of a configuration: their configs, their token stores and packings, and their samples."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config import ConfigError, DataConfig, TokenizerConfig
from trainer.config.fields import did_you_mean
from trainer.data.prepare.prepare import prepare, writing
from trainer.data.sampling.mixture import CombinedSamples, MixturePhase, parse_mixture
from trainer.data.sampling.packing import pack, read_packing
from trainer.data.sampling.samples import ConcatSamples, PackedSamples, Samples
from trainer.data.sources import DATASETS
from trainer.data.store.store import open_store, store_digest
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.system.files import file_lock

SINGLE = "data"
"""Name of the only dataset of a configuration that does not set [data] datasets."""
FORMATS = (*DATASETS, "prepared")


def dataset_configs(data: DataConfig) -> dict[str, DataConfig]:
    """Return, for each training dataset, a configuration with only this dataset. Raises ConfigError."""
    if not data.datasets:
        return {SINGLE: data}
    return {name: _dataset_config(data, f"data.datasets.{name}", text) for name, text in data.datasets.items()}


def eval_dataset_configs(data: DataConfig, sets: Mapping[str, str]) -> dict[str, DataConfig]:
    """Return the configurations of the evaluation-only datasets, whose documents are all evaluated."""
    configs = {name: _dataset_config(data, f"evaluation.datasets.{name}", text) for name, text in sets.items()}
    return {name: replace(config, held_out_fraction=0.0) for name, config in configs.items()}


def all_dataset_configs(data: DataConfig, sets: Mapping[str, str]) -> Iterator[tuple[str, str, DataConfig]]:
    """Yield a unique name, the setting that names the path, and the configuration of each dataset. Raises ConfigError."""
    for name, config in dataset_configs(data).items():
        yield f"train/{name}", f"data.datasets.{name}" if data.datasets else "data.path", config
    for name, config in eval_dataset_configs(data, sets).items():
        yield f"evaluation/{name}", f"evaluation.datasets.{name}", config


@contextmanager
def blame_setting(setting: str) -> Iterator[None]:
    """Context that attributes a ConfigError about data.path to the setting that contains the path."""
    try:
        yield
    except ConfigError as error:
        if error.key != "data.path":
            raise
        raise ConfigError(setting, error.message) from None


def _dataset_config(data: DataConfig, key: str, text: str) -> DataConfig:
    dataset, _, path = text.partition(":")
    if dataset not in FORMATS:
        formats = ", ".join(FORMATS)
        raise ConfigError(key, f"expected FORMAT:PATH with FORMAT one of {formats}{did_you_mean(dataset, FORMATS)}")
    if bool(path) == (dataset == "python_stdlib") and dataset != "chat":
        raise ConfigError(key, "python_stdlib does not take a path" if path else f"expected a path after {dataset}:")
    return replace(data, dataset=dataset, path=path, datasets={}, mixture=())


def prepare_datasets(
    data: DataConfig, sets: Mapping[str, str], tokenizer_config: TokenizerConfig, tokenizer: Tokenizer, seq_len: int
) -> str:
    """Build the missing stores and packings. Returns the folders of the stores as JSON (name -> folder), for open_datasets."""
    stores = {}
    for name, setting, config in all_dataset_configs(data, sets):
        with blame_setting(setting):
            folder = prepare(config, tokenizer_config, tokenizer)
            pack_splits(config, folder, seq_len)
        stores[name] = str(folder)
    return json.dumps(stores)


def pack_splits(config: DataConfig, store: Path, seq_len: int) -> None:
    """Build the packings of a store that do not exist yet. With data.packing = wrapped, do nothing."""
    if config.packing != "wrapped":
        with writing(Path(config.store_folder)):
            for split in splits(config):
                folder = packing_folder(store, split, config, seq_len)
                if not folder.exists():
                    with file_lock(folder.with_name(f"{folder.name}.lock")):
                        pack(open_store(store, split), folder, seq_len, config)


def splits(config: DataConfig) -> tuple[str, ...]:
    return ("train", "held_out") if config.held_out_fraction or config.dataset == "prepared" else ("train",)


def packing_folder(store: Path, split: str, data: DataConfig, seq_len: int) -> Path:
    name = f"{store_digest(store)}-{split}-{seq_len}-{data.packing}-{data.long_documents}"
    return Path(data.store_folder) / "packings" / name


@dataclass(frozen=True)
class Datasets:
    training: Samples
    sizes: tuple[int, ...]
    """Number of samples of each training dataset."""
    phases: tuple[MixturePhase, ...]
    evaluation: dict[str, Samples]
    """Samples of the held-out documents of each training dataset, then of each evaluation-only dataset."""
    name: str
    """Name of the training data; it changes when the content of the data changes."""
    evaluation_names: dict[str, str]
    """Names of the evaluation-only datasets; a name changes when the content of its dataset changes."""


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
            raise ConfigError(f"evaluation.datasets.{name}", "names the held-out documents of a training dataset")
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
        message = f'"drop" removes all of {documents}: each has more than seq_len {seq_len} tokens or no target token'
        return ConfigError("data.long_documents", message)
    return ConfigError("training.seq_len", f"{documents} have {num_tokens} tokens, less than one sample")


def _open_split(folder: Path, split: str, data: DataConfig, seq_len: int) -> ConcatSamples | PackedSamples:
    store = open_store(folder, split)
    if data.packing == "wrapped":
        return ConcatSamples(store, seq_len, reset_positions=data.document_mask)
    index = read_packing(packing_folder(folder, split, data, seq_len))
    return PackedSamples(store, seq_len, index, reset_positions=data.document_mask)

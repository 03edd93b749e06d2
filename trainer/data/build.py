"""The datasets of a configuration, each by its name, and what is made of them once: token stores, and packings."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config import ConfigError, DataConfig, TokenizerConfig
from trainer.config.fields import did_you_mean
from trainer.data.prepare.prepare import prepare, writing
from trainer.data.sampling.mixture import CombinedSamples, MixturePhase, phases_of
from trainer.data.sampling.packing import pack, read_pieces
from trainer.data.sampling.samples import ConcatSamples, PackedSamples, Samples
from trainer.data.sources import DATASETS
from trainer.data.store.store import TokenStore, identity, open_store
from trainer.data.tokenizer.protocol import Tokenizer

SINGLE = "data"
"""Name of a dataset that is the only one."""
KINDS = (*DATASETS, "prepared")


def members(data: DataConfig) -> dict[str, DataConfig]:
    """Each dataset by its name, as if it were the only one. Raises ConfigError."""
    if not data.datasets:
        return {SINGLE: data}
    return {name: _member(data, f"data.datasets.{name}", text) for name, text in data.datasets.items()}


def eval_dataset_configs(data: DataConfig, sets: Mapping[str, str]) -> dict[str, DataConfig]:
    """The datasets that are for evaluation alone, all of their documents."""
    chosen = {name: _member(data, f"evaluation.datasets.{name}", text) for name, text in sets.items()}
    return {name: replace(member, held_out_fraction=0.0) for name, member in chosen.items()}


def all_dataset_configs(data: DataConfig, sets: Mapping[str, str]) -> Iterator[tuple[str, str, DataConfig]]:
    """Each dataset with its name among all and the setting that names it. Raises ConfigError."""
    for name, member in members(data).items():
        yield f"train/{name}", f"data.datasets.{name}" if data.datasets else "data.path", member
    for name, member in eval_dataset_configs(data, sets).items():
        yield f"evaluation/{name}", f"evaluation.datasets.{name}", member


@contextmanager
def blame_setting(setting: str) -> Iterator[None]:
    """What is wrong with the path of a dataset is wrong with the setting that names it."""
    try:
        yield
    except ConfigError as error:
        if error.key != "data.path":
            raise
        raise ConfigError(setting, error.rule) from None


def _member(data: DataConfig, key: str, text: str) -> DataConfig:
    kind, _, path = text.partition(":")
    if kind not in KINDS:
        raise ConfigError(key, f"expected KIND:PATH, KIND one of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    if bool(path) == (kind == "python_stdlib") and kind != "chat":
        raise ConfigError(key, "python_stdlib has no path" if path else f"expected a path behind {kind}:")
    return replace(data, dataset=kind, path=path, datasets={}, mixture=())


# ---------------------------------------------------------------- made once


def prepare_all(
    data: DataConfig, sets: Mapping[str, str], tokenizer_config: TokenizerConfig, tokenizer: Tokenizer, seq_len: int
) -> str:
    """Make every store and packing that is not there. Returns where they are, for `open_all`: JSON, name -> folder."""
    stores = {}
    for name, setting, member in all_dataset_configs(data, sets):
        with blame_setting(setting):
            folder = prepare(member, tokenizer_config, tokenizer)
            pack_splits(member, folder, seq_len)
        stores[name] = str(folder)
    return json.dumps(stores)


def pack_splits(member: DataConfig, store: Path, seq_len: int) -> None:
    """Make the packings of a dataset's store that are not there, where it is to be packed."""
    if member.packing != "wrapped":
        with writing(Path(member.store_folder)):
            for split in splits(member):
                pack(open_store(store, split), packing_folder(store, split, member, seq_len), seq_len, member)


def splits(member: DataConfig) -> tuple[str, ...]:
    return ("train", "held_out") if member.held_out_fraction or member.dataset == "prepared" else ("train",)


def packing_folder(store: Path, split: str, data: DataConfig, seq_len: int) -> Path:
    name = f"{identity(store)}-{split}-{seq_len}-{data.packing}-{data.long_documents}"
    return Path(data.store_folder) / "packings" / name


# ---------------------------------------------------------------- opened


@dataclass(frozen=True)
class Datasets:
    training: Samples
    sizes: tuple[int, ...]
    """Samples of each dataset in it."""
    stages: tuple[MixturePhase, ...]
    held_out: dict[str, Samples]
    """By name; those of the training datasets, then those for evaluation alone."""
    name: str
    """Changes with any content of the training datasets."""
    held_out_names: dict[str, str]
    """Of each dataset for evaluation alone; the same."""


def open_all(data: DataConfig, sets: Mapping[str, str], stores: str, seq_len: int) -> Datasets:
    """stores: as prepare_all gave it. Raises ConfigError where a dataset has less than one sample."""
    folders = {name: Path(folder) for name, folder in json.loads(stores).items()}

    def opened(name: str, split: str) -> Samples:
        return _open(folders[name], split, data, seq_len)

    chosen = members(data)
    stages = phases_of(data.mixture, list(chosen))
    training = {name: opened(f"train/{name}", "train") for name in chosen}
    for number, (name, samples) in enumerate(training.items()):
        if not len(samples) and any(stage.quotas[number] for stage in stages):
            tokens = len(samples.store.tokens)
            of = "" if name == SINGLE else f" of {name}"
            if data.packing != "wrapped" and data.long_documents == "drop" and tokens:
                rule = (
                    f"drop leaves no training document{of}: all have more than seq_len {seq_len} tokens, or no target"
                )
                raise ConfigError("data.long_documents", rule)
            raise ConfigError(
                "training.seq_len", f"the training documents{of} have {tokens} tokens, less than one sample"
            )
    held_out = {name: opened(f"train/{name}", "held_out") for name in chosen if "held_out" in splits(chosen[name])}
    # Stores that were prepared before may hold nothing out.
    held_out = {
        name: samples for name, samples in held_out.items() if chosen[name].dataset != "prepared" or len(samples)
    }
    if list(chosen) == [SINGLE] and held_out:
        held_out = {"held_out": held_out[SINGLE]}
    for name in sets:
        if name in held_out:
            raise ConfigError(f"evaluation.datasets.{name}", "is the name of what a training dataset holds out")
        held_out[name] = opened(f"evaluation/{name}", "train")
    parts = list(training.values())
    names = [folders[f"train/{name}"].name for name in chosen]
    return Datasets(
        training=parts[0] if len(parts) == 1 else CombinedSamples(parts),
        sizes=tuple(map(len, parts)),
        stages=stages,
        held_out=held_out,
        held_out_names={name: folders[f"evaluation/{name}"].name for name in sets},
        name=names[0]
        if list(chosen) == [SINGLE]
        else ", ".join(f"{n} {s}" for n, s in zip(chosen, names, strict=True)),
    )


def _open(folder: Path, split: str, data: DataConfig, seq_len: int) -> ConcatSamples | PackedSamples:
    store: TokenStore = open_store(folder, split)
    if data.packing == "wrapped":
        return ConcatSamples(store, seq_len, restart=data.document_mask)
    pieces = read_pieces(packing_folder(folder, split, data, seq_len))
    return PackedSamples(store, seq_len, pieces, restart=data.document_mask)

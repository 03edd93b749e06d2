"""The datasets of a configuration, each by its name, and what is made of them once: token stores, and packings."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trainer.config import ConfigError, DataConfig, TokenizerConfig
from trainer.data.packing import pack
from trainer.data.prepare import prepare, writing
from trainer.data.sources import DATASETS
from trainer.data.store import identity, open_store
from trainer.data.tokenizer import Tokenizer
from trainer.settings import nearest_name

ALONE = "data"
"""Name of a dataset that is the only one."""
KINDS = (*DATASETS, "stores")


def members(data: DataConfig) -> dict[str, DataConfig]:
    """Each dataset by its name, as if it were the only one. Raises ConfigError."""
    if not data.datasets:
        return {ALONE: data}
    return {name: _member(data, f"data.datasets.{name}", text) for name, text in data.datasets.items()}


def held_out_members(data: DataConfig, sets: Mapping[str, str]) -> dict[str, DataConfig]:
    """The datasets that are for evaluation alone, all of their documents."""
    chosen = {name: _member(data, f"evaluation.sets.{name}", text) for name, text in sets.items()}
    return {name: replace(member, held_out_fraction=0.0) for name, member in chosen.items()}


def all_members(data: DataConfig, sets: Mapping[str, str]) -> Iterator[tuple[str, str, DataConfig]]:
    """Each dataset with its name among all and the setting that names it. Raises ConfigError."""
    for name, member in members(data).items():
        yield f"train/{name}", f"data.datasets.{name}" if data.datasets else "data.path", member
    for name, member in held_out_members(data, sets).items():
        yield f"evaluation/{name}", f"evaluation.sets.{name}", member


@contextmanager
def named_by(setting: str) -> Iterator[None]:
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
        raise ConfigError(key, f"expected KIND:PATH, KIND one of {', '.join(KINDS)}{nearest_name(kind, KINDS)}")
    if bool(path) == (kind == "python_stdlib") and kind != "chat":
        raise ConfigError(key, "python_stdlib has no path" if path else f"expected a path behind {kind}:")
    return replace(data, dataset=kind, path=path, datasets={}, mixture=())


# ---------------------------------------------------------------- made once


def prepare_all(
    data: DataConfig, sets: Mapping[str, str], tokenizer_config: TokenizerConfig, tokenizer: Tokenizer, seq_len: int
) -> str:
    """Make every store and packing that is not there. Returns where they are, for `open_all`: JSON, name -> folder."""
    stores = {}
    for name, setting, member in all_members(data, sets):
        with named_by(setting):
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
    return ("train", "held_out") if member.held_out_fraction or member.dataset == "stores" else ("train",)


def packing_folder(store: Path, split: str, data: DataConfig, seq_len: int) -> Path:
    name = f"{identity(store)}-{split}-{seq_len}-{data.packing}-{data.long_documents}"
    return Path(data.store_folder) / "packings" / name

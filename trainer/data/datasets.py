"""The datasets of a configuration as every rank opens them, packed and mixed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.config import ConfigError, DataConfig
from trainer.data.members import ALONE, members, packing_folder, splits
from trainer.data.mixture import CombinedSamples, Stage, stages_of
from trainer.data.packing import read_pieces
from trainer.data.samples import PackedSamples, Samples, WrappedSamples
from trainer.data.store import TokenStore, open_store


@dataclass(frozen=True)
class Datasets:
    training: Samples
    sizes: tuple[int, ...]
    """Samples of each dataset in it."""
    stages: tuple[Stage, ...]
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
    stages = stages_of(data.mixture, list(chosen))
    training = {name: opened(f"train/{name}", "train") for name in chosen}
    for number, (name, samples) in enumerate(training.items()):
        if not len(samples) and any(stage.quotas[number] for stage in stages):
            tokens = len(samples.store.tokens)
            of = "" if name == ALONE else f" of {name}"
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
    held_out = {name: samples for name, samples in held_out.items() if chosen[name].dataset != "stores" or len(samples)}
    if list(chosen) == [ALONE] and held_out:
        held_out = {"held_out": held_out[ALONE]}
    for name in sets:
        if name in held_out:
            raise ConfigError(f"evaluation.sets.{name}", "is the name of what a training dataset holds out")
        held_out[name] = opened(f"evaluation/{name}", "train")
    parts = list(training.values())
    names = [folders[f"train/{name}"].name for name in chosen]
    return Datasets(
        training=parts[0] if len(parts) == 1 else CombinedSamples(parts),
        sizes=tuple(map(len, parts)),
        stages=stages,
        held_out=held_out,
        held_out_names={name: folders[f"evaluation/{name}"].name for name in sets},
        name=names[0] if list(chosen) == [ALONE] else ", ".join(f"{n} {s}" for n, s in zip(chosen, names, strict=True)),
    )


def _open(folder: Path, split: str, data: DataConfig, seq_len: int) -> WrappedSamples | PackedSamples:
    store: TokenStore = open_store(folder, split)
    if data.packing == "wrapped":
        return WrappedSamples(store, seq_len, restart=data.document_mask)
    pieces = read_pieces(packing_folder(folder, split, data, seq_len))
    return PackedSamples(store, seq_len, pieces, restart=data.document_mask)

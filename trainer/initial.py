"""Where a new run takes its weights from: a checkpoint of ours, or a model in Hugging Face's format. The optimizer is fresh."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from models.spec import ModelSpec
from trainer import checkpoint, lineage, logging, manifest
from trainer.checkpoint import Tensors
from trainer.config import CheckpointConfig, ConfigError
from trainer.huggingface import Folder, FolderReader, Model
from trainer.manifest import Damaged
from trainer.settings import nearest_name
from trainer.shards import ShardReader, read_index

_KEY = "checkpoint.initial"


def load_initial(
    config: CheckpointConfig, spec: ModelSpec, sizes: Any, parameters: Tensors, names: Sequence[str]
) -> None:
    """Fill the parameters of this rank, on all ranks together; each reads its shards alone. names: of the whole network.
    Raises ConfigError for what is damaged or does not fit."""
    folder = Path(config.initial)
    excluded = _excluded(config.exclude, names)
    wanted: dict[str, Tensor] = {f"model/{name}": p for name, p in parameters.items() if name not in excluded}
    if (folder / manifest.NAME).exists():
        if problem := lineage.verify(folder):
            raise ConfigError(_KEY, problem)
        try:
            _require_same(Model.read(folder).sizes, sizes)
            index = read_index(folder)
        except Damaged as damage:
            raise ConfigError(_KEY, str(damage)) from None
        reader = ShardReader(folder, index)
    elif (folder / "config.json").exists():
        source = Folder(folder, spec)
        _require_same(asdict(source.sizes), sizes)
        there = [name.removeprefix("model/") for name in wanted]
        index = {f"model/{name}": stored for name, stored in source.index(there).items()}
        reader = FolderReader(source, index, prefix="model/")
    else:
        raise ConfigError(_KEY, "is neither a checkpoint (manifest.json) nor a model of Hugging Face's (config.json)")
    checkpoint.fill(folder, reader, index, wanted, cast=True)
    kept = f", without {', '.join(sorted(excluded)[:4])}{' ...' * (len(excluded) > 4)}" if excluded else ""
    logging.info(f"weights of {folder}{kept}")
    dist.barrier()


def _excluded(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    excluded = set()
    for pattern in patterns:
        found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            raise ConfigError("checkpoint.exclude", f"{pattern} is no parameter{nearest_name(pattern, names)}")
        excluded |= found
    return excluded


def _require_same(there: Mapping[str, Any], sizes: Any) -> None:
    here = asdict(sizes)
    names = [name for name in here if there.get(name) != here[name]]
    if names:
        differences = ", ".join(f"{name} is {there.get(name)} there, {here[name]} here" for name in names)
        raise ConfigError(_KEY, f"is another network: {differences}")

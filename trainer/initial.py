"""Where a new run takes its weights from: a checkpoint of ours, or a model in Hugging Face's format. The optimizer is fresh."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch.distributed as dist

from models import MODELS
from models.spec import ModelSpec
from trainer import checkpoint, lineage, logging, manifest
from trainer.checkpoint import Tensors
from trainer.config import CheckpointConfig, ConfigError
from trainer.huggingface import Folder, FolderReader, Model
from trainer.manifest import Damaged
from trainer.settings import nearest_name
from trainer.shards import ShardReader, read_index

_KEY = "checkpoint.initial"


class Weights:
    """The parameters that a folder holds, whoever wrote it."""

    def __init__(self, folder: Path, spec: ModelSpec | None = None):
        """On all ranks together. spec: of the network that they are wanted for; None: whatever it is. Raises ConfigError for what
        is damaged, or no model."""
        self.folder = folder
        self.theirs: Folder | None = None
        if (folder / manifest.NAME).exists():
            try:
                if problem := lineage.verify(folder):
                    raise Damaged(problem)
                self.spec, self.sizes = Model.read(folder).network()
                self.index = read_index(folder)
            except Damaged as damage:
                raise ConfigError("", f"{folder}: {damage}") from None
        elif (folder / "config.json").exists():
            self.theirs = Folder(folder, spec or next(iter(MODELS.values())))
            self.spec, self.sizes = self.theirs.spec, self.theirs.sizes
        else:
            rule = "is neither a checkpoint (manifest.json) nor a model of Hugging Face's (config.json)"
            raise ConfigError("", f"{folder}: {rule}")

    def fill(self, parameters: Tensors) -> None:
        """On all ranks together; each reads its shards alone. Raises ConfigError for what does not fit."""
        wanted = {f"model/{name}": parameter for name, parameter in parameters.items()}
        if self.theirs is None:
            checkpoint.fill(self.folder, ShardReader(self.folder, self.index), self.index, wanted, cast=True)
        else:
            index = {f"model/{name}": stored for name, stored in self.theirs.index(parameters).items()}
            reader = FolderReader(self.theirs, index, prefix="model/")
            checkpoint.fill(self.folder, reader, index, wanted, cast=True)


def newest(folder: Path) -> Path:
    """The newest checkpoint, where the folder is that of a run; else the folder. Raises ConfigError where it is none."""
    if not folder.is_dir():
        raise ConfigError("", f"{folder}: no such folder")
    steps = checkpoint.steps_in(folder / "checkpoints") if (folder / "checkpoints").is_dir() else []
    return steps[0] if steps else folder


def load_initial(
    config: CheckpointConfig, spec: ModelSpec, sizes: Any, parameters: Tensors, names: Sequence[str]
) -> None:
    """Fill the parameters of this rank, on all ranks together. names: of the whole network. Raises ConfigError for what is
    damaged or does not fit."""
    excluded = _excluded(config.exclude, names)
    try:
        weights = Weights(newest(Path(config.initial)), spec)
        _require_same(asdict(weights.sizes), asdict(sizes))
        weights.fill({name: p for name, p in parameters.items() if name not in excluded})
    except ConfigError as error:
        raise ConfigError(_KEY, error.rule) from None
    kept = f", without {', '.join(sorted(excluded)[:4])}{' ...' * (len(excluded) > 4)}" if excluded else ""
    logging.info(f"weights of {weights.folder}{kept}")
    dist.barrier()


def _excluded(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    excluded = set()
    for pattern in patterns:
        found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            raise ConfigError("checkpoint.exclude", f"{pattern} is no parameter{nearest_name(pattern, names)}")
        excluded |= found
    return excluded


def _require_same(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    names = [name for name in here if there.get(name) != here[name]]
    if names:
        differences = ", ".join(f"{name} is {there.get(name)} there, {here[name]} here" for name in names)
        raise ConfigError("", f"is another network: {differences}")

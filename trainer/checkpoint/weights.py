"""Where a new run takes its weights from: a checkpoint of ours, or a model in Hugging Face's format. The optimizer is fresh."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models import MODELS
from models.spec import ModelSpec
from trainer.checkpoint import commit, manifest, resume
from trainer.checkpoint.commit import Tensors
from trainer.checkpoint.huggingface import HfModelFolder, HfReader, ModelMetadata
from trainer.checkpoint.manifest import CorruptError
from trainer.checkpoint.storage import ShardReader, TensorMetadata, read_index, read_rows
from trainer.config import CheckpointConfig, ConfigError
from trainer.config.fields import did_you_mean
from trainer.runtime.distributed import run_on_rank_0
from trainer.runtime.dtensor import local_region
from trainer.system import logging
from trainer.system.files import folder_error

_KEY = "checkpoint.init_from"
_ROWS = 4096
"""Read together."""


class WeightSource:
    """The parameters that a folder holds, whoever wrote it."""

    def __init__(self, folder: Path, spec: ModelSpec | None = None):
        """On all ranks together. spec: of the network that they are wanted for; None: whatever it is. Raises ConfigError for what
        is damaged, or no model."""
        self.folder = folder
        self.hf_folder: HfModelFolder | None = None
        if (folder / manifest.NAME).exists():
            try:
                if problem := resume.verify(folder):
                    raise CorruptError(problem)
                self.spec, self.sizes = ModelMetadata.read(folder).spec_and_sizes()
                self.index = read_index(folder)
            except CorruptError as damage:
                raise ConfigError("", f"{folder}: {damage}") from None
        elif (folder / "config.json").exists():
            self.hf_folder = HfModelFolder(folder, spec or next(iter(MODELS.values())))
            self.spec, self.sizes = self.hf_folder.spec, self.hf_folder.sizes
        else:
            rule = "is neither a checkpoint (manifest.json) nor a model of Hugging Face's (config.json)"
            raise ConfigError("", f"{folder}: {rule}")

    def load_into(self, parameters: Tensors, grow: bool = False) -> None:
        """On all ranks together; each reads its shards alone. grow: rows of the vocabulary that are not there get the mean of
        those that are (Hewitt 2021, "Initializing New Word Embeddings"). Raises ConfigError for what does not fit."""
        if self.hf_folder is None:
            index = self.index
            reader = ShardReader(self.folder, index)
        else:
            index = {f"model/{name}": stored for name, stored in self.hf_folder.index(parameters).items()}
            reader = HfReader(self.hf_folder, index, prefix="model/")
        wanted = {f"model/{name}": parameter for name, parameter in parameters.items()}
        for name in [name for name in wanted if grow and self._is_smaller(index.get(name), wanted[name])]:
            try:
                self._load_rows(name.removeprefix("model/"), index[name], wanted.pop(name))
            except CorruptError as damage:
                raise ConfigError("", f"{self.folder}: {damage}") from None
        commit.load_into(self.folder, reader, index, wanted, cast=True)

    def _is_smaller(self, stored: TensorMetadata | None, parameter: Tensor) -> bool:
        there, here = stored.shape if stored else (), tuple(parameter.shape)
        return there[:1] == (self.sizes.vocab_size,) and there[1:] == here[1:] and there[0] < here[0]

    @torch.no_grad()
    def _load_rows(self, name: str, stored: TensorMetadata, parameter: Tensor) -> None:
        """Of a parameter that has more rows than there are, those of this rank."""
        local, _, offset = local_region(parameter)
        columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:], strict=True))
        sums, there = torch.zeros(stored.shape[1:], dtype=torch.float64), stored.shape[0]
        for start in range(0, there, _ROWS):
            stop = min(start + _ROWS, there)
            rows = self._rows(name, stored, start, stop)
            sums += rows.double().sum(0)
            first, last = max(start, offset[0]), min(stop, offset[0] + local.shape[0])
            if first < last:
                local[first - offset[0] : last - offset[0]].copy_(rows[(slice(first - start, last - start), *columns)])
        local[max(0, there - offset[0]) :].copy_((sums / there)[columns].to(local.dtype))

    def _rows(self, name: str, stored: TensorMetadata, start: int, stop: int) -> Tensor:
        if self.hf_folder is not None:
            return self.hf_folder.rows(name, start, stop)
        return read_rows(self.folder, f"model/{name}", stored, start, stop)


def resolve_checkpoint(folder: Path) -> Path:
    """The newest checkpoint, where the folder is that of a run; else the folder. Raises ConfigError where it is none."""
    if problem := folder_error(folder):
        raise ConfigError("", f"{folder}: {problem}")
    steps = resume.list_checkpoints(folder / "checkpoints")
    return steps[0] if steps else folder


def names_loaded(config: CheckpointConfig, names: Sequence[str]) -> set[str]:
    """Those of the network's parameters that a new run does not draw. Raises ConfigError."""
    return set(names) - _excluded(config.init_exclude, names) if config.init_from else set()


def init_weights_from(
    config: CheckpointConfig, spec: ModelSpec, sizes: Any, parameters: Tensors, names: Sequence[str]
) -> None:
    """Fill the parameters of this rank, on all ranks together. names: of the whole network. Raises ConfigError for what is
    damaged or does not fit."""
    excluded = _excluded(config.init_exclude, names)
    try:
        # Looked for once: a run that still trains may have a newer one a moment later.
        weights = WeightSource(run_on_rank_0(lambda: resolve_checkpoint(Path(config.init_from))), spec)
        there = asdict(weights.sizes)
        if config.resize_embeddings and there.get("vocab_size", 0) < sizes.vocab_size:
            there["vocab_size"] = sizes.vocab_size
        _require_same(there, asdict(sizes))
        chosen = {name: p for name, p in parameters.items() if name not in excluded}
        weights.load_into(chosen, grow=config.resize_embeddings)
    except ConfigError as error:
        raise ConfigError(_KEY, error.message) from None
    kept = f", without {', '.join(sorted(excluded)[:4])}{' ...' * (len(excluded) > 4)}" if excluded else ""
    logging.info(f"weights of {weights.folder}{kept}")
    dist.barrier()


def _excluded(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    excluded = set()
    for pattern in patterns:
        found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            raise ConfigError("checkpoint.init_exclude", f"{pattern} is no parameter{did_you_mean(pattern, names)}")
        excluded |= found
    return excluded


def _require_same(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    names = [name for name in here if there.get(name) != here[name]]
    if names:
        differences = ", ".join(f"{name} is {there.get(name)} there, {here[name]} here" for name in names)
        raise ConfigError("", f"is another network: {differences}")

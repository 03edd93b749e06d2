"""Loading of a new run's weights from a checkpoint or from a model in Hugging Face format."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.spec import ModelSpec
from trainer.adapters.nf4 import QuantizedWeight
from trainer.base.config import CheckpointConfig, ConfigError, errors_about
from trainer.base.config.fields import matching
from trainer.base.config.model_source import not_a_model, resolve_checkpoint
from trainer.base.system.checkpoint_folder import is_checkpoint
from trainer.base.system.files import digest, digest_of
from trainer.base.system.model_folder import unread_weights
from trainer.checkpoint import commit, manifest, resume
from trainer.checkpoint.commit import Tensors, require_match
from trainer.checkpoint.formats.huggingface import HfModelFolder
from trainer.checkpoint.formats.model_metadata import ModelMetadata, averaged_index, model_index
from trainer.checkpoint.manifest import CorruptError
from trainer.checkpoint.storage import Read, TensorMetadata, read_regions, read_rows, read_slice
from trainer.runtime.distributed import all_gather_objects, run_on_rank_0
from trainer.runtime.dtensor import local_region

_ROWS = 4096  # maximum number of rows read at once


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """The parameters in a checkpoint or in a Hugging Face model folder."""

    folder: Path
    spec: ModelSpec
    sizes: Any
    index: Mapping[str, TensorMetadata]
    """Name in a checkpoint -> dtype, shape and files of each parameter."""
    read: Read
    alone: bool
    """Whether only this rank reads the folder, so that no method is collective."""
    hf_folder: HfModelFolder | None = None
    averaged: bool = False
    """Whether the parameters are the averages of a run ([optimizer] ema_decay)."""

    @classmethod
    def open(
        cls, folder: Path, spec: ModelSpec | None = None, alone: bool = False, averaged: bool = False
    ) -> "WeightSource":
        """Verify the folder, collectively unless only this rank opens it.

        Args:
            folder: Checkpoint, or model in Hugging Face's format.
            spec: Expected model family, or None for any family.
            alone: Whether only this rank opens the folder.
            averaged: Whether to read the averages of the run instead of its last weights.

        Raises:
            ConfigError: The folder is damaged, or contains no such weights.
        """
        if is_checkpoint(folder):
            with manifest.damage_as_config_error(folder):
                if problem := resume.verify(folder, alone=alone):
                    raise CorruptError(problem)
                metadata = ModelMetadata.read(folder)
                if metadata.lora:
                    raise CorruptError(
                        "contains only an adapter; scripts/convert_hf.py merge writes the complete model"
                    )
                own, sizes = metadata.spec_and_sizes()
                index, read = model_index(folder, own, sizes), read_slice
                if averaged:
                    index, read = averaged_index(folder, index)
            return cls(
                folder=folder,
                spec=own,
                sizes=sizes,
                index=index,
                read=read,
                alone=alone,
                averaged=averaged,
            )
        if (folder / "config.json").exists():
            if averaged:
                raise ConfigError("", f"{folder} contains no averaged weights: it is no checkpoint of a run")
            hf = HfModelFolder.open(folder, spec)
            index = {f"model/{name}": stored for name, stored in hf.index.items()}
            return cls(
                folder=folder, spec=hf.spec, sizes=hf.sizes, index=index, read=hf.read, alone=alone, hf_folder=hf
            )
        raise not_a_model(folder)

    def files(self) -> str:
        """Return which files of a model in Hugging Face's format are read, and which files and modules with weights are not, or
        ""."""
        if self.hf_folder is None:
            return ""
        files = self.hf_folder.files()
        read = files[0] if len(files) == 1 else f"{len(files)} files, {files[0]} to {files[-1]}"
        unread = ", ".join([*unread_weights(self.folder), *self.hf_folder.ignored])
        return f"{read}{f'; not {unread}' if unread else ''}"

    def rows(self, matrix: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a parameter, or of the matrix `parameter@expert` of a stack. Raises CorruptError."""
        name, _, expert = matrix.partition("@")
        key = f"model/{name}"
        return read_rows(self.folder, key, self.index[key], start, stop, self.read, int(expert) if expert else None)

    def digest(self) -> str:
        """Return a hash of the content of the weight files, collectively unless `alone`. Each rank reads some of them. Raises
        OSError."""
        if self.hf_folder is None:
            of_files = digest_of(self.folder / manifest.NAME)  # it contains the hashes of all files
            return digest(f"averaged {of_files}".encode()) if self.averaged else of_files
        files = self.hf_folder.files()
        rank, ranks = (0, 1) if self.alone else (dist.get_rank(), dist.get_world_size())
        own = [(file, digest_of(self.folder / file)) for file in files[rank::ranks]]
        digests = [own] if self.alone else all_gather_objects(own)
        return digest(json.dumps(sorted(chain(*digests))).encode())

    def load_into(self, parameters: Tensors, resize: bool = False) -> None:
        """Load the parameters in place, collectively unless `alone`. Each rank reads only its shards.

        Args:
            parameters: By name.
            resize: Whether the vocabulary may be larger than the stored one; it needs all ranks. Additional rows are set to the
                mean of the stored rows (Hewitt 2021, "Initializing New Word Embeddings").

        Raises:
            ConfigError: A parameter is missing or has another shape.
        """
        wanted = {f"model/{name}": parameter for name, parameter in parameters.items()}
        grown = {name for name, parameter in wanted.items() if self.is_smaller(name, parameter)}
        # Only rank 0 reads all rows, and all ranks ask for the mean: a rank may have no row, or no part of the parameter.
        for name in sorted(set().union(*all_gather_objects(grown))) if resize else ():
            mean = run_on_rank_0(partial(self._mean_row, name))
            if name in grown:
                self._load_resized(name, wanted.pop(name), mean)
        commit.load_into(self.folder, self.index, wanted, self.read, cast=True, alone=self.alone)

    def quantize_into(self, quantized: Mapping[str, QuantizedWeight]) -> None:
        """Quantize weights while they are read, collectively unless `alone`. quantized: by name. Raises ConfigError."""

        def quantize() -> None:
            for name, weight in quantized.items():
                weight.fill(partial(self._region, f"model/{name}"))

        commit.read_on_all_ranks(self.folder, quantize, self.alone)

    def _region(self, key: str, region: tuple[slice, ...]) -> Tensor:
        """Return a region of a stored parameter. key: name in the index. Raises CorruptError."""
        stored = self.index[key]
        values = torch.empty([r.stop - r.start for r in region], dtype=stored.dtype)
        read_regions(self.folder, {key: stored}, {key: (values, region)}, self.read)
        return values

    def is_smaller(self, key: str, parameter: Tensor) -> bool:
        """Return whether the stored parameter lacks only rows of the vocabulary. key: name in the index."""
        stored = self.index.get(key)
        old, new = stored.shape if stored else (), tuple(parameter.shape)
        return old[:1] == (self.sizes.vocab_size,) and old[1:] == new[1:] and old[0] < new[0]

    def _mean_row(self, name: str) -> Tensor:
        """Return the mean of the rows of a stored parameter, fp64. Raises ConfigError."""
        stored = self.index[name]
        num_rows, sums = stored.shape[0], torch.zeros(stored.shape[1:], dtype=torch.float64)
        with manifest.damage_as_config_error(self.folder):
            for start in range(0, num_rows, _ROWS):
                stop = min(start + _ROWS, num_rows)
                sums += self.rows(name.removeprefix("model/"), start, stop).double().sum(0)
        return sums / num_rows

    @torch.no_grad()
    def _load_resized(self, name: str, parameter: Tensor, mean: Tensor) -> None:
        """Load this rank's rows of a parameter that has more rows than the stored tensor. mean: value of the additional rows."""
        local, (rows, *columns) = local_region(parameter)
        with manifest.damage_as_config_error(self.folder):
            read_regions(self.folder, self.index, {name: (local, (rows, *columns))}, self.read)
        local[max(0, self.index[name].shape[0] - rows.start) :].copy_(mean[tuple(columns)].to(local.dtype))


def names_loaded(config: CheckpointConfig, names: Collection[str]) -> set[str]:
    """Return the names of the parameters that a new run loads instead of initializing randomly. Raises ConfigError."""
    if not config.init_from:
        return set()
    return set(names).difference(matching("checkpoint.init_exclude", config.init_exclude, names, "parameter"))


def load_initial_weights(
    config: CheckpointConfig,
    weights: WeightSource,
    parameters: Tensors,
    quantized: Mapping[str, QuantizedWeight],
    names: Collection[str],
) -> None:
    """Load this rank's parameters from checkpoint.init_from, collectively.

    Args:
        config: What is loaded.
        weights: Result of open_initial_weights.
        parameters: Those of this rank.
        quantized: Weights of this rank that are kept in 4 bits.
        names: Those of the complete model's parameters. Others, such as those of adapters, are not loaded.

    Raises:
        ConfigError: The weights are damaged.
    """
    included = names_loaded(config, names)
    with errors_about("checkpoint.init_from"):
        wanted = {name: p for name, p in parameters.items() if name in included}
        weights.load_into(wanted, config.resize_embeddings)
        weights.quantize_into(quantized)
    dist.barrier()


def open_initial_weights(config: CheckpointConfig, spec: ModelSpec, sizes: Any, parameters: Tensors) -> WeightSource:
    """Open checkpoint.init_from, collectively, and check that it has the weights, without loading them. Raises ConfigError if it
    is damaged or contains a different model. parameters: those of the complete model; only shapes and dtypes are used."""
    included = names_loaded(config, parameters)
    with errors_about("checkpoint.init_from"):
        weights = _open_initial(config, spec, sizes)
        wanted = {f"model/{name}": p for name, p in parameters.items() if name in included}
        if config.resize_embeddings:
            wanted = {name: p for name, p in wanted.items() if not weights.is_smaller(name, p)}
        require_match(weights.folder, weights.index, wanted, cast=True)
    return weights


def _open_initial(config: CheckpointConfig, spec: ModelSpec, sizes: Any) -> WeightSource:
    """Open checkpoint.init_from, collectively. Raises ConfigError if it is damaged or contains a different model."""
    # Only rank 0 resolves the folder, because the source run may still write newer checkpoints.
    folder = run_on_rank_0(lambda: resolve_checkpoint(Path(config.init_from)))
    weights = WeightSource.open(folder, spec, averaged=config.init_averaged)
    stored = asdict(weights.sizes)
    if config.resize_embeddings and stored.get("vocab_size", 0) < sizes.vocab_size:
        stored["vocab_size"] = sizes.vocab_size
    differences = [
        f"{name} is {stored.get(name)}, expected {expected}"
        for name, expected in asdict(sizes).items()
        if stored.get(name) != expected and name != "rope_is_long"  # the run's sequence length decides
    ]
    if differences:
        raise ConfigError("", f"{weights.folder} contains a different model: {', '.join(differences)}")
    return weights

"""Adapters (trainer/adapters/select.py) in checkpoints, and merged with their base model."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from models.spec import ModelSpec, meta_model
from trainer.adapters import nf4
from trainer.adapters.select import (
    TrainedParameters,
    adaptable_weights,
    adapter_shapes,
    matrices_of,
    select_quantized,
)
from trainer.base.config import ConfigError, LoraConfig
from trainer.base.config.fields import coerce, settings
from trainer.base.config.model_source import resolve_checkpoint
from trainer.base.system import console
from trainer.base.system.checkpoint_folder import MODEL_FILE
from trainer.base.system.paths import split_best
from trainer.checkpoint import manifest, resume
from trainer.checkpoint.commit import Tensors, load_into
from trainer.checkpoint.formats.huggingface import TEXT_MODEL
from trainer.checkpoint.formats.model_metadata import ModelMetadata, averaged_index
from trainer.checkpoint.formats.weights import WeightSource
from trainer.checkpoint.manifest import CorruptError
from trainer.checkpoint.storage import Read, TensorMetadata, read_index, read_rows, read_slice
from trainer.runtime.distributed import run_on_rank_0
from trainer.runtime.dtensor import local_region


@dataclass(frozen=True, kw_only=True)
class AdapterCheckpoint:
    """A checkpoint that contains an adapter, and the name of its base model."""

    folder: Path
    metadata: ModelMetadata
    spec: ModelSpec
    sizes: Any
    index: Mapping[str, TensorMetadata]
    """Name in the checkpoint -> dtype, shape and files of each trained parameter."""
    reader: Read
    """How they are read."""
    base: Path
    """Folder of the base model at training."""
    base_digest: str
    text_model: str
    """See HfModelFolder.text_model, of the base model."""
    config: LoraConfig
    scale: float
    trained: TrainedParameters

    @classmethod
    def open(cls, folder: Path, alone: bool = False, averaged: bool = False) -> "AdapterCheckpoint":
        """Verify the checkpoint, collectively unless only this rank opens it.

        Args:
            folder: The checkpoint.
            alone: Whether only this rank opens it.
            averaged: Whether to read the averaged weights.

        Raises:
            CorruptError: The checkpoint is damaged, or contains no adapter.
            ConfigError: It contains no averaged weights.
        """
        if problem := resume.verify(folder, alone=alone):
            raise CorruptError(problem)
        metadata = ModelMetadata.read(folder)
        spec, sizes = metadata.spec_and_sizes()
        index = {key: stored for key, stored in read_index(folder).items() if key.startswith("model/")}
        try:
            lora = dict(metadata.lora)
            base, base_digest = Path(lora.pop("base")), str(lora.pop("base_digest"))
            text_model = str(lora.pop("text_model", TEXT_MODEL))  # older checkpoints do not name it
            config = LoraConfig(**lora)
            scale = float(config.scale)
            coerce(config.base_dtype, settings()["lora.base_dtype"].type)
        except (KeyError, TypeError, ValueError, ArithmeticError):
            raise CorruptError(f"{MODEL_FILE} does not describe an adapter") from None
        model = meta_model(spec.model, sizes)
        names = {key.removeprefix("model/") for key in index}
        adapted = [name for name in adaptable_weights(model) if matrices_of(name)[0] in names]
        shapes = adapter_shapes(model, adapted, config.rank)
        trained = TrainedParameters(frozenset(name for name, _ in model.named_parameters() if name in names), shapes)
        expected = {f"model/{name}": tuple(p.shape) for name, p in trained.tensors(model).items()}
        if {key: stored.shape for key, stored in index.items()} != expected:
            raise CorruptError(f"the tensors are not those of an adapter of rank {config.rank} for this model")
        index, read = averaged_index(folder, index) if averaged else (index, read_slice)
        return cls(
            folder=folder,
            metadata=metadata,
            spec=spec,
            sizes=sizes,
            index=index,
            reader=read,
            base=base,
            base_digest=base_digest,
            text_model=text_model,
            config=config,
            scale=scale,
            trained=trained,
        )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows [start, stop), by default all, of a trained parameter or of the matrix `parameter@expert` of a stack."""
        parameter, _, expert = name.partition("@")
        key, matrix = f"model/{parameter}", int(expert) if expert else None
        stored = self.index[key]
        stop = stored.shape[0 if matrix is None else 1] if stop is None else stop
        return read_rows(self.folder, key, stored, start, stop, self.reader, matrix)

    def product(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Return a part of the matrix that the adapter adds, in fp32. name: of a weight, or `parameter@expert` of a stack."""
        first, second = matrices_of(name)
        a, b = self.read(first), self.read(second, rows.start, rows.stop)
        return b.float() @ a[:, columns].float() * self.scale


@dataclass(frozen=True, kw_only=True)
class AdapterSource:
    """The parameters of a base model, with an adapter merged into them. It can replace a WeightSource."""

    adapter: AdapterCheckpoint
    base: WeightSource
    hf_folder: ClassVar[None] = None
    quantized: frozenset[str] = frozenset()
    """Names of the weights whose rows are those of the base model in 4 bits with which the adapter was trained."""

    @classmethod
    def open(
        cls,
        checkpoint: Path,
        base: Path | None,
        alone: bool = False,
        averaged: bool = False,
        into_quantized: bool = False,
    ) -> "AdapterSource":
        """Verify both folders, collectively unless only this rank opens them.

        Args:
            checkpoint: Contains the adapter.
            base: Folder of the base model, or of the run that trained it. None: the one that the checkpoint names.
            alone: Whether only this rank opens the folders.
            averaged: Whether to read the averaged weights of the adapter.
            into_quantized: See open_weights.

        Raises:
            ConfigError: One of the folders is damaged, or the base is not that of the adapter.
        """
        with manifest.damage_as_config_error(checkpoint):
            adapter = AdapterCheckpoint.open(checkpoint, alone, averaged)
        folder = base or adapter.base
        if not split_best(folder)[0].is_dir():
            raise ConfigError("", f"{checkpoint} needs its base model, but {folder} does not exist; use --base PATH")
        folder = resolve_checkpoint(folder) if alone else run_on_rank_0(partial(resolve_checkpoint, folder))
        try:
            source = WeightSource.open(folder, adapter.spec, alone)
        except ConfigError as error:
            raise ConfigError("", f"{checkpoint} needs its base model: {error.message}; use --base PATH") from None
        if source.digest() != adapter.base_digest:
            message = f"{folder} is not the base model with which {checkpoint} was trained; use --base PATH"
            raise ConfigError("", message)
        quantized: frozenset[str] = frozenset()
        if into_quantized:
            model = meta_model(adapter.spec.model, adapter.sizes)
            quantized = select_quantized(model, model.plan(), adapter.trained, adapter.config)
            if not quantized:
                reason = f"because {checkpoint} was trained on a base model that is not quantized"
                raise ConfigError("", f"--into quantized has no effect, {reason}")
        elif adapter.config.base_dtype != "keep":
            console.warning(
                f"{checkpoint} was trained on a base model in 4 bits ({adapter.config.base_dtype}), and is merged into the "
                "original one here; scripts/convert_hf.py merge --into quantized gives the trained model"
            )
        return cls(adapter=adapter, base=source, quantized=quantized)

    @property
    def folder(self) -> Path:
        return self.adapter.folder

    @property
    def spec(self) -> ModelSpec:
        return self.adapter.spec

    @property
    def sizes(self) -> Any:
        return self.adapter.sizes

    @property
    def index(self) -> dict[str, TensorMetadata]:
        """Return the parameters like WeightSource.index. Fully trained ones replace those of the base, and may have more rows."""
        fully = {key: stored for key, stored in self.adapter.index.items() if key in self.base.index}
        return {**self.base.index, **fully}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a parameter, or of the matrix `parameter@expert` of a stack. Merged rows are fp32. Raises
        CorruptError."""
        parameter = name.partition("@")[0]
        if parameter in self.adapter.trained.fully:
            return self.adapter.read(name, start, stop)
        rows = self.base.rows(name, start, stop)
        if parameter in self.quantized:
            rows = nf4.round_trip(rows, self.adapter.config.quantizes_scales)
        if matrices_of(parameter)[0] in self.adapter.trained.shapes:
            rows = rows + self.adapter.product(name, slice(start, stop), slice(None))
        return rows

    @torch.no_grad()
    def load_into(self, parameters: Tensors) -> None:
        """Load the parameters in place, collectively unless `alone`. Each rank reads only its shards of the base model, which is
        not quantized."""
        assert not self.quantized
        fully = self.adapter.trained.fully
        self.base.load_into({name: p for name, p in parameters.items() if name not in fully})
        own = {f"model/{name}": p for name, p in parameters.items() if name in fully}
        load_into(self.folder, self.adapter.index, own, self.adapter.reader, cast=True, alone=self.base.alone)
        for name in self.adapter.trained.adapted:
            local, (*experts, rows, columns) = local_region(parameters[name])
            stacked = [(f"{name}@{i}", local[i - own.start]) for own in experts for i in range(own.start, own.stop)]
            for matrix, values in stacked or [(name, local)]:
                values.copy_(values + self.adapter.product(matrix, rows, columns).to(values.device))


def open_weights(
    folder: Path,
    base: Path | None = None,
    alone: bool = False,
    averaged: bool = False,
    into_quantized: bool = False,
) -> WeightSource | AdapterSource:
    """Open a model that can be loaded or exported, collectively unless `alone` is true.

    Args:
        folder: Checkpoint, or model in Hugging Face's format.
        base: Folder of the base model, if the checkpoint contains an adapter and the base has moved.
        alone: Whether only this rank opens the model.
        averaged: Whether to read the averages of the run ([optimizer] ema_decay) instead of its last weights.
        into_quantized: Whether the adapter is merged into the quantized base model with which it was trained, instead of the
            original one. Its rows can then be read, but not loaded into a model.

    Raises:
        ConfigError: The folder contains no model that can be read.
    """
    if is_adapter(folder):
        return AdapterSource.open(folder, base, alone, averaged, into_quantized)
    if base is not None:
        raise ConfigError("", f"--base {base} has no effect, because {folder} contains no adapter")
    return WeightSource.open(folder, alone=alone, averaged=averaged)


def is_adapter(checkpoint: Path) -> bool:
    """Return whether a checkpoint contains an adapter. A damaged one counts as none."""
    try:
        return bool(ModelMetadata.read(checkpoint).lora)
    except CorruptError:
        return False

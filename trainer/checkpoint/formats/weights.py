"""The weights of a model in some folder, whatever its format is: one protocol, `Weights`.

A format of weights is one maker, a subclass of `Weights` whose `open` checks the files (native.py, huggingface.py; adapter.py for
an adapter on a base model), and one writer, a function that takes a `Weights` (native_writer.py, huggingface_writer.py).
folders.py chooses the maker of a folder. Everything else takes a `Weights` and asks for no format: export, initial weights,
generation.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.huggingface_tensors import TEXT_MODEL
from models.spec import ModelSpec
from trainer.adapters.nf4 import QuantizedWeight
from trainer.base.system.files import LARGEST_JSON, digest_of
from trainer.base.system.run_files import MANIFEST
from trainer.checkpoint import manifest
from trainer.checkpoint.commit import Tensors, read_on_all_ranks, require_match
from trainer.checkpoint.formats.model_metadata import CHAT_TEMPLATE, ModelMetadata
from trainer.checkpoint.tensor_files import TensorMetadata
from trainer.runtime.dtensor import local_region

Region = tuple[slice, ...]
"""A part of a tensor: one range per dim."""


@dataclass(frozen=True, kw_only=True)
class Weights(ABC):
    """The parameters and saved buffers of a model in a folder. They are read in parts, so that no rank needs memory for a
    complete matrix. Only the makers check the folder."""

    folder: Path
    model: ModelMetadata
    """What the folder says about the model."""
    spec: ModelSpec
    sizes: Any
    index: Mapping[str, TensorMetadata]
    """Name of a parameter or buffer -> dtype, shape and files."""
    alone: bool
    """Whether only this rank reads the folder, so that no method is collective."""
    averaged: bool = False
    """Whether the parameters are the averages of a run ([optimizer] ema_decay)."""
    text_model: str = TEXT_MODEL
    """Name of the text model among the modules of transformers' class for the model, from version 4.52 on."""

    @abstractmethod
    def read(self, name: str, region: Region, out: Tensor) -> None:
        """Copy a region of a parameter, without reading the rest.

        Args:
            name: Of the parameter.
            region: Part of the parameter to read.
            out: Tensor of the region's shape, of any dtype.

        Raises:
            CorruptError: The files are damaged.
        """

    def is_mxfp4(self, name: str) -> bool:
        """Return whether all values of a parameter are those of the format MXFP4, in which its files store them."""
        return False

    def digest(self) -> str:
        """Return a hash of the content of the weights, collectively unless `alone`. Raises OSError."""
        return digest_of(self.folder / MANIFEST)  # it contains the hashes of all files

    def without_prediction(self) -> "Weights":
        """Return the weights without layers for multi-token prediction."""
        if not self.sizes.prediction_layers:
            return self
        excluded = tuple(f"layers.{i}." for i in self.sizes.predictions)
        index = {name: stored for name, stored in self.index.items() if not name.startswith(excluded)}
        sizes = self.sizes.without_prediction()
        return replace(self, index=index, sizes=sizes, model=self.model.with_sizes(sizes))

    def files(self) -> str:
        """Return which files and modules with weights are read, and which are not, or "" if the folder is a checkpoint."""
        return ""

    def content(self, name: str) -> bytes:
        """Return the content of a small file of the folder. Raises CorruptError."""
        return manifest.read_bytes(self.folder / name, LARGEST_JSON)

    def template_file(self) -> Path | None:
        """Return the file that defines the model's chat template, or None."""
        file = self.folder / CHAT_TEMPLATE
        return file if file.exists() else None

    def origin(self) -> dict[str, str]:
        """Return the metadata of an export's safetensors files, which identify these weights. Raises OSError."""
        return checkpoint_origin(self.folder, self.averaged)

    def rows(self, matrix: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows [start, stop), by default all, of a parameter, or of the matrix `parameter@expert` of a stack. Raises
        CorruptError."""
        name, _, expert = matrix.partition("@")
        outer = (slice(int(expert), int(expert) + 1),) if expert else ()
        num_rows, *columns = self.index[name].shape[len(outer) :]
        region = (*outer, slice(start, num_rows if stop is None else stop), *(slice(0, size) for size in columns))
        return self.region(name, region).flatten(0, len(outer))

    def region(self, name: str, region: Region) -> Tensor:
        """Return a region of a parameter. Raises CorruptError."""
        values = torch.empty([r.stop - r.start for r in region], dtype=self.index[name].dtype)
        self.read(name, region, values)
        return values

    def load_into(self, parameters: Tensors, problems: Sequence[str] = ()) -> None:
        """Load parameters in place, collectively unless `alone`. Each rank reads only its shards.

        Args:
            parameters: By name.
            problems: Reasons why they cannot be loaded, which are added to those that are found.

        Raises:
            ConfigError: A parameter is missing or has another shape, or a file is damaged.
        """
        require_match(self.folder, self.index, parameters, cast=True, problems=problems)

        def load() -> None:
            for name, parameter in parameters.items():
                local, region = local_region(parameter)
                self.read(name, tuple(region), local)

        read_on_all_ranks(self.folder, load, self.alone)

    def quantize_into(self, quantized: Mapping[str, QuantizedWeight]) -> None:
        """Quantize weights while they are read, collectively unless `alone`. quantized: by name. Raises ConfigError."""

        def quantize() -> None:
            for name, weight in quantized.items():
                weight.fill(partial(self.region, name))

        read_on_all_ranks(self.folder, quantize, self.alone)


def checkpoint_origin(checkpoint: Path, averaged: bool) -> dict[str, str]:
    """Return Weights.origin of a checkpoint that need not be opened. averaged: whether its averages are meant. Raises OSError."""
    metadata = {"format": "pt", "meshwright_checkpoint": digest_of(checkpoint / MANIFEST)}
    return metadata | {"meshwright_weights": "averaged"} if averaged else metadata


def require_parameters(folder: Path, index: Mapping[str, TensorMetadata], parameters: Tensors) -> None:
    """Raise a ConfigError that lists the differences, if the tensors in a folder are not these parameters."""
    unknown = [f"{name} is not a parameter of this model" for name in index if name not in parameters]
    require_match(folder, index, parameters, cast=True, problems=unknown)

"""Weights in a checkpoint of this project."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from models.spec import meta_model, saved_weights
from trainer.base.config import ConfigError
from trainer.base.system.files import digest
from trainer.checkpoint import manifest, resume
from trainer.checkpoint.formats.model_metadata import ModelMetadata
from trainer.checkpoint.formats.weights import Region, Weights, require_parameters
from trainer.checkpoint.manifest import CorruptError
from trainer.checkpoint.tensor_files import read_index, read_regions

_TRAINED, _AVERAGED = "model/", "average/"
"""Beginnings of the names that a parameter and its average have in a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class CheckpointWeights(Weights):
    """The parameters in a checkpoint: of a complete model, or those that a run with adapters has trained."""

    keys: Mapping[str, str]
    """Name of a parameter -> its name in the checkpoint."""

    @classmethod
    def open(cls, folder: Path, alone: bool = False, averaged: bool = False) -> "CheckpointWeights":
        """Verify a checkpoint with a complete model, collectively unless only this rank opens it.

        Args:
            folder: The checkpoint.
            alone: Whether only this rank opens it.
            averaged: Whether to read the averages of the run instead of its last weights.

        Raises:
            ConfigError: The checkpoint is damaged, or contains no such weights.
        """
        with manifest.damage_as_config_error(folder):
            weights = cls.open_trained(folder, alone, averaged)
            require_parameters(folder, weights.index, saved_weights(meta_model(weights.spec.model, weights.sizes)))
        return weights

    @classmethod
    def open_trained(cls, folder: Path, alone: bool, averaged: bool) -> "CheckpointWeights":
        """Verify a checkpoint, whatever parameters it contains. Arguments: as in `open`. Raises CorruptError, or ConfigError if
        it contains no averages."""
        if problem := resume.verify(folder, alone=alone):
            raise CorruptError(problem)
        model = ModelMetadata.read(folder)
        spec, sizes = model.spec_and_sizes()
        stored = read_index(folder)
        keys = {key.removeprefix(_TRAINED): key for key in stored if key.startswith(_TRAINED)}
        if averaged:  # buffers have no average
            averages = {name: key for name in keys if (key := f"{_AVERAGED}{name}") in stored}
            if not averages:
                raise ConfigError("", f"{folder} contains no averaged weights: its run had no [optimizer] ema_decay")
            keys |= averages
        return cls(
            folder=folder,
            model=model,
            spec=spec,
            sizes=sizes,
            index={name: stored[key] for name, key in keys.items()},
            alone=alone,
            averaged=averaged,
            keys=keys,
        )

    def read(self, name: str, region: Region, out: Tensor) -> None:
        key = self.keys[name]
        read_regions(self.folder, {key: self.index[name]}, {key: (out, region)})

    def digest(self) -> str:
        return digest(f"averaged {super().digest()}".encode()) if self.averaged else super().digest()

"""Adapters (trainer/adapters/select.py) in checkpoints, and merged with their base model."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from models.huggingface_tensors import TEXT_MODEL
from models.spec import meta_model
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
from trainer.base.system import console
from trainer.base.system.run_files import MODEL_FILE
from trainer.checkpoint.formats.native import CheckpointWeights
from trainer.checkpoint.formats.weights import Region, Weights
from trainer.checkpoint.manifest import CorruptError


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The adapter in a checkpoint."""

    weights: CheckpointWeights
    """The trained parameters. They are a part of a model."""
    base: str
    """Path or URL of the base model at training."""
    base_digest: str
    text_model: str
    """See Weights.text_model, of the base model."""
    config: LoraConfig
    base_format: str
    """See LoraConfig.base_format, of the version that has trained the adapter."""
    scale: float
    trained: TrainedParameters

    @classmethod
    def open(cls, folder: Path, alone: bool = False, averaged: bool = False) -> "Adapter":
        """Verify the checkpoint, collectively unless only this rank opens it.

        Args:
            folder: The checkpoint.
            alone: Whether only this rank opens it.
            averaged: Whether to read the averaged weights.

        Raises:
            CorruptError: The checkpoint is damaged, or contains no adapter.
            ConfigError: It contains no averaged weights.
        """
        weights = CheckpointWeights.open_trained(folder, alone, averaged)
        try:
            lora = dict(weights.model.lora)
            base, base_digest = str(lora.pop("base")), str(lora.pop("base_digest"))
            text_model = str(lora.pop("text_model", TEXT_MODEL))  # older checkpoints do not name it
            base_format = lora.pop("base_format", "nf4_double (linear scales)")  # as in older checkpoints
            config = LoraConfig(**lora)
            scale = float(config.scale)
            coerce(config.base_dtype, settings()["lora.base_dtype"].type)
        except (KeyError, TypeError, ValueError, ArithmeticError):
            raise CorruptError(f"{MODEL_FILE} does not describe an adapter") from None
        return cls(
            weights=weights,
            base=base,
            base_digest=base_digest,
            text_model=text_model,
            config=config,
            base_format=str(base_format) if config.quantizes_scales else config.base_dtype,
            scale=scale,
            trained=_trained_parameters(weights, config.rank),
        )

    @property
    def folder(self) -> Path:
        return self.weights.folder

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows of a trained parameter, see Weights.rows."""
        return self.weights.rows(name, start, stop)

    def product(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Return a part of the matrix that the adapter adds, in fp32. name: of a weight, or `parameter@expert` of a stack."""
        first, second = matrices_of(name)
        a, b = self.read(first), self.read(second, rows.start, rows.stop)
        return b.float() @ a[:, columns].float() * self.scale


def _trained_parameters(weights: Weights, rank: int) -> TrainedParameters:
    """Return which parameters a checkpoint with an adapter of this rank contains. Raises CorruptError if they are not those of
    such an adapter."""
    model = meta_model(weights.spec.model, weights.sizes)
    adapted = [name for name in adaptable_weights(model) if matrices_of(name)[0] in weights.index]
    fully = frozenset(name for name, _ in model.named_parameters() if name in weights.index)
    trained = TrainedParameters(fully, adapter_shapes(model, adapted, rank))
    expected = {name: tuple(p.shape) for name, p in trained.tensors(model).items()}
    if {name: stored.shape for name, stored in weights.index.items()} != expected:
        raise CorruptError(f"the tensors are not those of an adapter of rank {rank} for this model")
    return trained


@dataclass(frozen=True, kw_only=True)
class MergedWeights(Weights):
    """The weights of a base model with an adapter merged into them. Rows of merged matrices are fp32."""

    adapter: Adapter
    base: Weights
    quantized: frozenset[str]
    """Names of the weights whose values are those of the base model in 4 bits with which the adapter was trained."""

    @classmethod
    def of(cls, adapter: Adapter, base: Weights, into_quantized: bool) -> "MergedWeights":
        """Merge an adapter into its base model, or into the quantized one with which it was trained, of which only complete rows
        can be read. Raises ConfigError if there is no such quantized model."""
        own = adapter.weights
        quantized: frozenset[str] = frozenset()
        if into_quantized:
            model = meta_model(own.spec.model, own.sizes)
            quantized = select_quantized(model, model.structure(), adapter.config)
            if not quantized:
                reason = f"because {own.folder} was trained on a base model that is not quantized"
                raise ConfigError("", f"--into quantized has no effect, {reason}")
            if adapter.base_format != adapter.config.base_format:
                reason = f"{own.folder} was trained on {adapter.base_format}, which this version does not compute"
                raise ConfigError("", f"--into quantized: {reason}; merge it into the original model")
        elif adapter.config.base_dtype != "keep":
            trained = "; scripts/convert_hf.py merge --into quantized gives the trained model"
            console.warning(
                f"{own.folder} was trained on a base model in 4 bits, {adapter.base_format}, and is merged into the original "
                f"one here{trained if adapter.base_format == adapter.config.base_format else ''}"
            )
        merged = {*adapter.trained.adapted, *quantized}
        index = {
            name: replace(stored, dtype=torch.promote_types(stored.dtype, torch.float32)) if name in merged else stored
            for name, stored in base.index.items()
        }
        # Fully trained parameters replace those of the base, and may have more rows.
        index |= {name: stored for name, stored in own.index.items() if name in adapter.trained.fully}
        sizes = own.sizes
        if layers := base.sizes.prediction_layers:  # the adapter was trained without them, but the base keeps them
            sizes = replace(sizes, prediction_layers=layers)
        return cls(
            folder=own.folder,
            model=own.model.with_sizes(sizes),
            spec=own.spec,
            sizes=sizes,
            index=index,
            alone=own.alone,
            averaged=own.averaged,
            adapter=adapter,
            base=base,
            quantized=quantized,
        )

    @torch.no_grad()
    def read(self, name: str, region: Region, out: Tensor) -> None:
        if name in self.adapter.trained.fully:
            self.adapter.weights.read(name, region, out)
            return
        self._read_base(name, region, out)
        if matrices_of(name)[0] not in self.adapter.trained.shapes:
            return
        *experts, rows, columns = region
        stacked = [(f"{name}@{i}", out[i - own.start]) for own in experts for i in range(own.start, own.stop)]
        for matrix, values in stacked or [(name, out)]:
            values.copy_(values + self.adapter.product(matrix, rows, columns).to(values.device))

    def _read_base(self, name: str, region: Region, out: Tensor) -> None:
        try:
            if name not in self.quantized:
                self.base.read(name, region, out)
                return
            rows = self.base.region(name, region)
            assert rows.shape[-1] == self.index[name].shape[-1]  # a scale may belong to a complete row
            values = nf4.round_trip(rows.flatten(0, -2), self.adapter.config.quantizes_scales)
            out.copy_(values.view(rows.shape))
        except CorruptError as damage:
            raise CorruptError(f"its base model {self.base.folder}: {damage}") from None

    def origin(self) -> dict[str, str]:
        quantized = {"meshwright_base": self.adapter.config.base_dtype} if self.quantized else {}
        return super().origin() | quantized

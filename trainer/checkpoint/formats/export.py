"""Export of checkpoints to Hugging Face format."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.huggingface import by_expert
from models.spec import ModelSpec, meta_model, saved_buffers, saved_weights
from trainer.base.config import CheckpointConfig, ConfigError, errors_about
from trainer.base.config.model_source import best_checkpoint
from trainer.base.system import console
from trainer.base.system.checkpoint_folder import latest_per_step
from trainer.base.system.files import atomic_folder
from trainer.base.system.units import GIB
from trainer.checkpoint import manifest
from trainer.checkpoint.formats.adapter import AdapterSource, is_adapter, open_weights
from trainer.checkpoint.formats.model_metadata import GENERATION_CONFIG, ModelMetadata
from trainer.checkpoint.formats.peft import write_peft
from trainer.checkpoint.formats.tokenizer_files import exported_files
from trainer.checkpoint.formats.weights import WeightSource
from trainer.checkpoint.formats.write_model import Progress, export_metadata, group_by_file, layer_order, read_in_chunks
from trainer.checkpoint.manifest import CorruptError
from trainer.checkpoint.storage import TensorMetadata, TensorWrite, write_safetensors

_SHARD_BYTES = 5 * GIB


@dataclass(frozen=True)
class HfExport:
    """An export of a checkpoint's model and tokenizer. An adapter is merged into its base model."""

    checkpoint: Path
    dtype: torch.dtype
    weights: WeightSource | AdapterSource
    model: ModelMetadata
    files: Mapping[str, bytes]
    """Name -> content of the files that do not depend on the weights."""
    averaged: bool
    """Whether the weights are the averages of the run."""

    @classmethod
    def open(
        cls,
        checkpoint: Path,
        dtype: torch.dtype,
        base: Path | None = None,
        averaged: bool = False,
        into_quantized: bool = False,
    ) -> "HfExport":
        """Read the checkpoint.

        Args:
            checkpoint: The checkpoint.
            dtype: Of the exported weights.
            base: As in open_weights.
            averaged: Whether to export the averaged weights.
            into_quantized: As in open_weights.

        Raises:
            ConfigError: The checkpoint is damaged, or contains no such weights.
        """
        weights = open_weights(checkpoint, base, alone=True, averaged=averaged, into_quantized=into_quantized)
        with manifest.damage_as_config_error(checkpoint):
            model = ModelMetadata.read(checkpoint)
        return cls(checkpoint, dtype, weights, model, exported_files(checkpoint, model), averaged)

    @property
    def spec(self) -> ModelSpec:
        return self.weights.spec

    @property
    def sizes(self) -> Any:
        return self.weights.sizes

    @property
    def index(self) -> Mapping[str, TensorMetadata]:
        return self.weights.index

    def num_bytes(self) -> int:
        return sum(
            torch.Size(stored.shape).numel() * self._dtype(key.removeprefix("model/")).itemsize
            for key, stored in self.index.items()
        )

    def write(self, out: Path, shard_bytes: int, progress: Progress) -> None:
        """Write the export to `out`, with safetensors files of at most shard_bytes. Replaces `out`."""
        with atomic_folder(out) as folder:
            self._write_weights(folder, shard_bytes, progress)
            config = self.spec.huggingface.config(self.sizes, self.model.context_window)
            # transformers' default pad_token_id may exceed the vocabulary.
            config |= {"torch_dtype": str(self.dtype).removeprefix("torch."), "pad_token_id": None}
            config |= self.model.special_token_ids
            _write_json(folder / "config.json", config)
            for name, content in self.files.items():
                (folder / name).write_bytes(content)
            if GENERATION_CONFIG not in self.files:
                _write_json(folder / GENERATION_CONFIG, self.model.special_token_ids)

    def _write_weights(self, folder: Path, shard_bytes: int, progress: Progress) -> None:
        parameters = sorted((key.removeprefix("model/") for key in self.index), key=layer_order)
        hf, weights = self.spec.huggingface, saved_weights(meta_model(self.spec.model, self.sizes))
        stored = hf.tensors(hf.matrices({name: weights[name] for name in parameters}))
        entries = [self._entry(name, group, progress) for name, group in stored.items()]
        groups = group_by_file(entries, shard_bytes)
        metadata = export_metadata(self.checkpoint, self.averaged)
        if isinstance(self.weights, AdapterSource) and self.weights.quantized:
            metadata["meshwright_base"] = self.weights.adapter.config.base_dtype
        weight_map = {}
        for i, group in enumerate(groups, start=1):
            file = f"model-{i:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
            write_safetensors(folder / file, group, metadata)
            weight_map |= {entry.name: file for entry in group}
        if len(groups) > 1:
            text = {"metadata": {"total_size": sum(e.num_bytes for e in entries)}, "weight_map": weight_map}
            _write_json(folder / "model.safetensors.index.json", text)

    def _entry(self, name: str, matrices: Sequence[str], progress: Progress) -> TensorWrite:
        """Return the tensor that contains the rows of these matrices, see HuggingFace.name. name: of the tensor."""
        hf, head_dim, dtype = self.spec.huggingface, self.sizes.head_dim, self._dtype(matrices[0])

        def read(matrix: str, start: int, stop: int) -> Tensor:
            return hf.reorder(matrix, self.weights.rows(matrix, start, stop), head_dim)

        def pieces() -> Iterator[Tensor]:
            for matrix, shape in zip(matrices, shapes, strict=True):
                group = head_dim if hf.is_permuted(matrix) else 1
                yield from read_in_chunks(partial(read, matrix), shape, dtype, group, progress)

        if hf.stack_of(matrices[0]) is not None:
            return self._stacked_entry(name, by_expert(matrices), progress)
        shapes = [self._shape(matrix) for matrix in matrices]
        return TensorWrite(name, dtype, (sum(shape[0] for shape in shapes), *shapes[0][1:]), pieces)

    def _dtype(self, matrix: str) -> torch.dtype:
        """Return the dtype of the exported tensor: buffers keep their own."""
        buffer = saved_buffers(meta_model(self.spec.model, self.sizes)).get(matrix)
        return self.dtype if buffer is None else buffer.dtype

    def _stacked_entry(self, name: str, experts: Sequence[Sequence[str]], progress: Progress) -> TensorWrite:
        """Return a stored stack, which is written by expert. experts: names of the matrices of each expert."""
        hf = self.spec.huggingface

        def pieces() -> Iterator[Tensor]:
            for matrices in experts:
                rows = {matrix: self.weights.rows(matrix, 0, self._shape(matrix)[0]) for matrix in matrices}
                piece = hf.stack_matrix(rows).to(self.dtype)
                yield piece
                progress(piece.numel() * self.dtype.itemsize)

        empty = {matrix: torch.empty(self._shape(matrix), device="meta") for matrix in experts[0]}
        return TensorWrite(name, self.dtype, (len(experts), *hf.stack_matrix(empty).shape), pieces)

    def _shape(self, matrix: str) -> tuple[int, ...]:
        parameter, _, expert = matrix.partition("@")
        shape = self.index[f"model/{parameter}"].shape
        return shape[1:] if expert else shape


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def is_export_of(folder: Path, checkpoint: Path, averaged: bool) -> bool:
    """Return whether the folder contains an export of this checkpoint. averaged: of its averaged weights."""
    try:
        with safe_open(min(folder.glob("*model*.safetensors")), framework="pt") as tensors:
            return tensors.metadata() == export_metadata(checkpoint, averaged)
    except (SafetensorError, OSError, ValueError):
        return False


def export_run(run_folder: Path, config: CheckpointConfig, skip_existing: bool = False) -> None:
    """Export a checkpoint of a finished run in bf16 to RUN_FOLDER/huggingface, on rank 0.

    Args:
        run_folder: Folder of the run.
        config: Which weights to export.
        skip_existing: Whether to keep an existing export of the same checkpoint.

    Raises:
        ConfigError: The folder cannot be written, or there is no such checkpoint.
    """
    if dist.get_rank() != 0:
        return
    out = run_folder / "huggingface"
    try:
        checkpoints = run_folder / "checkpoints"
        with errors_about("checkpoint.export_checkpoint"):
            chosen = (
                best_checkpoint(checkpoints) if config.export_checkpoint == "best" else latest_per_step(checkpoints)[0]
            )
        if skip_existing and is_export_of(out, chosen, config.export_averaged):
            return
        if is_adapter(chosen):
            write_peft(chosen, out, config.export_averaged)
        else:
            export = HfExport.open(chosen, torch.bfloat16, averaged=config.export_averaged)
            export.write(out, _SHARD_BYTES, lambda num_bytes: None)
    except (OSError, CorruptError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"{out} could not be written ({reason}); rerun the same command to retry"
        raise ConfigError("checkpoint.export_huggingface", message) from None
    averaged = " (averaged weights)" if config.export_averaged else ""
    console.info(f"exported {chosen.name}{averaged} to {out}")

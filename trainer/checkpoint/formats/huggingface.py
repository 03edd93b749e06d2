"""Models in Hugging Face's format: safetensors files and config.json. Each rank reads only its own shards."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.huggingface import StoredStack
from models.huggingface_config import key_of
from models.huggingface_tensors import (
    TEXT_MODEL,
    by_matrix,
    first_rows,
    is_permuted,
    is_stacked,
    join_tensors,
    name_from_files,
    name_in_files,
    own_names,
    prediction_copies,
    restore_rows,
    stack_of,
    stored_name,
    stored_prediction_layers,
    stored_shape,
    text_name,
)
from models.spec import ModelSpec, meta_model, saved_weights
from trainer.base.config import ConfigError
from trainer.base.config.recognition import recognise, require, unread_weights
from trainer.base.config.tokenizer_and_template import template_file
from trainer.base.system.files import LARGEST_JSON, digest, digest_of
from trainer.base.system.spelling import counted
from trainer.checkpoint import manifest
from trainer.checkpoint.formats import fp8_blocks
from trainer.checkpoint.formats.huggingface_files import (
    DescribedModel,
    file_inside,
    open_tensors,
    read_config,
    read_object,
)
from trainer.checkpoint.formats.mxfp4 import GROUP, PackedStack, decode, packed_stacks
from trainer.checkpoint.formats.quantization_config import quantization_problem
from trainer.checkpoint.formats.weights import Region, Weights, require_parameters
from trainer.checkpoint.manifest import CorruptError
from trainer.checkpoint.tensor_files import DTYPE_OF, Chunk, TensorMetadata, read_regions, read_rows
from trainer.runtime.distributed import all_gather_objects

_ROWS = 4096
"""Maximum number of rows to compare at once."""


def _stored_tensors(folder: Path, with_fp8: bool) -> dict[str, TensorMetadata]:
    """Return tensor name in Hugging Face's format -> dtype, shape and file. with_fp8: whether tensors may be float8."""
    dtypes = DTYPE_OF | {"F8_E4M3": fp8_blocks.VALUES} if with_fp8 else DTYPE_OF
    files, index = {"": "model.safetensors"}, "model.safetensors.index.json"
    if (folder / index).exists():
        files = read_object(folder / index).get("weight_map")
        if not isinstance(files, dict):
            raise CorruptError(f"{index} has no weight_map")
    stored: dict[str, TensorMetadata] = {}
    for path in sorted({file_inside(folder, file) for file in files.values()}):
        with open_tensors(path) as tensors:
            for name in sorted(tensors.keys()):
                if name in stored:
                    raise CorruptError(f"{stored[name].chunks[0].file} and {path.name} both contain {name}")
                tensor = tensors.get_slice(name)
                shape = tuple(tensor.get_shape())
                if tensor.get_dtype() not in dtypes:
                    raise CorruptError(f"{path.name}: {name} has the unsupported dtype {tensor.get_dtype()}")
                chunk = Chunk(path.name, (0,) * len(shape), shape)
                stored[name] = TensorMetadata(dtypes[tensor.get_dtype()], shape, (chunk,))
    return stored


def _decoded_tensors(
    folder: Path, model: DescribedModel
) -> tuple[dict[str, TensorMetadata], dict[str, PackedStack], dict[str, fp8_blocks.ScaledMatrix]]:
    """Return the tensors by their names in the files, each quantized one as what it stands for, and the quantized ones of each
    format. Raises CorruptError, or ConfigError if a format cannot be read."""
    block = fp8_blocks.block_size(model.config)
    quantizations = {*model.spec.huggingface.quantizations, *(() if block is None else ("fp8",))}
    if problem := quantization_problem(model.config, quantizations) or recognise(folder, "weights").problem:
        raise ConfigError("", f"{folder} {problem}")
    stored = _stored_tensors(folder, with_fp8=block is not None)
    scaled = {} if block is None else fp8_blocks.scaled_matrices(stored, block)
    packed = packed_stacks(stored) if "mxfp4" in quantizations else {}
    if packed and not model.config.get("quantization_config"):
        first = next(iter(packed.values()))
        problem = f"{first.blocks} has the format MXFP4, but config.json has no quantization_config"
        raise ConfigError("", f"cannot load {folder}: {problem}")
    parts = {name for stack in packed.values() for name in (stack.blocks, stack.scales)}
    parts |= {matrix.scales for matrix in scaled.values()}
    plain = {name: tensor for name, tensor in stored.items() if name not in parts}
    return plain | {name: tensor.decoded for name, tensor in (packed | scaled).items()}, packed, scaled


def _other_number_of_experts(model: DescribedModel, stored: Mapping[str, TensorMetadata]) -> str:
    """Return the problem if all routers have another number of experts than config.json, or "". stored: by name in the text
    model."""
    sizes, hf = model.sizes, model.spec.huggingface
    if "feed_forward.router" not in hf.names:
        return ""
    routers = [f"layers.{i}.feed_forward.router.weight" for i in range(sizes.n_layers)]
    shapes = [stored[name].shape for name in (stored_name(hf, router) for router in routers) if name in stored]
    numbers = {shape[0] for shape in shapes if shape}
    if len(numbers) != 1 or numbers == {sizes.n_experts}:
        return ""
    key = key_of(hf, "n_experts", model.config)
    value = f"{key} {sizes.n_experts}"
    if model.config.get(key) is None:
        value = f"no {key}, whose default is {sizes.n_experts}"
    return f"config.json has {value}, but the files have {numbers.pop()} experts in each layer"


def _text_names(stored: Collection[str]) -> dict[str, str]:
    """Return the name of each tensor of the text model -> its name in the files. stored: names in the files."""
    if any(name.startswith("model.layers.") for name in stored):
        return {name: name for name in stored}
    return {inner: name for name in stored if (inner := text_name(name)) is not None}  # a multimodal model


def _other_modules(names: Iterable[str]) -> list[str]:
    """Return the modules of other modalities, and those beside the text model, to which tensors belong. names: in the files."""
    depths = {name: 2 if name.startswith("model.") else 1 for name in names}
    return sorted({".".join(name.split(".")[:depth]) for name, depth in depths.items()})


def _weight_index(
    folder: Path, spec: ModelSpec, sizes: Any, keys: Mapping[str, str], stored: Mapping[str, TensorMetadata]
) -> dict[str, TensorMetadata]:
    """Return name of a parameter or buffer of this project -> dtype, shape and file.

    Args:
        folder: Folder of the model.
        spec: Family of the model.
        sizes: Sizes of the model.
        keys: Result of _text_names.
        stored: Result of _stored_tensors.

    Raises:
        ConfigError: Some tensors are not those of the model; the message lists them.
        CorruptError: Two tensors that config.json ties differ.
    """
    hf, model = spec.huggingface, meta_model(spec.model, sizes)
    # Old versions of transformers saved the rotary frequencies.
    stored = {name: stored[key] for name, key in keys.items() if not name.endswith("rotary_emb.inv_freq")}
    parameters = saved_weights(model)
    expected = join_tensors(hf, parameters, sizes.head_dim)
    originals = {parameter: name for name, parameter in parameters.items()}
    every = model.named_parameters(remove_duplicate=False)
    tied = {stored_name(hf, name): parameter for name, parameter in every if name not in parameters}
    tied = {name: parameter for name, parameter in tied.items() if name in stored}
    in_files = [{name_in_files(hf, sizes, n): t for n, t in tensors.items()} for tensors in (stored, expected | tied)]
    require_parameters(folder, *in_files)
    for name, parameter in tied.items():
        original = stored_name(hf, originals[parameter])
        if not _are_equal(folder, [(keys[n], stored[n]) for n in (name, original)]):
            raise CorruptError(f"{name} differs from {original}, but config.json ties the two tensors")
    index = {}
    for name, parameter in parameters.items():
        shape = tuple(parameter.shape)
        tensors = [stored[stored_name(hf, matrix)] for matrix in by_matrix(hf, {name: parameter})]
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            raise CorruptError(
                f"{stored_name(hf, f'{name}@0')} and the same tensor of other experts have different dtypes"
            )
        size = (shape[0] // len(tensors), *shape[1:])  # one matrix of a stack, or all rows
        chunks = (Chunk(t.chunks[0].file, (i, *(0,) * len(shape[1:])), size) for i, t in enumerate(tensors))
        index[name] = TensorMetadata(tensors[0].dtype, shape, tuple(chunks))
    return index


def _are_equal(folder: Path, tensors: Sequence[tuple[str, TensorMetadata]]) -> bool:
    """Return whether two stored matrices have the same shape, dtype and bits. tensors: name in the files, and metadata. Raises
    CorruptError."""
    read_a, read_b = (partial(read_rows, folder, *tensor) for tensor in tensors)
    (_, a), (_, b) = tensors
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    chunks = ((start, min(start + _ROWS, a.shape[0])) for start in range(0, a.shape[0], _ROWS))
    return all(torch.equal(read_a(*rows).view(torch.uint8), read_b(*rows).view(torch.uint8)) for rows in chunks)


@dataclass(frozen=True, kw_only=True)
class HuggingFaceWeights(Weights):
    """The weights in a folder in Hugging Face's format."""

    keys: Mapping[str, str]
    """Name of a tensor of the text model -> its name in the files."""
    packed: Mapping[str, PackedStack]
    """Name in the files -> tensor that is stored in the format MXFP4."""
    scaled: Mapping[str, fp8_blocks.ScaledMatrix]
    """Name in the files -> matrix that is stored in the format FP8."""
    ignored: Collection[str]
    """Modules and tensors that are not part of the model, although the files have them."""

    @classmethod
    def open(cls, folder: Path, spec: ModelSpec | None = None, alone: bool = False) -> "HuggingFaceWeights":
        """Check the folder.

        Args:
            folder: The folder.
            spec: Expected model family, or None for any family.
            alone: See Weights.

        Raises:
            ConfigError: The folder contains no model in this format, a model of another architecture, or tensors that are not
                those of the model.
        """
        require(folder, "huggingface")
        with manifest.damage_as_config_error(folder):
            described = read_config(folder / "config.json", spec)
            stored, packed, scaled = _decoded_tensors(folder, described)
            keys = _text_names(stored)
            ignored = _other_modules(stored.keys() - keys.values())
            hf, sizes = described.spec.huggingface, described.sizes
            keys = {name_from_files(hf, sizes, name): key for name, key in keys.items()}
            for copy, module in prediction_copies(hf, sizes).items():
                if (key := keys.pop(f"{copy}.weight", None)) is not None:
                    original = keys.get(stored_name(hf, f"{module}.weight"), key)
                    if not _are_equal(folder, [(name, stored[name]) for name in (key, original)]):
                        raise CorruptError(f"{key} differs from {original}: such prediction layers are not supported")
            count = stored_prediction_layers(keys, sizes)
            if count == 0:
                described = replace(described, sizes=sizes.without_prediction())  # transformers does not write them
            elif count != (expected := len(sizes.predictions)):
                field = f"config.json has {key_of(hf, 'prediction_layers', described.config)} {expected}"
                raise CorruptError(f"{field}, but the files have {counted(count, 'layer')} for multi-token prediction")
            weights = saved_weights(meta_model(described.spec.model, described.sizes))
            keys = own_names(hf, keys, by_matrix(hf, weights))
            if problem := _other_number_of_experts(described, {name: stored[key] for name, key in keys.items()}):
                raise ConfigError("", f"cannot load {folder}: {problem}")
            index = _weight_index(folder, described.spec, described.sizes, keys, stored)
        return cls(
            folder=folder,
            model=described.metadata(folder),
            spec=described.spec,
            sizes=described.sizes,
            index=index,
            alone=alone,
            text_model="model.language_model" if "text_config" in described.config else TEXT_MODEL,
            keys=keys,
            packed=packed,
            scaled=scaled,
            ignored=ignored,
        )

    def read(self, name: str, region: Region, out: Tensor) -> None:
        read_regions(self.folder, {name: self.index[name]}, {name: (out, region)}, self._read_chunk)

    def is_mxfp4(self, name: str) -> bool:
        hf = self.spec.huggingface
        return stack_of(hf, name) is not None and self.keys[stored_name(hf, name)] in self.packed

    def digest(self) -> str:
        """Return a hash of the content of the weight files. Each rank reads some of them. Raises OSError."""
        files = self._weight_files()
        rank, ranks = (0, 1) if self.alone else (dist.get_rank(), dist.get_world_size())
        own = [(file, digest_of(self.folder / file)) for file in files[rank::ranks]]
        digests = [own] if self.alone else all_gather_objects(own)
        return digest(json.dumps(sorted(chain(*digests))).encode())

    def files(self) -> str:
        files = self._weight_files()
        read = files[0] if len(files) == 1 else f"{len(files)} files, {files[0]} to {files[-1]}"
        unread = ", ".join([*unread_weights(self.folder), *self.ignored])
        return f"{read}{f'; not {unread}' if unread else ''}"

    def content(self, name: str) -> bytes:
        return manifest.read_bytes(file_inside(self.folder, name), LARGEST_JSON)

    def template_file(self) -> Path | None:
        return template_file(self.folder)

    def _weight_files(self) -> list[str]:
        """Return the names of the files with weights that are read."""
        files = {chunk.file for stored in self.index.values() for chunk in stored.chunks}
        return sorted(files | {tensor.scales_file for tensor in (*self.packed.values(), *self.scaled.values())})

    @cached_property
    def _first_rows(self) -> Mapping[str, int]:
        """Return name of a matrix -> its first row in the stored tensor. See HuggingFace.name."""
        hf, model = self.spec.huggingface, meta_model(self.spec.model, self.sizes)
        return first_rows(hf, by_matrix(hf, saved_weights(model)))

    def _read_chunk(self, tensors: Any, key: str, ranges: Region) -> Tensor:
        """Read ranges of a parameter from an open file, in the row order of this project. If the rows are permuted for RoPE,
        complete heads are read. key: of a chunk of the parameter (Chunk.key)."""
        name, _, offsets = key.partition("@")
        if is_stacked(self.spec.huggingface, name):
            expert = int(offsets.split(",")[0] or 0)  # a single expert is the full stack, without offsets
            return self._read_matrix(tensors, f"{name}@{expert}", ranges[1:])[None]
        return self._read_matrix(tensors, name, ranges)

    def _read_matrix(self, tensors: Any, name: str, ranges: Region) -> Tensor:
        hf, head_dim = self.spec.huggingface, self.sizes.head_dim
        if (stack := stack_of(hf, name)) is not None:
            return self._read_stacked(tensors, name, stack, *ranges)
        key, group = self.keys[stored_name(hf, name)], head_dim if is_permuted(hf, name) else 1
        start, stop = (row + self._first_rows[name] for row in (ranges[0].start, ranges[0].stop))
        first, last = start // group * group, -(-stop // group) * group
        if len(dims := stored_shape(hf, name, ())) > 1:  # a vector with more dims
            key_ranges = tuple(slice(0, 1) if size == 1 else ranges[0] for size in dims)
            return self._read_stored(tensors, key, key_ranges).flatten()
        rows = restore_rows(hf, name, self._read_stored(tensors, key, (slice(first, last), *ranges[1:])), head_dim)
        return rows[start - first : stop - first]

    def _read_stored(self, tensors: Any, key: str, ranges: Region) -> Tensor:
        """Return ranges of a stored tensor. key: name in the files."""
        values = tensors.get_slice(key)[ranges]
        if (matrix := self.scaled.get(key)) is None:
            return values
        with open_tensors(self.folder / matrix.scales_file) as others:
            return fp8_blocks.decode(values, others.get_tensor(matrix.scales), matrix.block, *ranges)

    def _read_stacked(
        self, tensors: Any, name: str, stack: StoredStack, rows: slice, columns: slice | None = None
    ) -> Tensor:
        """Read rows of a matrix, or of a vector without columns, of one expert in a stored stack."""
        key, expert = self.keys[stored_name(self.spec.huggingface, name)], int(name.partition("@")[2])
        own = slice(expert, expert + 1)
        rows = slice(rows.start * stack.step, rows.stop * stack.step)  # with those of other parameters
        if key in self.packed:
            return self._read_packed(tensors, self.packed[key], own, rows, columns)[stack.first :: stack.step]
        ranges = (rows,) if columns is None else (columns, rows) if stack.transposed else (rows, columns)
        return stack.rows(tensors.get_slice(key)[(own, *ranges)][0])

    def _read_packed(self, tensors: Any, stack: PackedStack, own: slice, rows: slice, columns: slice) -> Tensor:
        """Return a part of one matrix, (rows, columns), bf16."""
        groups = slice(columns.start // GROUP, -(-columns.stop // GROUP))
        blocks = tensors.get_slice(stack.blocks)[own, rows, groups][0]
        with open_tensors(self.folder / stack.scales_file) as others:
            scales = others.get_slice(stack.scales)[own, rows, groups][0]
        first = groups.start * GROUP
        return decode(blocks, scales)[:, columns.start - first : columns.stop - first]

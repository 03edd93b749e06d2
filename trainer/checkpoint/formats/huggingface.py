"""Models in Hugging Face's format: safetensors files and config.json. Each rank reads only its own shards."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models import MODELS
from models.config_json import text_config
from models.huggingface import StoredStack, text_name
from models.sizes import text_of
from models.spec import ModelSpec, meta_model, saved_weights
from trainer.base.config import ConfigError
from trainer.base.system.checkpoint_folder import is_checkpoint
from trainer.base.system.files import LARGEST_JSON, TooLarge, folder_error, read_json_object
from trainer.base.system.model_folder import folder_problem, pointer_problem, quantization_problem, weights_problem
from trainer.base.system.paths import unreadable
from trainer.base.system.spelling import similar_path
from trainer.checkpoint import manifest
from trainer.checkpoint.formats import fp8
from trainer.checkpoint.formats.model_metadata import GENERATION_CONFIG, ModelMetadata, require_parameters
from trainer.checkpoint.formats.mxfp4 import GROUP, PackedStack, decode, packed_stacks
from trainer.checkpoint.manifest import CorruptError
from trainer.checkpoint.storage import DTYPE_OF, Chunk, TensorMetadata, read_rows

_ROWS = 4096
"""Maximum number of rows to compare at once."""


def window_and_generation(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return the context window and the generation_config.json of the model in a checkpoint or in a Hugging Face folder. If that
    file is missing or names no eos_token_id or pad_token_id, the model's configuration does. Raises ConfigError."""
    with manifest.damage_as_config_error(folder):
        file = folder / GENERATION_CONFIG
        generation = read_object(file) if file.exists() else {}
        if is_checkpoint(folder):
            model = ModelMetadata.read(folder)
            ids, window = model.special_token_ids, model.context_window
        else:
            require_model_folder(folder)
            described = _read_config(folder / "config.json")
            ids, window = described.config, described.seq_len
        missing = [key for key in ("eos_token_id", "pad_token_id") if generation.get(key) is None]
        return window, generation | {key: ids[key] for key in missing if ids.get(key) is not None}


def file_inside(folder: Path, name: Any) -> Path:
    """Return the path of a file in the folder. Raises CorruptError if the name is not a plain file name, or if the file is
    a symbolic link to a path outside the folder. Links to the blobs of Hugging Face's cache are allowed."""
    path = folder / manifest.require_plain_filename(name, "the index")
    # Path.resolve raises RuntimeError for a loop of links (Python 3.11). A loop ends in an error when the file is opened.
    target, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    blobs = home.parent.parent / "blobs"
    if not (target.is_relative_to(home) or (home.parent.name == "snapshots" and target.is_relative_to(blobs))):
        raise CorruptError(f"{name} is a symbolic link to a path outside the folder")
    return path


def require_model_folder(folder: Path) -> None:
    """Raise ConfigError if the path is not a folder with a model in Hugging Face's format, as far as the names and sizes of its
    files show it."""
    if problem := folder_error(folder):
        raise ConfigError("", f"{folder}: {problem}")
    if problem := folder_problem(folder):
        raise ConfigError("", f"{folder} {problem}")
    if not os.path.exists(folder / "config.json"):
        raise ConfigError("", f"{folder}: this folder is not a Hugging Face model, because it has no config.json")


def _stored_tensors(folder: Path, with_fp8: bool) -> dict[str, TensorMetadata]:
    """Return tensor name in Hugging Face's format -> dtype, shape and file. with_fp8: whether tensors may be float8."""
    dtypes = DTYPE_OF | {"F8_E4M3": fp8.VALUES} if with_fp8 else DTYPE_OF
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


def _other_number_of_experts(model: "_DescribedModel", stored: Mapping[str, TensorMetadata]) -> str:
    """Return the problem if all routers have another number of experts than config.json, or "". stored: by name in the text
    model."""
    sizes, hf = model.sizes, model.spec.huggingface
    if "feed_forward.router" not in hf.names:
        return ""
    routers = [f"layers.{i}.feed_forward.router.weight" for i in range(sizes.n_layers)]
    shapes = [stored[name].shape for name in map(hf.name, routers) if name in stored]
    numbers = {shape[0] for shape in shapes if shape}
    if len(numbers) != 1 or numbers == {sizes.n_experts}:
        return ""
    key = hf.key_of("n_experts", model.config)
    value = f"{key} {sizes.n_experts}"
    if model.config.get(key) is None:
        value = f"no {key}, whose default is {sizes.n_experts}"
    return f"config.json has {value}, but the files have {numbers.pop()} experts in each layer"


def _text_names(stored: Collection[str]) -> dict[str, str]:
    """Return the name of each tensor of the text model -> its name in the files. stored: names in the files."""
    if any(name.startswith("model.layers.") for name in stored):
        return {name: name for name in stored}
    return {inner: name for name in stored if (inner := text_name(name)) is not None}  # a multimodal model


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
    expected = hf.join(parameters, sizes.head_dim)
    originals = {parameter: name for name, parameter in parameters.items()}
    every = model.named_parameters(remove_duplicate=False)
    tied = {hf.name(name): parameter for name, parameter in every if name not in parameters}
    tied = {name: parameter for name, parameter in tied.items() if name in stored}
    require_parameters(folder, stored, expected | tied)
    for name, parameter in tied.items():
        original = hf.name(originals[parameter])
        if not _are_equal(folder, [(keys[n], stored[n]) for n in (name, original)]):
            raise CorruptError(f"{name} differs from {original}, but config.json ties the two tensors")
    index = {}
    for name, parameter in parameters.items():
        shape = tuple(parameter.shape)
        tensors = [stored[hf.name(matrix)] for matrix in hf.matrices({name: parameter})]
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            raise CorruptError(f"{hf.name(f'{name}@0')} and the same tensor of other experts have different dtypes")
        size = (shape[0] // len(tensors), *shape[1:])  # one matrix of a stack, or all rows
        chunks = (Chunk(t.chunks[0].file, (i, *(0,) * len(shape[1:])), size) for i, t in enumerate(tensors))
        index[name] = TensorMetadata(tensors[0].dtype, shape, tuple(chunks))
    return index


def _are_equal(folder: Path, tensors: Sequence[tuple[str, TensorMetadata]]) -> bool:
    """Return whether two stored tensors of the same shape have the same dtype and content. tensors: name in the files, and
    metadata. Raises CorruptError."""
    read_a, read_b = (partial(read_rows, folder, *tensor) for tensor in tensors)
    (_, a), (_, b) = tensors
    chunks = ((start, min(start + _ROWS, a.shape[0])) for start in range(0, a.shape[0], _ROWS))
    return a.dtype == b.dtype and all(torch.equal(read_a(*rows), read_b(*rows)) for rows in chunks)


TEXT_MODEL = "model"
"""Name of the text model among the modules of transformers' classes for models without other modalities."""


@dataclass(frozen=True, kw_only=True)
class HfModelFolder:
    """A folder with a model in Hugging Face format."""

    folder: Path
    config: Mapping[str, Any]
    """Content of config.json."""
    spec: ModelSpec
    sizes: Any
    seq_len: int
    keys: Mapping[str, str]
    """Name of a tensor of the text model -> its name in the files."""
    packed: Mapping[str, PackedStack]
    """Name in the files -> tensor that is stored in the format MXFP4."""
    scaled: Mapping[str, fp8.ScaledMatrix]
    """Name in the files -> matrix that is stored in the format FP8."""
    index: Mapping[str, TensorMetadata]
    """Name of a parameter or buffer of this project -> dtype, shape and file."""
    ignored: Collection[str] = ()
    """Modules that are not part of the model, although the files have their tensors."""

    @classmethod
    def open(cls, folder: Path, spec: ModelSpec | None = None) -> "HfModelFolder":
        """Check the folder. spec: expected model family, or None for any family. Raises ConfigError if the folder contains no
        model in this format, a model of another architecture, or tensors that are not those of the model."""
        require_model_folder(folder)
        with manifest.damage_as_config_error(folder):
            model = _read_config(folder / "config.json", spec)
            block = fp8.block_size(model.config)
            quantizations = {*model.spec.huggingface.quantizations, *["fp8"] * (block is not None)}
            if problem := quantization_problem(model.config, quantizations) or weights_problem(folder):
                raise ConfigError("", f"{folder} {problem}")
            stored = _stored_tensors(folder, with_fp8=block is not None)
            scaled = {} if block is None else fp8.scaled_matrices(stored, block)
            packed = packed_stacks(stored) if "mxfp4" in quantizations else {}
            if packed and not model.config.get("quantization_config"):
                first = next(iter(packed.values()))
                problem = f"{first.blocks} has the format MXFP4, but config.json has no quantization_config"
                raise ConfigError("", f"cannot load {folder}: {problem}")
            parts = {name for stack in packed.values() for name in (stack.blocks, stack.scales)}
            parts |= {matrix.scales for matrix in scaled.values()}
            stored = {name: tensor for name, tensor in stored.items() if name not in parts}
            stored |= {name: tensor.decoded for name, tensor in (packed | scaled).items()}
            keys = _text_names(stored)
            ignored = [module for module in model.skipped if any(key.startswith(f"{module}.") for key in keys)]
            prefixes = tuple(f"{module}." for module in ignored)
            keys = {name: key for name, key in keys.items() if not name.startswith(prefixes)}
            if problem := _other_number_of_experts(model, {name: stored[key] for name, key in keys.items()}):
                raise ConfigError("", f"cannot load {folder}: {problem}")
            index = _weight_index(folder, model.spec, model.sizes, keys, stored)
        return cls(
            folder=folder,
            config=model.config,
            spec=model.spec,
            sizes=model.sizes,
            seq_len=model.seq_len,
            keys=keys,
            packed=packed,
            scaled=scaled,
            index=index,
            ignored=ignored,
        )

    @property
    def text_model(self) -> str:
        """Name of the text model among the modules of transformers' class for this folder, from version 4.52 on."""
        return "model.language_model" if "text_config" in self.config else TEXT_MODEL

    def files(self) -> list[str]:
        """Return the names of the files with weights that are read."""
        files = {chunk.file for stored in self.index.values() for chunk in stored.chunks}
        return sorted(files | {tensor.scales_file for tensor in (*self.packed.values(), *self.scaled.values())})

    @cached_property
    def first_rows(self) -> Mapping[str, int]:
        """Return name of a matrix -> its first row in the stored tensor. See HuggingFace.name."""
        hf, model = self.spec.huggingface, meta_model(self.spec.model, self.sizes)
        return hf.first_rows(hf.matrices(saved_weights(model)))

    def content(self, name: str) -> bytes:
        """Return the content of a small file of the folder. Raises ConfigError."""
        with manifest.damage_as_config_error(self.folder):
            return manifest.read_bytes(file_inside(self.folder, name), LARGEST_JSON)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows [start, stop) of a parameter, in the row order of this project. Raises CorruptError."""
        return read_rows(self.folder, name, self.index[name], start, stop, self.read)

    def read(self, tensors: Any, key: str, ranges: tuple[slice, ...]) -> Tensor:
        """Read ranges of a parameter from an open file, in the row order of this project. If the rows are permuted for RoPE,
        complete heads are read. key: of a chunk of the parameter (Chunk.key), with or without the prefix model/."""
        name, _, offsets = key.removeprefix("model/").partition("@")
        if self.spec.huggingface.is_stack(name):
            expert = int(offsets.split(",")[0] or 0)  # a single expert is the full stack, without offsets
            return self._read_matrix(tensors, f"{name}@{expert}", ranges[1:])[None]
        return self._read_matrix(tensors, name, ranges)

    def _read_matrix(self, tensors: Any, name: str, ranges: tuple[slice, ...]) -> Tensor:
        hf, head_dim = self.spec.huggingface, self.sizes.head_dim
        if (stack := hf.stack_of(name)) is not None:
            return self._read_stacked(tensors, name, stack, *ranges)
        key, group = self.keys[hf.name(name)], head_dim if hf.is_permuted(name) else 1
        start, stop = (row + self.first_rows[name] for row in (ranges[0].start, ranges[0].stop))
        first, last = start // group * group, -(-stop // group) * group
        rows = hf.restore(name, self._read_stored(tensors, key, (slice(first, last), *ranges[1:])), head_dim)
        return rows[start - first : stop - first]

    def _read_stored(self, tensors: Any, key: str, ranges: tuple[slice, ...]) -> Tensor:
        """Return ranges of a stored tensor. key: name in the files."""
        values = tensors.get_slice(key)[ranges]
        if (matrix := self.scaled.get(key)) is None:
            return values
        with open_tensors(self.folder / matrix.scales_file) as others:
            return fp8.decode(values, others.get_tensor(matrix.scales), matrix.block, *ranges)

    def _read_stacked(
        self, tensors: Any, name: str, stack: StoredStack, rows: slice, columns: slice | None = None
    ) -> Tensor:
        """Read rows of a matrix, or of a vector without columns, of one expert in a stored stack."""
        key, expert = self.keys[self.spec.huggingface.name(name)], int(name.partition("@")[2])
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


def read_object(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a folder in Hugging Face's format. Raises ConfigError."""
    with manifest.damage_as_config_error(file.parent):
        path = file_inside(file.parent, file.name)
    try:
        return read_json_object(path)
    except OSError as error:
        raise ConfigError("", unreadable(error, str(path))) from None
    except TooLarge as problem:
        raise ConfigError("", f"{file} {problem}") from None
    except ValueError:
        raise ConfigError("", f"{file} is not a JSON object") from None


@dataclass(frozen=True)
class _DescribedModel:
    """The text model that a config.json describes."""

    config: Mapping[str, Any]
    """The fields about this model."""
    spec: ModelSpec
    """The first family with the model's type."""
    sizes: Any
    seq_len: int
    """Context window."""
    skipped: Collection[str]
    """Modules in the files that are not part of the model."""


def _read_config(file: Path, expected: ModelSpec | None = None) -> _DescribedModel:
    """Read a config.json. expected: the only accepted family. Raises ConfigError."""
    config = text_config(read_object(file))
    families = reversed(MODELS.values()) if expected is None else (expected,)
    types = {spec.huggingface.model_type: spec for spec in families}
    model_type = config.get("model_type", None if expected is None else expected.huggingface.model_type)
    try:
        if not isinstance(model_type, str) or model_type not in types:
            only = f"this model supports only {text_of(next(iter(types)))}"
            supported = only if expected else f"expected one of {', '.join(types)}"
            raise ValueError(f"model_type {text_of(model_type)}: {supported}")
        spec, hf = types[model_type], types[model_type].huggingface
        sizes = hf.sizes(config)
        return _DescribedModel(config, spec, sizes, hf.seq_len(config), hf.skipped(config, sizes))
    except ValueError as error:
        raise ConfigError("", f"{file}: {error}") from None


def family_of(spec: ModelSpec, sizes: Any) -> str:
    """Return the name of the first family with these sizes among those that share the format of `spec`, or of the first such
    family."""
    families = [name for name, other in MODELS.items() if other.huggingface is spec.huggingface]
    return next((name for name in families if sizes in MODELS[name].sizes.values()), families[0])


def read_architecture(path: Path) -> tuple[str, Any]:
    """Return the name of the family and the sizes of a model. path: of a checkpoint, of a folder in Hugging Face's format, or of
    its config.json. Raises ConfigError."""
    if not path.exists():
        raise ConfigError("", f"no such file or folder{similar_path(path)}")
    if is_checkpoint(path):
        with manifest.damage_as_config_error(path):
            metadata = ModelMetadata.read(path)
            return metadata.family, metadata.spec_and_sizes()[1]
    # The user may name a link to a file, but the files of a folder may not be links out of it.
    file = path / "config.json" if path.is_dir() else Path(os.path.realpath(path))
    if path.is_dir():
        require_model_folder(path)
    if problem := pointer_problem(file):
        raise ConfigError("", problem)
    model = _read_config(file)
    return family_of(model.spec, model.sizes), model.sizes


def open_tensors(path: Path) -> Any:
    """Open a safetensors file. Raises ConfigError."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError("", f"{path}: {error}") from None

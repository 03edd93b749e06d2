"""Hugging Face's model format: safetensors files, config.json and tokenizer files. Tensors are streamed in chunks of rows,
so memory use does not grow with the size of the model. Each rank reads only its own shards."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models import MODELS
from models.spec import ModelSpec, SizeError
from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import CorruptError, Manifest
from trainer.checkpoint.storage import (
    DTYPE_OF,
    INDEX,
    Chunk,
    TensorMetadata,
    TensorWrite,
    index_text,
    write_safetensors,
)
from trainer.config import ConfigError
from trainer.data.tokenizer.backends import COMPANION_FILES
from trainer.system.files import atomic_folder, folder_error, parse_json_object

MODEL_FILE = "model.json"
"""Name of the file in a checkpoint that describes the model and lists the tokenizer files."""
CHAT_TEMPLATE = "chat_template.jinja"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", *COMPANION_FILES)
_CHUNK_BYTES = 2**25
_LARGEST_JSON = 2**28

Progress = Callable[[int], None]
"""Callback that receives the number of bytes written since the previous call."""


@dataclass(frozen=True)
class ModelMetadata:
    """Content of model.json."""

    family: str
    sizes: Mapping[str, Any]
    seq_len: int
    tokenizer: str
    """Tokenizer backend of the run, or "" for an imported model, which keeps its Hugging Face tokenizer files."""
    tokenizer_files: tuple[str, ...]
    special_token_ids: Mapping[str, Any]
    """Values of bos_token_id and eos_token_id in Hugging Face's configuration files."""
    reuse_reserved_tokens: Mapping[str, str]
    """Setting [tokenizer] reuse_reserved_tokens of the run."""
    extra_special_tokens: tuple[str, ...]
    """Setting [tokenizer] extra_special_tokens of the run."""

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, checkpoint: Path) -> "ModelMetadata":
        """Read model.json of a checkpoint. Raises CorruptError."""
        try:
            values = parse_json_object(manifest.read_text(checkpoint / MODEL_FILE, _LARGEST_JSON))
            for setting in ("tokenizer_files", "extra_special_tokens"):
                values[setting] = tuple(values[setting])
            for name in values["tokenizer_files"]:
                manifest.require_plain_filename(name, MODEL_FILE)
            return cls(**values)
        except (ValueError, TypeError, KeyError):
            raise CorruptError(f"{MODEL_FILE} does not describe a model") from None

    def spec_and_sizes(self) -> tuple[ModelSpec, Any]:
        """Return the model's family and sizes. Raises CorruptError."""
        if self.family not in MODELS:
            raise CorruptError(f"unknown model family {self.family}; available: {', '.join(MODELS)}")
        spec = MODELS[self.family]
        try:
            return spec, type(next(iter(spec.sizes.values())))(**self.sizes)
        except (SizeError, TypeError) as error:
            raise CorruptError(f"{MODEL_FILE}: {error}") from None


# ---------------------------------------------------------------- reading


class HfModelFolder:
    """A folder with a model in Hugging Face format."""

    def __init__(self, folder: Path, spec: ModelSpec):
        """Raises ConfigError if the folder contains no model in this format, or a model of another architecture."""
        self.folder = folder
        self.spec = spec
        if not os.path.exists(folder / "config.json"):
            message = folder_error(folder) or "this folder is not a Hugging Face model, because it has no config.json"
            raise ConfigError("", f"{folder}: {message}")
        try:
            self.config = self._json("config.json")
            self.sizes = spec.huggingface.sizes(self.config)
            self.files = self._files()
        except CorruptError as damage:
            raise ConfigError("", f"{folder}: {damage}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError("", f"{folder}/config.json: {error}") from None

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return parse_json_object(manifest.read_text(self._inside(name), _LARGEST_JSON))
        except ValueError:
            raise CorruptError(f"{name} is not a JSON object") from None

    def _inside(self, name: Any) -> Path:
        """Return the path of a file in the folder. Raises CorruptError if the name is not a plain file name, or if the file is
        a symbolic link to a path outside the folder. Links to the blobs of Hugging Face's cache are allowed."""
        path = self.folder / manifest.require_plain_filename(name, "the index")
        target, home = path.resolve(), self.folder.resolve()
        blobs = home.parent.parent / "blobs"
        if not (target.is_relative_to(home) or (home.parent.name == "snapshots" and target.is_relative_to(blobs))):
            raise CorruptError(f"{name} is a symbolic link to a path outside the folder")
        return path

    def content(self, name: str) -> bytes:
        """Return the content of a small file of the folder. Raises ConfigError."""
        try:
            return manifest.read_bytes(self._inside(name), _LARGEST_JSON)
        except CorruptError as damage:
            raise ConfigError("", f"{self.folder}: {damage}") from None

    def _files(self) -> dict[str, Path]:
        """Return tensor name in Hugging Face's format -> path of the file that contains the tensor."""
        if (self.folder / "model.safetensors.index.json").exists():
            weights = self._json("model.safetensors.index.json").get("weight_map")
            if not isinstance(weights, dict):
                raise CorruptError("model.safetensors.index.json has no weight_map")
            return {name: self._inside(file) for name, file in weights.items()}
        path = self._inside("model.safetensors")
        with _open_tensors(path) as tensors:
            return dict.fromkeys(tensors.keys(), path)

    def index(self, names: Iterable[str]) -> dict[str, TensorMetadata]:
        """Return parameter name of this project -> dtype, shape and chunks. Raises ConfigError for missing parameters."""
        index = {}
        for name in names:
            hf_name = self.spec.huggingface.name(name)
            if hf_name not in self.files:
                raise ConfigError("", f"{self.folder} contains no tensor {hf_name}")
            path = self.files[hf_name]
            with _open_tensors(path) as tensors:
                try:
                    tensor = tensors.get_slice(hf_name)
                    shape, dtype = tuple(tensor.get_shape()), DTYPE_OF[tensor.get_dtype()]
                except (SafetensorError, KeyError) as error:
                    raise ConfigError("", f"{path}: cannot read {hf_name}: {error}") from None
            index[name] = TensorMetadata(dtype, shape, (Chunk(path.name, (0,) * len(shape), shape),))
        return index

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows [start, stop) of a parameter, in the row order of this project."""
        with _open_tensors(self.files[self.spec.huggingface.name(name)]) as tensors:
            return self.read(tensors, name, (slice(start, stop),))

    def read(self, tensors: Any, key: str, ranges: tuple[slice, ...]) -> Tensor:
        """Read ranges of a parameter from an open file, in the row order of this project. If the rows are permuted for RoPE,
        complete heads are read. key: name of the parameter, with or without the prefix model/."""
        name, head_dim = key.removeprefix("model/"), self.sizes.head_dim
        tensor = tensors.get_slice(self.spec.huggingface.name(name))
        if not self.spec.huggingface.is_rope_permuted(name):
            return tensor[ranges]
        start, stop = ranges[0].start, ranges[0].stop
        first, last = start // head_dim * head_dim, -(-stop // head_dim) * head_dim
        rows = self.spec.huggingface.permute_from_hf(tensor[(slice(first, last), *ranges[1:])], head_dim)
        return rows[start - first : stop - first]


def _open_tensors(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError("", f"{path}: {error}") from None


# ---------------------------------------------------------------- writing


def read_in_chunks(
    read: Callable[[int, int], Tensor], shape: tuple[int, ...], dtype: torch.dtype, head_dim: int, progress: Progress
) -> Iterator[Tensor]:
    """Yield a tensor in chunks of rows. Chunks of about _CHUNK_BYTES never split a head. read: returns rows [start, stop)."""
    row_bytes = max(1, torch.Size(shape[1:]).numel() * dtype.itemsize)
    num_rows = max(1, _CHUNK_BYTES // row_bytes // head_dim) * head_dim
    for start in range(0, shape[0], num_rows):
        chunk = read(start, min(start + num_rows, shape[0])).to(dtype)
        yield chunk
        progress(chunk.numel() * dtype.itemsize)


def group_by_file(entries: list[TensorWrite], max_bytes: int) -> list[list[TensorWrite]]:
    """Group tensors, in order, into files of at most max_bytes each. A tensor larger than max_bytes gets its own file."""
    groups: list[list[TensorWrite]] = [[]]
    for entry in entries:
        if groups[-1] and sum(e.num_bytes for e in groups[-1]) + entry.num_bytes > max_bytes:
            groups.append([])
        groups[-1].append(entry)
    return groups


def layer_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that places layer 10 after layer 9."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]


def require_empty(folder: Path) -> None:
    """Raise ConfigError if the folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("", f"{folder} exists and is not an empty folder; choose another path")


def import_folder(
    folder: HfModelFolder, family: str, names: Iterable[str], out: Path, shard_bytes: int, progress: Progress
) -> None:
    """Write the model and tokenizer of a Hugging Face folder as a checkpoint. Weights keep their stored precision. names: names
    of all parameters. Raises ConfigError if `out` is not empty or a parameter is missing."""
    entries = []
    for name, stored in folder.index(sorted(names, key=layer_order)).items():
        dtype, shape, read = stored.dtype, stored.shape, partial(folder.rows, name)
        pieces = partial(read_in_chunks, read, shape, dtype, folder.sizes.head_dim, progress)
        entries.append(TensorWrite(f"model/{name}", dtype, shape, pieces))
    require_empty(out)
    with atomic_folder(out) as unfinished:
        files, stored = {}, {}
        for i, group in enumerate(group_by_file(entries, shard_bytes)):
            file = f"model-{i:05d}.safetensors"
            files[file] = write_safetensors(unfinished / file, group, {})
            stored |= {
                e.name: TensorMetadata(e.dtype, e.shape, (Chunk(file, (0,) * len(e.shape), e.shape),)) for e in group
            }
        tokenizer_files = [name for name in _TOKENIZER_FILES if (folder.folder / name).exists()]
        seq_len = int(folder.config.get("max_position_embeddings", 2048))
        ids = {key: folder.config[key] for key in ("bos_token_id", "eos_token_id") if key in folder.config}
        model = ModelMetadata(family, asdict(folder.sizes), seq_len, "", tuple(tokenizer_files), ids, {}, ())
        contents = {INDEX: index_text(stored).encode(), MODEL_FILE: model.text().encode()}
        contents |= {name: folder.content(name) for name in tokenizer_files}
        for name, content in contents.items():
            files[name] = manifest.write_file(unfinished / name, content)
        manifest.write(unfinished, Manifest(files, {"from": str(folder.folder)}))

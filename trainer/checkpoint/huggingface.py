"""Models leave for, and come from, Hugging Face's format: safetensors files, config.json, tokenizer files. Nothing is ever
in memory as a whole: tensors stream through in blocks of rows, and a rank reads no more than its shards."""

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
    ShardReader,
    TensorMetadata,
    TensorWrite,
    index_text,
    read_index,
    read_rows,
    write_safetensors,
)
from trainer.config import ConfigError
from trainer.system.files import atomic_folder, folder_error, parse_json_object

MODEL_FILE = "model.json"
"""In a checkpoint: what the network is, and which of the files are its tokenizer's."""
CHAT_TEMPLATE = "chat_template.jinja"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
)
_SOURCE = "meshwright_checkpoint"
"""In the header of exported weights: digest of the manifest of the checkpoint that they are from."""
_BLOCK_BYTES = 2**25
_LARGEST_JSON = 2**28

Progress = Callable[[int], None]
"""Called with the bytes that were written."""


@dataclass(frozen=True)
class ModelMetadata:
    """The content of model.json."""

    family: str
    sizes: Mapping[str, Any]
    seq_len: int
    tokenizer: str
    """Kind of the tokenizer; "" where there are files of Hugging Face's only, or none."""
    tokenizer_files: tuple[str, ...]
    special_token_ids: Mapping[str, Any]
    """bos_token_id, eos_token_id."""
    reuse_reserved_tokens: Mapping[str, str]
    extra_special_tokens: tuple[str, ...]
    """Both as in TokenizerConfig."""

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, checkpoint: Path) -> "ModelMetadata":
        """Raises CorruptError."""
        try:
            values = parse_json_object(manifest.read_text(checkpoint / MODEL_FILE, _LARGEST_JSON))
            files = tuple(values["tokenizer_files"])
            for name in files:
                manifest.require_plain_filename(name, MODEL_FILE)
            return cls(
                **values | {"tokenizer_files": files, "extra_special_tokens": tuple(values["extra_special_tokens"])}
            )
        except (ValueError, TypeError, KeyError):
            raise CorruptError(f"{MODEL_FILE} does not describe a model") from None

    def spec_and_sizes(self) -> tuple[ModelSpec, Any]:
        """Its family and sizes. Raises CorruptError."""
        if self.family not in MODELS:
            raise CorruptError(f"is a {self.family}, which is none of {', '.join(MODELS)}")
        spec = MODELS[self.family]
        try:
            return spec, type(next(iter(spec.sizes.values())))(**self.sizes)
        except (SizeError, TypeError) as error:
            raise CorruptError(f"{MODEL_FILE}: {error}") from None


# ---------------------------------------------------------------- a folder of theirs


class HfModelFolder:
    """A model as Hugging Face's libraries write it."""

    def __init__(self, folder: Path, spec: ModelSpec):
        """Raises ConfigError for what is no such model, or another network."""
        self.folder = folder
        self.spec = spec
        if not os.path.exists(folder / "config.json"):
            raise ConfigError(
                "", f"{folder}: {folder_error(folder) or 'is no model of Hugging Face (it has no config.json)'}"
            )
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
        """A file of the folder. Its cache keeps files as links into a folder of blobs beside that of snapshots; links to
        anywhere else, and names that lead elsewhere, are refused."""
        path = self.folder / manifest.require_plain_filename(name, "it")
        target, home = path.resolve(), self.folder.resolve()
        blobs = home.parent.parent / "blobs"
        if not (target.is_relative_to(home) or (home.parent.name == "snapshots" and target.is_relative_to(blobs))):
            raise CorruptError(f"{name} is a link that leads elsewhere")
        return path

    def content(self, name: str) -> bytes:
        """Of a small file. Raises ConfigError."""
        try:
            return manifest.read_bytes(self._inside(name), _LARGEST_JSON)
        except CorruptError as damage:
            raise ConfigError("", f"{self.folder}: {damage}") from None

    def _files(self) -> dict[str, Path]:
        """Name there -> file."""
        if (self.folder / "model.safetensors.index.json").exists():
            weights = self._json("model.safetensors.index.json").get("weight_map")
            if not isinstance(weights, dict):
                raise CorruptError("model.safetensors.index.json has no weight_map")
            return {name: self._inside(file) for name, file in weights.items()}
        path = self._inside("model.safetensors")
        with _opened(path) as tensors:
            return dict.fromkeys(tensors.keys(), path)

    def index(self, names: Iterable[str]) -> dict[str, TensorMetadata]:
        """Our names -> where they are. Raises ConfigError for those that are not there."""
        index = {}
        for name in names:
            there = self.spec.huggingface.name(name)
            if there not in self.files:
                raise ConfigError("", f"{self.folder}: has no {there}")
            path = self.files[there]
            with _opened(path) as tensors:
                try:
                    found = tensors.get_slice(there)
                    shape, dtype = tuple(found.get_shape()), DTYPE_OF[found.get_dtype()]
                except (SafetensorError, KeyError) as error:
                    raise ConfigError("", f"{path}: {there}: {error}") from None
            index[name] = TensorMetadata(dtype, shape, (Chunk(path.name, (0,) * len(shape), shape),))
        return index

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a parameter of ours."""
        there = self.spec.huggingface.name(name)
        with _opened(self.files[there]) as tensors:
            return _permuted_rows(tensors, name, self.spec, self.sizes.head_dim, (slice(start, stop),))


def _opened(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError("", f"{path}: {error}") from None


def _permuted_rows(tensors: Any, name: str, spec: ModelSpec, head_dim: int, ranges: tuple[slice, ...]) -> Tensor:
    """A range of a parameter in our order of rows; of a parameter that is turned, whole heads are read for it."""
    found = tensors.get_slice(spec.huggingface.name(name))
    if not spec.huggingface.is_rope_permuted(name):
        return found[ranges]
    start, stop = ranges[0].start, ranges[0].stop
    first, last = start // head_dim * head_dim, -(-stop // head_dim) * head_dim
    rows = spec.huggingface.permute_from_hf(found[(slice(first, last), *ranges[1:])], head_dim)
    return rows[start - first : stop - first]


class HfReader(ShardReader):
    """For torch.distributed.checkpoint: each rank reads its shards of our parameters."""

    def __init__(self, folder: HfModelFolder, index: Mapping[str, TensorMetadata], prefix: str):
        """prefix: of the names of the index."""
        super().__init__(folder.folder, index)
        self.source = folder
        self.prefix = prefix

    def read_chunk(self, tensors: Any, name: str, chunk: Chunk, ranges: tuple[slice, ...]) -> Tensor:
        name = name.removeprefix(self.prefix)
        return _permuted_rows(tensors, name, self.source.spec, self.source.sizes.head_dim, ranges)


# ---------------------------------------------------------------- there and back


def _blocks(shape: tuple[int, ...], dtype: torch.dtype, head_dim: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of some megabytes, of whole heads."""
    row_bytes = max(1, torch.Size(shape[1:]).numel() * dtype.itemsize)
    step = max(1, _BLOCK_BYTES // row_bytes // head_dim) * head_dim
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def _pieces(
    read: Callable[[int, int], Tensor], shape: tuple[int, ...], dtype: torch.dtype, head_dim: int, progress: Progress
) -> Iterator[Tensor]:
    for start, stop in _blocks(shape, dtype, head_dim):
        piece = read(start, stop).to(dtype)
        yield piece
        progress(piece.numel() * dtype.itemsize)


def _grouped(entries: list[TensorWrite], limit: int) -> list[list[TensorWrite]]:
    """In order, into files of at most limit bytes, or of one tensor."""
    groups: list[list[TensorWrite]] = [[]]
    for entry in entries:
        if groups[-1] and sum(e.num_bytes for e in groups[-1]) + entry.num_bytes > limit:
            groups.append([])
        groups[-1].append(entry)
    return groups


def _in_order(name: str) -> list[tuple[int, str]]:
    """A key that sorts the 10th layer behind the 9th."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]


def require_empty(folder: Path) -> None:
    """Raises ConfigError if the folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("", f"{folder}: exists already")


@dataclass(frozen=True)
class Export:
    """A checkpoint on its way to Hugging Face's format."""

    checkpoint: Path
    spec: ModelSpec
    sizes: Any
    seq_len: int
    dtype: torch.dtype
    files: Mapping[str, bytes]
    """Of the tokenizer."""
    special_token_ids: Mapping[str, Any]
    """bos_token_id, eos_token_id."""

    def num_bytes(self) -> int:
        stored = read_index(self.checkpoint)
        return (
            sum(torch.Size(s.shape).numel() for n, s in stored.items() if n.startswith("model/")) * self.dtype.itemsize
        )

    def write(self, out: Path, shard_bytes: int, progress: Progress, replace: bool = False) -> None:
        """Raises ConfigError where out exists and is not to be replaced."""
        if not replace:
            require_empty(out)
        with atomic_folder(out, overwrite=True) as folder:
            self._write_weights(folder, shard_bytes, progress)
            config = self.spec.huggingface.config(self.sizes, self.seq_len)
            config |= {"torch_dtype": str(self.dtype).removeprefix("torch."), **self.special_token_ids}
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            (folder / "generation_config.json").write_text(json.dumps(dict(self.special_token_ids), indent=2) + "\n")
            for name, content in self.files.items():
                (folder / name).write_bytes(content)

    def _write_weights(self, folder: Path, shard_bytes: int, progress: Progress) -> None:
        index = {n.removeprefix("model/"): s for n, s in read_index(self.checkpoint).items() if n.startswith("model/")}
        entries = [self._entry(name, index[name], progress) for name in sorted(index, key=_in_order)]
        groups = _grouped(entries, shard_bytes)
        digest_of_source, places = manifest.digest_of(self.checkpoint / manifest.NAME), {}
        for number, group in enumerate(groups, start=1):
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
            write_safetensors(folder / file, group, {"format": "pt", _SOURCE: digest_of_source})
            places |= {entry.name: file for entry in group}
        if len(groups) > 1:
            text = {"metadata": {"total_size": sum(e.num_bytes for e in entries)}, "weight_map": places}
            (folder / "model.safetensors.index.json").write_text(json.dumps(text, indent=2) + "\n")

    def _entry(self, name: str, stored: TensorMetadata, progress: Progress) -> TensorWrite:
        head_dim = self.sizes.head_dim

        def read(start: int, stop: int) -> Tensor:
            rows = read_rows(self.checkpoint, f"model/{name}", stored, start, stop)
            return (
                self.spec.huggingface.permute_to_hf(rows, head_dim)
                if self.spec.huggingface.is_rope_permuted(name)
                else rows
            )

        pieces = partial(_pieces, read, stored.shape, self.dtype, head_dim, progress)
        return TensorWrite(self.spec.huggingface.name(name), self.dtype, stored.shape, pieces)


def is_export_of(folder: Path, checkpoint: Path) -> bool:
    """Whether the folder holds the weights of just this checkpoint."""
    try:
        with safe_open(min(folder.glob("model*.safetensors")), framework="pt") as tensors:
            about = tensors.metadata() or {}
        return about.get(_SOURCE) == manifest.digest_of(checkpoint / manifest.NAME)
    except (SafetensorError, OSError, ValueError):
        return False


def import_folder(
    folder: HfModelFolder, family: str, names: Iterable[str], out: Path, shard_bytes: int, progress: Progress
) -> None:
    """Write a checkpoint that holds a model alone, in the precision it has there. names: of our parameters. Raises
    ConfigError where out exists or something is missing."""
    index = folder.index(sorted(names, key=_in_order))
    entries = [
        TensorWrite(
            f"model/{name}",
            stored.dtype,
            stored.shape,
            partial(_pieces, partial(folder.rows, name), stored.shape, stored.dtype, folder.sizes.head_dim, progress),
        )
        for name, stored in index.items()
    ]
    require_empty(out)
    with atomic_folder(out, overwrite=True) as unfinished:
        files, stored = {}, {}
        for number, group in enumerate(_grouped(entries, shard_bytes)):
            file = f"part-{number:05d}.safetensors"
            files[file] = write_safetensors(unfinished / file, group, {})
            stored |= {
                e.name: TensorMetadata(e.dtype, e.shape, (Chunk(file, (0,) * len(e.shape), e.shape),)) for e in group
            }
        there = [name for name in _TOKENIZER_FILES if (folder.folder / name).exists()]
        longest = int(folder.config.get("max_position_embeddings", 2048))
        special_token_ids = {
            key: folder.config[key] for key in ("bos_token_id", "eos_token_id") if key in folder.config
        }
        model = ModelMetadata(family, asdict(folder.sizes), longest, "", tuple(there), special_token_ids, {}, ())
        contents = {INDEX: index_text(stored).encode(), MODEL_FILE: model.text().encode()}
        contents |= {name: folder.content(name) for name in there}
        for name, content in contents.items():
            files[name] = manifest.write_file(unfinished / name, content)
        manifest.write(unfinished, Manifest(files, {"from": str(folder.folder)}))

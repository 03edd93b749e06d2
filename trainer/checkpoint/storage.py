"""Storage of sharded tensors for torch.distributed.checkpoint: safetensors files and a JSON index. torch's own writer
uses pickles, which can run code when they are loaded.

    rank-00000.safetensors ...    chunks written by one rank: "<name>" is a full tensor, "<name>@<offsets>" a part of it
    index.json                    dtype, shape and chunks of each tensor
"""

import contextlib
import errno
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer.checkpoint.manifest import (
    CorruptError,
    File,
    read_text,
    require_plain_filename,
    verify_written,
    write_file,
)
from trainer.runtime.dtensor import to_local
from trainer.system import logging
from trainer.system.files import HashingFile

INDEX = "index.json"
_LARGEST_INDEX = 2**30

# torch dtype -> safetensors dtype (https://github.com/huggingface/safetensors, "Format").
SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPE_OF = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_NAMES}

_TRANSIENT_ERRNOS = {errno.EIO, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR}
"""File system errors after which a retry may succeed."""
_ATTEMPTS = 4


# ---------------------------------------------------------------- one safetensors file


@dataclass(frozen=True)
class TensorWrite:
    """A tensor to write to a safetensors file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Tensor]]
    """Function that yields the content in row-major order. It is called when the file is written."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: Path, entries: Iterable[TensorWrite], metadata: Mapping[str, str]) -> File:
    """Stream tensors to a file, sync the file and read it back. Raises OSError."""
    entries = list(entries)
    end, header = 0, {"__metadata__": dict(metadata)} if metadata else {}
    for entry in entries:
        start, end = end, end + entry.num_bytes
        header[entry.name] = {
            "dtype": SAFETENSORS_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with contextlib.closing(HashingFile(path)) as file:
        for block in _blocks(len(text).to_bytes(8, "little") + text, entries):
            file.write(block)
    return verify_written(path, File(**file.close()))


def _blocks(head: bytes, entries: Iterable[TensorWrite]) -> Iterator[memoryview]:
    yield memoryview(head)
    for entry in entries:
        for piece in entry.pieces():
            assert piece.dtype == entry.dtype, entry.name
            flat = piece.detach().to("cpu").contiguous().flatten()
            if flat.numel():
                yield memoryview(flat.view(torch.uint8).numpy())


def retry_transient(write: Callable[[], Any]) -> Any:
    """Call `write`, retry it after transient errors, and return its result. Raises OSError."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return write()
        except OSError as error:
            if error.errno not in _TRANSIENT_ERRNOS or attempt == _ATTEMPTS:
                raise
            logging.warning(f"{error.filename}: {error.strerror}; attempt {attempt} of {_ATTEMPTS}")
            time.sleep(0.25 * 2**attempt)
    raise AssertionError


# ---------------------------------------------------------------- saving


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, stored in one file."""

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def key(self, name: str, full_shape: tuple[int, ...]) -> str:
        return name if self.shape == full_shape else f"{name}@{','.join(map(str, self.offsets))}"


@dataclass(frozen=True)
class TensorMetadata:
    """An entry of the index: dtype, shape and chunks of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def index_text(index: Mapping[str, TensorMetadata]) -> str:
    return json.dumps(
        {
            name: {
                "dtype": str(stored.dtype).removeprefix("torch."),
                "shape": stored.shape,
                "chunks": [{"file": c.file, "offsets": c.offsets, "shape": c.shape} for c in stored.chunks],
            }
            for name, stored in index.items()
        }
    )


def local_save_plan(tensors: Mapping[str, Tensor], is_coordinator: bool) -> SavePlan:
    """Plan which chunks this rank writes. tensors: may be DTensors."""
    return create_default_local_save_plan(dict(tensors), is_coordinator)


def local_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the local shard of every tensor."""
    return {name: to_local(t) for name, t in tensors.items()}


class Planner(DefaultSavePlanner):
    """Planner that follows a local_save_plan and writes this rank's local tensors or copies of them."""

    def __init__(self, plan: SavePlan, contents: Mapping[str, Tensor]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.plan = plan
        self.contents = contents

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.contents[write_item.index.fqn]


class ShardWriter(StorageWriter):
    """Storage writer that writes one safetensors file per rank, and the index."""

    def __init__(self, folder: Path, commit: Callable[[dict[str, File]], None]):
        """commit: called on the coordinator with the files of all ranks, after all files are written."""
        self.folder = folder
        self.commit = commit
        self.rank = 0

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"rank-{self.rank:05d}.safetensors"
        chunks, entries = [], []
        for item in plan.items:
            data, pieces = item.tensor_data, lambda item=item: (planner.resolve_data(item),)
            chunks.append(chunk := Chunk(name, tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
            key = chunk.key(item.index.fqn, tuple(data.size))
            entries.append(TensorWrite(key, data.properties.dtype, chunk.shape, pieces))
        results = []
        if entries:
            file = retry_transient(lambda: write_safetensors(self.folder / name, entries, {}))
            results = [
                WriteResult(item.index, entry.num_bytes, (chunk, file))
                for item, entry, chunk in zip(plan.items, entries, chunks, strict=True)
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files, chunks = {}, {}
        for result in itertools.chain.from_iterable(results):
            chunk, file = result.storage_data
            files[chunk.file] = file
            chunks.setdefault(result.index.fqn, []).append(chunk)
        index = {
            name: TensorMetadata(tensor.properties.dtype, tuple(tensor.size), tuple(chunks[name]))
            for name, tensor in metadata.state_dict_metadata.items()
        }
        files[INDEX] = retry_transient(lambda: write_file(self.folder / INDEX, index_text(index).encode()))
        self.commit(files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


# ---------------------------------------------------------------- loading


def read_index(folder: Path) -> dict[str, TensorMetadata]:
    """Return tensor name -> metadata. Raises CorruptError if index.json is invalid or names a file outside the folder."""
    text = read_text(folder / INDEX, _LARGEST_INDEX)
    try:
        return {name: _stored(raw) for name, raw in json.loads(text).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptError(f"{INDEX} is not a valid index of tensors") from None


def _stored(raw: Mapping[str, Any]) -> TensorMetadata:
    shape = _integers(raw["shape"])
    chunks = tuple(Chunk(c["file"], _integers(c["offsets"]), _integers(c["shape"])) for c in raw["chunks"])
    for chunk in chunks:
        require_plain_filename(chunk.file, INDEX)
        if not len(chunk.offsets) == len(chunk.shape) == len(shape):
            raise ValueError
    if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        raise ValueError
    return TensorMetadata(_DTYPES[raw["dtype"]], shape, chunks)


def _integers(raw: Any) -> tuple[int, ...]:
    if not all(type(n) is int and 0 <= n < 2**63 for n in raw):
        raise ValueError
    return tuple(raw)


class ShardReader(StorageReader):
    """Storage reader that reads only the ranges that this rank needs. Raises CorruptError."""

    def __init__(self, folder: Path, index: Mapping[str, TensorMetadata]):
        self.folder = folder
        self.index = index

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=stored.dtype),
                    size=torch.Size(stored.shape),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape))
                        for chunk in stored.chunks
                    ],
                )
                for name, stored in self.index.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[str, list] = {}
        for item in plan.items:
            wanted.setdefault(self._chunk(item.storage_index).file, []).append(item)
        for file, items in wanted.items():
            try:
                with safe_open(self.folder / file, framework="pt") as tensors:
                    for item in items:
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(self._read(tensors, item))
                        planner.commit_tensor(item, target)
            except (SafetensorError, OSError, ValueError) as error:
                raise CorruptError(f"{file}: {error}") from None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _chunk(self, index: MetadataIndex) -> Chunk:
        chunks = self.index[index.fqn].chunks
        offsets = tuple(index.offset or ())
        if index.index is not None and chunks[index.index].offsets == offsets:
            return chunks[index.index]
        return next(chunk for chunk in chunks if chunk.offsets == offsets)

    def _read(self, tensors: Any, item: Any) -> Tensor:
        ranges = zip(item.storage_offsets, item.lengths, strict=True)
        slices = tuple(slice(start, start + length) for start, length in ranges)
        return self.read_chunk(tensors, item.storage_index.fqn, self._chunk(item.storage_index), slices)

    def read_chunk(self, tensors: Any, name: str, chunk: Chunk, ranges: tuple[slice, ...]) -> Tensor:
        """Return ranges of a chunk from its open file."""
        key = chunk.key(name, self.index[name].shape)
        return tensors.get_slice(key)[ranges] if ranges else tensors.get_tensor(key)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def read_rows(folder: Path, name: str, stored: TensorMetadata, start: int, stop: int) -> Tensor:
    """Read rows [start, stop) of a tensor from its chunks."""
    rows = torch.empty(stop - start, *stored.shape[1:], dtype=stored.dtype)
    for chunk in stored.chunks:
        first, last = max(start, chunk.offsets[0]), min(stop, chunk.offsets[0] + chunk.shape[0])
        if first >= last or 0 in chunk.shape:
            continue
        source = [slice(first - chunk.offsets[0], last - chunk.offsets[0]), *(slice(0, n) for n in chunk.shape[1:])]
        target = [slice(first - start, last - start)]
        target += [slice(o, o + n) for o, n in zip(chunk.offsets[1:], chunk.shape[1:], strict=True)]
        try:
            # The file is opened for each range, because mapped pages count as memory of the process.
            with safe_open(folder / chunk.file, framework="pt") as tensors:
                rows[tuple(target)] = tensors.get_slice(chunk.key(name, stored.shape))[tuple(source)]
        except (SafetensorError, OSError) as error:
            raise CorruptError(f"{chunk.file}: {error}") from None
    return rows

"""Storage of sharded tensors in safetensors files with a JSON index. torch.distributed.checkpoint writes them through
ShardWriter. torch's own writer is not used because its files contain pickles, and loading a pickle can run code.

    rank-00000.safetensors ...    chunks written by one rank; key "<name>": a full tensor, key "<name>@<offsets>": a part
    index.json                    dtype, shape and chunks of each tensor
"""

import contextlib
import errno
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer.base.system import console
from trainer.base.system.files import HashingFile, describe
from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import CorruptError, File

INDEX = "index.json"
_LARGEST_INDEX = 2**30
_MAX_DIMS = 8

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
    """Function that yields the tensor's content in row-major order. It is called when the file is written."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: Path, entries: Sequence[TensorWrite], metadata: Mapping[str, str]) -> File:
    """Stream tensors to a file, sync it, and read it back to verify it. Return its size and hash. Raises OSError."""
    end, header = 0, {"__metadata__": dict(metadata)} if metadata else {}
    for entry in entries:
        start, end = end, end + entry.num_bytes
        dtype = SAFETENSORS_NAMES[entry.dtype]
        header[entry.name] = {"dtype": dtype, "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with contextlib.closing(HashingFile(path)) as file:
        for block in _blocks(len(text).to_bytes(8, "little") + text, entries):
            file.write(block)
    return manifest.verify_written(path, File(**file.close()))


def _blocks(head: bytes, entries: Iterable[TensorWrite]) -> Iterator[memoryview]:
    yield memoryview(head)
    for entry in entries:
        for piece in entry.pieces():
            assert piece.dtype == entry.dtype, entry.name
            flat = piece.detach().to("cpu").contiguous().flatten()
            if flat.numel():
                yield memoryview(flat.view(torch.uint8).numpy())


def retry_transient(write: Callable[[], Any]) -> Any:
    """Call `write` and return its result. Retry the call after transient errors. Raises OSError."""
    for attempt in itertools.count(1):
        try:
            return write()
        except OSError as error:
            if error.errno not in _TRANSIENT_ERRNOS or attempt == _ATTEMPTS:
                raise
            console.warning(f"{describe(error)}; attempt {attempt} of {_ATTEMPTS} failed; retrying")
            time.sleep(0.25 * 2**attempt)


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

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def index_text(index: Mapping[str, TensorMetadata]) -> str:
    entries = {name: asdict(stored) for name, stored in index.items()}
    return json.dumps(entries, default=lambda dtype: str(dtype).removeprefix("torch."))


def local_save_plan(tensors: Mapping[str, Tensor]) -> SavePlan:
    """Return a plan of the chunks that this rank can write: its shards, and all tensors that are not sharded."""
    return create_default_local_save_plan(dict(tensors), False)


class Planner(DefaultSavePlanner):
    """A SavePlanner whose plan local_save_plan made. Its state dict contains this rank's local tensors or copies of them."""

    def __init__(self, plan: SavePlan):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.plan = plan

    def create_local_plan(self) -> SavePlan:
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.state_dict[write_item.index.fqn]


class ShardWriter(FileSystemWriter):
    """Storage writer for torch.distributed.checkpoint that writes one safetensors file per rank and one index."""

    def __init__(self, folder: Path, commit: Callable[[dict[str, File]], None]):
        """commit: function that the coordinator calls with the files of all ranks after all files are written."""
        super().__init__(folder)
        self.folder = folder
        self.commit = commit

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # torch's method would create the folder again if a newer run has removed it

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
        files[INDEX] = retry_transient(lambda: manifest.write_file(self.folder / INDEX, index_text(index).encode()))
        self.commit(files)


# ---------------------------------------------------------------- loading


def read_index(folder: Path) -> dict[str, TensorMetadata]:
    """Return tensor name -> metadata. Raises CorruptError if index.json is invalid or refers to a file outside the folder."""
    text = manifest.read_text(folder / INDEX, _LARGEST_INDEX)
    try:
        return {name: _stored(raw) for name, raw in json.loads(text).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptError(f"{INDEX} is not a valid index of tensors") from None


def _stored(raw: Mapping[str, Any]) -> TensorMetadata:
    shape = _integers(raw["shape"])
    chunks = tuple(Chunk(c["file"], _integers(c["offsets"]), _integers(c["shape"])) for c in raw["chunks"])
    for chunk in chunks:
        manifest.require_plain_filename(chunk.file, INDEX)
        if not len(chunk.offsets) == len(chunk.shape) == len(shape):
            raise ValueError
    corners: Counter[tuple[int, ...]] = Counter()
    for chunk in chunks:
        corners.update(_corners(chunk.offsets, chunk.shape))
    if corners != _corners((0,) * len(shape), shape):
        raise ValueError
    return TensorMetadata(_DTYPES[raw["dtype"]], shape, chunks)


def _corners(offsets: Sequence[int], shape: Sequence[int]) -> Counter[tuple[int, ...]]:
    """Return corner of a box -> sign. The signs alternate along each edge. Boxes cover a larger box exactly once if and only if
    the sums of their signs equal those of the larger box, because two functions with the same mixed derivative are equal."""
    corners: Counter[tuple[int, ...]] = Counter()
    for ends in itertools.product((0, 1), repeat=len(shape)):
        corners[tuple(o + n * end for o, n, end in zip(offsets, shape, ends, strict=True))] += (-1) ** sum(ends)
    return corners


def _integers(raw: Any) -> tuple[int, ...]:
    if len(raw) > _MAX_DIMS or not all(type(n) is int and 0 <= n < 2**63 for n in raw):
        raise ValueError
    return tuple(raw)


Read = Callable[[Any, str, tuple[slice, ...]], Tensor]
"""Function that reads a slice of a tensor. Arguments: the open safetensors file, the tensor's key, one range per dim."""


def read_slice(tensors: Any, key: str, ranges: tuple[slice, ...]) -> Tensor:
    return tensors.get_slice(key)[ranges] if ranges else tensors.get_tensor(key)


@torch.no_grad()
def read_regions(
    folder: Path,
    index: Mapping[str, TensorMetadata],
    targets: Mapping[str, tuple[Tensor, Sequence[slice]]],
    read: Read = read_slice,
) -> None:
    """Copy a region of each stored tensor into a target tensor of the region's shape, without reading the rest.
    targets: tensor name -> (target tensor, its region in the stored tensor). Raises CorruptError."""
    for name, (target, region) in targets.items():
        for chunk in index[name].chunks:
            bounds = zip(region, chunk.offsets, chunk.shape, strict=True)
            common = [(max(r.start, first), min(r.stop, first + size)) for r, first, size in bounds]
            if not all(start < stop for start, stop in common):
                continue
            key, ranges = chunk.key(name, index[name].shape), _ranges(common, chunk.offsets)
            try:
                # The file is opened for each chunk, because mapped pages of an open file count as memory of the process.
                with safe_open(folder / chunk.file, framework="pt") as tensors:
                    part = read(tensors, key, ranges)
                    destination = target[_ranges(common, [r.start for r in region])]
                    if (part.dtype, part.shape) != (index[name].dtype, destination.shape):
                        raise CorruptError(f"{chunk.file}: {key} has another dtype or shape than in {INDEX}")
                    destination.copy_(part)
            except (SafetensorError, OSError, ValueError, IndexError) as error:
                raise CorruptError(f"{chunk.file}: {error}") from None


def _ranges(bounds: Sequence[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    """Return one slice per dim: its bounds (start, stop) minus its origin."""
    return tuple(slice(start - o, stop - o) for (start, stop), o in zip(bounds, origin, strict=True))


def read_rows(folder: Path, name: str, stored: TensorMetadata, start: int, stop: int) -> Tensor:
    """Return rows [start, stop) of a stored tensor. stored: its entry in the index."""
    region = (slice(start, stop), *(slice(0, size) for size in stored.shape[1:]))
    rows = torch.empty([r.stop - r.start for r in region], dtype=stored.dtype)
    read_regions(folder, {name: stored}, {name: (rows, region)})
    return rows

"""Writing of tensors in chunks of rows: memory use does not grow with the size of the model."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from trainer.base.system.units import GIB
from trainer.checkpoint.tensor_files import TensorWrite

SHARD_BYTES = 5 * GIB
"""Maximum size of a file with weights, unless another one is asked for."""
_CHUNK_BYTES = 2**25
Progress = Callable[[int], Any]
"""Callback that receives the number of bytes written since the previous call."""


def ignore_progress(num_bytes: int) -> None:
    pass


def read_in_chunks(
    read: Callable[[int, int], Tensor], shape: tuple[int, ...], dtype: torch.dtype, group: int, progress: Progress
) -> Iterator[Tensor]:
    """Yield a tensor in chunks of rows, of about _CHUNK_BYTES.

    Args:
        read: Function that returns rows [start, stop).
        shape: Of the tensor.
        dtype: Of the chunks.
        group: Number of rows that one chunk must contain together: head_dim, if rows of a head are permuted.
        progress: Receives the bytes of each chunk.
    """
    row_bytes = max(1, torch.Size(shape[1:]).numel() * dtype.itemsize)
    num_rows = max(1, _CHUNK_BYTES // row_bytes // group) * group
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

"""Memory and initial values for a model that was parallelised on the meta device."""

import hashlib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Generator, Tensor, nn

from trainer.runtime.dtensor import local_region

_ROWS = 1024
"""Rows that one generator draws. Part of the definition of the initial weights: another number gives other weights."""


@torch.no_grad()
def initialize(model: nn.Module, device: torch.device, seed: int, loaded: Collection[str] = ()) -> None:
    """Allocate the parameters and draw their values. loaded: names of those that get theirs from elsewhere; nothing is drawn for
    them.

    Every block of rows of every parameter has a generator of its own, seeded by (seed, name, block), on the CPU. So each
    rank draws just what its shard needs, and the weights are the same on any layout, world size and device.
    """
    model.to_empty(device=device)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for name, parameter in model.named_parameters():
            if name in loaded:
                continue
            local, shape, offset = local_region(parameter)
            if local.numel() == 0:
                continue
            last = offset[0] + local.shape[0]
            blocks = range(offset[0] // _ROWS, -(-last // _ROWS))
            draws = pool.map(lambda b, n=name, s=shape: _draw(model, n, s, b, seed), blocks)
            for block, rows in zip(blocks, draws, strict=True):
                start = max(block * _ROWS, offset[0])
                stop = min((block + 1) * _ROWS, last)
                columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:], strict=True))
                wanted = rows[(slice(start - block * _ROWS, stop - block * _ROWS), *columns)]
                local[start - offset[0] : stop - offset[0]].copy_(wanted)


def _draw(model: nn.Module, name: str, shape: tuple[int, ...], block: int, seed: int) -> Tensor:
    """Rows [block * _ROWS, ...) of the full parameter: fp32, on the CPU."""
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    generator = Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    rows = torch.empty(min(_ROWS, shape[0] - block * _ROWS), *shape[1:])
    with torch.no_grad():  # grad mode belongs to a thread
        model.init_parameter(name, rows, generator)
    return rows
